"""Encoded images to pixels: a fast way for whole JPEG files, a careful one for all else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tf_largebatch.core.errors import DataError

# From the shape of the whole image, int32 [3], to a window of it, int32 [4]: y, x, height, width.
ChooseWindow = Callable[[tf.Tensor], tf.Tensor]

_JPEG_START = b"\xff\xd8\xff"
_JPEG_END = b"\xff\xd9"


def decode_window(encoded: tf.Tensor, *, seed: tf.Tensor, choose_window: ChooseWindow) -> tf.Tensor:
    """Decodes a window of an image: uint8 `[height, width, 3]`, RGB.

    What begins and ends as a JPEG file is decoded inside the window only, by TensorFlow's ops:
    colour, greyscale and CMYK, baseline and progressive. All else goes through `decode_image`,
    one row at a time in Python, whose errors name the row. What TensorFlow's ops find in the fast
    way, where a file begins and ends well and its headers are rotten, carries no row number, as
    an op's error cannot be caught in a graph; `find_unreadable_rows` finds such rows. Rotten
    pixels between good headers and a good end are no error to libjpeg: it fills them in grey and
    warns on standard error.

    Args:
        encoded: string `[]`.
        seed: int64 `[2]`; the second number is the row's, which errors name.
        choose_window: called while tracing, with ops only.
    """

    def decode_jpeg() -> tf.Tensor:
        window = choose_window(tf.io.extract_jpeg_shape(encoded))
        return tf.io.decode_and_crop_jpeg(encoded, window, channels=3)

    def decode_other() -> tf.Tensor:
        # Not stateful: the result depends on the inputs alone, and may be pruned and reordered.
        image = tf.numpy_function(_decode_for_row, [encoded, seed[1]], tf.uint8, stateful=False)
        image.set_shape([None, None, 3])
        y, x, height, width = tf.unstack(choose_window(tf.shape(image)))
        return image[y : y + height, x : x + width]

    return tf.cond(_is_whole_jpeg(encoded), decode_jpeg, decode_other)


def _is_whole_jpeg(encoded: tf.Tensor) -> tf.Tensor:
    # The last two bytes can be asked for only where there are two.
    begins = tf.strings.substr(encoded, 0, 3) == _JPEG_START
    from_end = tf.minimum(tf.strings.length(encoded), 2)
    return begins & (tf.strings.substr(encoded, -from_end, 2) == _JPEG_END)


def _decode_for_row(encoded: Any, row: np.int64) -> npt.NDArray[np.uint8]:
    try:
        # Bytes in a graph, but an array without dimensions where ops run eagerly.
        return decode_image(np.asarray(encoded, dtype=np.object_).item())
    except DataError as error:
        raise DataError(f"row {row}: {error}") from None  # TensorFlow would print both tracebacks


def decode_image(encoded: bytes) -> npt.NDArray[np.uint8]:
    """Decodes a JPEG, PNG, GIF (its first frame) or BMP file: uint8 `[height, width, 3]`, RGB.

    The first bytes decide which it is, not a name. 16-bit PNG keeps the upper 8 bits, an alpha
    channel is dropped, and bytes behind the end of a file are ignored; a JPEG file without its
    end marker is refused, as it cannot be told from one that was cut off. EXIF orientation is not
    applied, as in most pipelines for ImageNet.

    Raises:
        DataError: the bytes are none of these, or are broken; holds the decoder's reason.
    """
    if not encoded:
        raise DataError("the encoded image is empty (0 bytes).")
    try:
        with tf.device("CPU:0"):
            return _decode_bmp(encoded) if encoded[:2] == b"BM" else _decode_other(encoded)
    except tf.errors.OpError as error:
        is_cut = encoded.startswith(_JPEG_START) and not encoded.endswith(_JPEG_END)
        hint = " It is a JPEG file without its end, probably cut off." if is_cut else ""
        raise DataError(
            f"the encoded image of {len(encoded)} bytes, which begin with {encoded[:8]!r}, cannot "
            f"be decoded: {reason_of(error)}{hint}"
        ) from error


def _decode_other(encoded: bytes) -> Any:
    return tf.io.decode_image(encoded, channels=3, expand_animations=False).numpy()


def _decode_bmp(encoded: bytes) -> Any:
    image = tf.io.decode_bmp(encoded).numpy()  # refuses any other number of channels than its own
    return np.repeat(image, 3, axis=-1) if image.shape[-1] == 1 else image[..., :3]


def reason_of(error: tf.errors.OpError) -> str:
    """TensorFlow's message without the names of ops and the traceback of the Python side."""
    lines = [line for line in error.message.splitlines() if "DataError: " in line]
    text = lines[0].split("DataError: ", 1)[1] if lines else error.message.splitlines()[0]
    text = text.split("{{function_node", 1)[-1].split("}} ", 1)[-1]
    return text.split(" [Op:", 1)[0].strip()
