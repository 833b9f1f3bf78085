"""Files that ImageNet and its kind are known for, and broken ones."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from tests.data._images import encoded, jpeg, photograph
from tf_largebatch.core.errors import DataError
from tf_largebatch.data._image_checks import UnreadableRow, find_unreadable_rows
from tf_largebatch.data._image_decoding import decode_image
from tf_largebatch.data._image_folder import ImageFolderSource
from tf_largebatch.data._image_pipeline import RandomResizedCrop, ResizeAndCenterCrop

PHOTO = photograph(48, 64)

GOOD = {
    "colour": jpeg(48, 64),
    "full chroma": encoded(PHOTO, "JPEG", quality=95, subsampling=0),
    "progressive": encoded(PHOTO, "JPEG", quality=95, progressive=True),
    "greyscale": encoded(PHOTO.convert("L"), "JPEG", quality=95),
    "CMYK": encoded(PHOTO.convert("CMYK"), "JPEG", quality=95),
    "PNG": encoded(PHOTO, "PNG"),
    "grey PNG": encoded(PHOTO.convert("L"), "PNG"),
    "palette PNG": encoded(PHOTO.convert("P"), "PNG"),
    "RGBA PNG": encoded(PHOTO.convert("RGBA"), "PNG"),
    "GIF": encoded(PHOTO, "GIF"),
    "moving GIF": encoded(
        PHOTO.convert("P"), "GIF", save_all=True, append_images=[photograph(48, 64, seed=1)]
    ),
    "BMP": encoded(PHOTO, "BMP"),
    "grey BMP": encoded(PHOTO.convert("L"), "BMP"),
    "BMP of 32 bits": encoded(PHOTO.convert("RGBA"), "BMP"),
    "bytes behind the end": jpeg(48, 64) + b"\0\r\n",
}


def decoded_by_row_function(image: bytes) -> np.ndarray:
    """At the size of the image, where neither resizing nor cutting changes a pixel."""
    crop = ResizeAndCenterCrop(48, resize_size=48)
    return crop(tf.constant([0, 17], tf.int64), tf.constant(image)).numpy()


@pytest.mark.parametrize("kind", GOOD)
def test_every_kind_of_file_decodes_to_what_pillow_decodes(kind: str) -> None:
    oracle = np.asarray(Image.open(io.BytesIO(GOOD[kind])).convert("RGB"))[:, 8:56].astype(int)
    difference = np.abs(decoded_by_row_function(GOOD[kind]) - oracle)
    # TensorFlow's default JPEG transform is libjpeg's fast one, Pillow's the exact one; all else is
    # equal.
    is_jpeg = GOOD[kind].startswith(b"\xff\xd8")
    assert difference.max() <= (8 if is_jpeg else 0)
    assert difference.mean() <= 1.5


def test_png_of_16_bits_keeps_the_upper_eight() -> None:
    grey = np.arange(48 * 48, dtype=np.uint16).reshape(48, 48) * 28
    image = encoded(Image.fromarray(grey), "PNG")
    assert np.array_equal(decoded_by_row_function(image)[..., 1], grey >> 8)


BROKEN = {
    "empty": (b"", r"is empty \(0 bytes\)"),
    "one byte": (b"\xff", "Unknown image file format"),
    "text": (b"<html>404</html>", r"of 16 bytes, which begin with b'<html>40', cannot be decoded"),
    "cut JPEG": (jpeg()[:1500], "a JPEG file without its end, probably cut off"),
    "cut PNG": (GOOD["PNG"][:1500], "Invalid PNG data"),
    "TIFF": (encoded(PHOTO, "TIFF"), "Unknown image file format"),
}


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("crop", [RandomResizedCrop(16), ResizeAndCenterCrop(16, resize_size=16)])
def test_a_broken_file_ends_in_an_error_that_names_the_row(kind: str, crop) -> None:
    image, message = BROKEN[kind]
    rows = tf.data.Dataset.from_tensors(([3, 170_001], image, 0)).map(
        lambda seed, image, label: crop(tf.cast(seed, tf.int64), image, label)
    )
    with pytest.raises(tf.errors.OpError, match=f"DataError: row 170001: .*{message}"):
        next(iter(rows))


def test_decode_image_raises_typed_errors() -> None:
    with pytest.raises(DataError, match=r"begin with b'not an i'.*Unknown image file format"):
        decode_image(b"not an image")


def test_a_source_is_scanned_for_rows_that_fail(tmp_path: Path) -> None:
    header_lost = jpeg()[:3] + bytes(200) + jpeg()[203:]
    cut = jpeg()[:1500]
    files = {"a/0.jpg": jpeg(), "a/1.jpg": header_lost, "a/2.jpg": GOOD["PNG"], "b/0.jpg": cut}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    reports: list[tuple[int, int]] = []
    found = find_unreadable_rows(
        ImageFolderSource(tmp_path), progress=lambda done, total: reports.append((done, total))
    )
    assert [(row.row, row.description) for row in found] == [
        (1, f"{tmp_path}/a/1.jpg"),
        (3, f"{tmp_path}/b/0.jpg"),
    ]
    assert "Invalid JPEG data" in found[0].reason
    assert found[1].reason.startswith("row 3: the encoded image of 1500 bytes")
    assert reports == [(4, 4)]


def test_a_scan_reports_progress_and_takes_other_row_functions_and_sources() -> None:
    class Texts:
        element_spec = tf.TensorSpec([], tf.string)

        def __len__(self) -> int:
            return 1100

        def gather(self, rows: tf.Tensor) -> tf.Tensor:
            return tf.strings.as_string(rows)

    def fails_at_700(seed: tf.Tensor, text: tf.Tensor) -> tf.Tensor:
        check = tf.debugging.assert_none_equal(text, "700", message="seven hundred")
        with tf.control_dependencies([check]):
            return tf.identity(seed[1])

    done: list[int] = []
    found = find_unreadable_rows(
        Texts(), fails_at_700, progress=lambda count, total: done.append(count)
    )
    assert [(row.row, row.description) for row in found] == [(700, "row 700")]
    assert isinstance(found[0], UnreadableRow) and "seven hundred" in found[0].reason
    assert done == [512, 1024, 1100]
