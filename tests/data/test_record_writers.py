"""Packed files, read back by TensorFlow's and array_record's own readers."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from array_record.python.array_record_module import ArrayRecordReader
from PIL import Image

from tests.data._packing import (
    WRITERS,
    BytesSource,
    NamedSource,
    both_formats,
    contents,
    random_bytes,
)
from tf_largebatch.core.errors import ConfigurationError, DataError
from tf_largebatch.data import ArraySource
from tf_largebatch.data._record_writers import write_array_records, write_tfrecords


def jpeg(colour: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (20, 15), (colour, 30, 200)).save(file, "JPEG")
    return file.getvalue()


def records_of(path: Path | str) -> list[bytes]:
    """By the readers of the libraries that define the formats."""
    if str(path).endswith(".tfrecord"):
        return list(tf.data.TFRecordDataset(str(path)).as_numpy_iterator())
    reader = ArrayRecordReader(str(path))
    return reader.read(list(range(reader.num_records())))


@both_formats
@pytest.mark.parametrize(("num_rows", "num_shards"), [(1, 1), (37, 5), (16, 16), (50, 1)])
def test_the_records_are_the_rows_in_order(
    tmp_path: Path, record_format: str, num_rows: int, num_shards: int
) -> None:
    images, labels = random_bytes(num_rows), [7 * i % 5 for i in range(num_rows)]
    images[0] = b""
    packed = WRITERS[record_format](
        BytesSource(images, labels),
        tmp_path / "new" / "folder",
        name="train",
        num_shards=num_shards,
        check_images=False,
    )
    files = [Path(file) for file in packed.files]
    assert [file.name for file in files] == [
        f"train-{s:05d}-of-{num_shards:05d}.{record_format}" for s in range(num_shards)
    ]
    assert set(os.listdir(files[0].parent)) == {"train.json", *(file.name for file in files)}
    assert (packed.num_rows, packed.num_kept) == (num_rows, 0)
    assert packed.size_bytes == sum(file.stat().st_size for file in files)

    shards = [records_of(file) for file in files]
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    parsed = [
        tf.io.parse_single_example(
            record,
            {
                "image/encoded": tf.io.FixedLenFeature([], tf.string),
                "image/class/label": tf.io.FixedLenFeature([], tf.int64),
            },
        )
        for shard in shards
        for record in shard
    ]
    assert [row["image/encoded"].numpy() for row in parsed] == images
    assert [row["image/class/label"].numpy() for row in parsed] == labels


@both_formats
def test_names_of_files_and_classes_are_kept(tmp_path: Path, record_format: str) -> None:
    source = NamedSource(random_bytes(3), [0, 1, 1])
    (file,) = WRITERS[record_format](source, tmp_path, check_images=False).files
    examples = [tf.train.Example.FromString(record) for record in records_of(file)]
    names = [example.features.feature["image/filename"].bytes_list.value for example in examples]
    assert [list(name) for name in names] == [[b"0.jpg"], [b"1.jpg"], [b"2.jpg"]]
    manifest = json.loads((tmp_path / "data.json").read_text())
    assert manifest["class_names"] == ["cat", "dog"]
    assert (manifest["num_rows"], manifest["num_shards"]) == (3, 1)


def test_array_records_are_read_one_by_one(tmp_path: Path) -> None:
    (file,) = write_array_records(
        BytesSource(random_bytes(3), [0] * 3), tmp_path, check_images=False
    ).files
    options = ArrayRecordReader(file).writer_options_string().split(",")
    assert {"group_size:1", "uncompressed"} <= set(options)


def test_the_number_of_shards_follows_the_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tf_largebatch.data._pack_plan.SHARD_BYTES", 10_000)
    source = BytesSource([bytes(1_000)] * 73, [0] * 73)
    assert len(write_tfrecords(source, tmp_path, check_images=False).files) == 7


def test_progress_ends_with_all_rows_and_can_stop_the_run(tmp_path: Path) -> None:
    source = BytesSource(random_bytes(64), [0] * 64, seconds=0.1)
    seen: list[tuple[int, int]] = []

    def interrupt(done: int, total: int) -> None:
        seen.append((done, total))
        if list(tmp_path.glob("data-*")):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_tfrecords(source, tmp_path, num_shards=4, check_images=False, progress=interrupt)
    assert not [path for path in os.listdir(tmp_path) if path.startswith(".")]
    assert 1 <= len(list(tmp_path.glob("data-*"))) < 4

    packed = write_tfrecords(
        source, tmp_path, check_images=False, progress=lambda *counts: seen.append(counts)
    )
    assert 1 <= packed.num_kept < 4
    assert {total for _, total in seen} == {64}
    assert seen[-1] == (64, 64)


@both_formats
def test_broken_images_are_all_named_and_other_shards_are_finished(
    tmp_path: Path, record_format: str
) -> None:
    images = [jpeg(colour) for colour in range(40)]
    good = {row: images[row] for row in (3, 21, 25)}
    images[3], images[21], images[25] = b"no image", images[21][:300], b""
    write = WRITERS[record_format]
    with pytest.raises(DataError) as caught:
        write(NamedSource(images, [0] * 40), tmp_path, num_shards=4)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("3 of the images cannot be decoded")
    assert [line.split(": ")[0] for line in lines[1:]] == [
        f"  row {row} (/photos/cat/{row}.jpg)" for row in (3, 21, 25)
    ]
    assert all(len(line.split(": ", 1)[1]) > 10 for line in lines[1:])
    finished = {path.name for path in tmp_path.glob("data-*")}
    assert finished == {f"data-{s:05d}-of-00004.{record_format}" for s in (1, 3)}
    assert not list(tmp_path.glob(".*"))

    # With so few rows all are compared, so that the whole images make another source.
    for row, image in good.items():
        images[row] = image
    write(NamedSource(images, [0] * 40), tmp_path / "good", num_shards=4)
    for name in finished:
        assert (tmp_path / name).read_bytes() == (tmp_path / "good" / name).read_bytes()


def test_a_repaired_image_is_packed_by_the_same_call(tmp_path: Path) -> None:
    images = [jpeg(row % 200) for row in range(200)]
    images[1] = b"no image"  # of 200 rows, 64 spread evenly are compared: 0, 3, 6, ...
    with pytest.raises(DataError, match=r"row 1: .+"):
        write_tfrecords(BytesSource(images, [0] * 200), tmp_path, num_shards=10)
    images[1] = jpeg(1)
    packed = write_tfrecords(BytesSource(images, [0] * 200), tmp_path, num_shards=10)
    assert packed.num_kept == 9
    assert sum(len(records_of(file)) for file in packed.files) == 200


def _other_label(source: BytesSource) -> None:
    source._labels[0] = 1


def _other_bytes(source: BytesSource) -> None:
    source._images[-1] += b"!"


def _fewer_rows(source: BytesSource) -> None:
    source._images, source._labels = source._images[1:], source._labels[1:]


def _other_classes(source: BytesSource) -> None:
    source.class_names = ("cat", "cow")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        (_other_label, {}, "fingerprint: '[0-9a-f]{64}' there, '[0-9a-f]{64}' now"),
        (_other_bytes, {}, "fingerprint"),
        (_fewer_rows, {}, "num_rows: 30 there, 29 now"),
        (_other_classes, {}, r"class_names: 2 names 'cat', 'dog', .* there, 2 names 'cat', 'cow'"),
        (None, {"num_shards": 3}, "num_shards: 2 there, 3 now"),
        (None, {"record_format": "array_record"}, "'tfrecord' there, 'array_record' now"),
    ],
)
def test_shards_of_something_else_are_refused(
    tmp_path: Path,
    change: Callable[[BytesSource], None] | None,
    arguments: dict[str, Any],
    message: str,
) -> None:
    source = NamedSource(random_bytes(30), [0] * 30)
    write_tfrecords(source, tmp_path, num_shards=2, check_images=False)
    before = contents(tmp_path)
    if change:
        change(source)
    write = WRITERS[arguments.pop("record_format", "tfrecord")]
    with pytest.raises(DataError, match=message):
        write(source, tmp_path, check_images=False, **arguments)
    assert contents(tmp_path) == before
    # Under another name there is room for it.
    write(source, tmp_path, name="other", check_images=False, **arguments)
    assert before.items() <= contents(tmp_path).items()


def test_shards_without_a_manifest_and_foreign_manifests_are_refused(tmp_path: Path) -> None:
    source = BytesSource(random_bytes(3), [0] * 3)
    (tmp_path / "data-00000-of-00009.array_record").touch()
    with pytest.raises(DataError, match=r"data-00000-of-00009.array_record is there, but not"):
        write_tfrecords(source, tmp_path, check_images=False)
    for text in ("", "[]", '{"format_version": 1}', '{"format_version": 2, "num_rows": 3}'):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(DataError, match=r"is not the manifest|has format version 2"):
            write_tfrecords(source, tmp_path, name="other", check_images=False)


@pytest.mark.parametrize(
    ("source", "arguments", "message"),
    [
        (ArraySource(np.zeros(3)), {}, r"those of ArraySource are TensorSpec\(shape=\(\)"),
        (ArraySource((np.zeros((3, 2)), np.zeros(3))), {}, r"must be \(encoded image, label\)"),
        ("folder", {}, "source must have __len__, element_spec and gather, but is 'folder'"),
        (None, {"num_shards": 4}, r"num_shards must be in \[1, 3\], but is 4"),
        (None, {"num_shards": 0}, "num_shards must be in"),
        (None, {"name": "a/b"}, "name must be letters"),
        (None, {"name": "*"}, "name must be letters"),
        (None, {"directory": "gs://bucket/x"}, "directory must be local"),
    ],
)
def test_wrong_arguments(
    tmp_path: Path, source: Any, arguments: dict[str, Any], message: str
) -> None:
    source = BytesSource(random_bytes(3), [0] * 3) if source is None else source
    directory = arguments.pop("directory", tmp_path)
    with pytest.raises(ConfigurationError, match=message):
        write_tfrecords(source, directory, **arguments)
    assert not os.listdir(tmp_path)


def test_no_array_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "array_record.python.array_record_module", None)
    source = BytesSource(random_bytes(3), [0] * 3)
    with pytest.raises(ConfigurationError, match=r"pip install 'tf_largebatch\[records\]'"):
        write_array_records(source, tmp_path)


def test_a_row_that_cannot_be_read_and_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    class Unreadable(BytesSource):
        def take(self, rows: np.ndarray) -> Any:
            if 17 in rows:
                raise DataError("row 17: the file is gone.")
            return super().take(rows)

    source = Unreadable(random_bytes(1000), [0] * 1000)
    with pytest.raises(
        DataError, match=r"^Rows 16 to 31 cannot be read: row 17: the file is gone\.$"
    ):
        write_tfrecords(source, tmp_path, check_images=False)
    assert os.listdir(tmp_path) == ["data.json"]
    (tmp_path / ".data.lock").mkdir()
    with pytest.raises(DataError, match=r"cannot be written to: .*Is a directory"):
        write_tfrecords(source, tmp_path, check_images=False)
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"The folder .*/file/x cannot be made: Not a directory"):
        write_tfrecords(source, tmp_path / "file" / "x", check_images=False)


def test_two_runs_at_once(tmp_path: Path) -> None:
    source = BytesSource(random_bytes(48), [0] * 48, seconds=0.1)
    started = threading.Event()
    first = threading.Thread(
        target=write_tfrecords,
        args=(source, tmp_path),
        kwargs={"check_images": False, "progress": lambda *_: started.set()},
    )
    first.start()
    assert started.wait(10)
    with pytest.raises(DataError, match="Another process packs into"):
        write_tfrecords(source, tmp_path, check_images=False)
    first.join()
    assert write_tfrecords(source, tmp_path, check_images=False).num_kept == 1
    assert sorted(os.listdir(tmp_path)) == ["data-00000-of-00001.tfrecord", "data.json"]
