from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from absl import logging
from array_record.python.array_record_data_source import ArrayRecordDataSource
from array_record.python.array_record_module import ArrayRecordWriter

from tf_largebatch.core.errors import ConfigurationError, DataError
from tf_largebatch.data import RandomAccessSource
from tf_largebatch.data._array_record_source import ArrayRecordSource
from tf_largebatch.data._records import parse_image_examples

COUNTS = (5, 0, 1, 40)


def write(path: Path, records: list[bytes], options: str = "group_size:1") -> Path:
    writer = ArrayRecordWriter(str(path), options)
    for record in records:
        writer.write(record)
    writer.close()
    return path


def made_records(count: int, seed: int = 0) -> list[bytes]:
    """Of different lengths, the first empty, with zero bytes at their ends."""
    rng = np.random.default_rng(seed)
    return [rng.bytes(37 * i) + bytes(i) for i in range(count)]


def write_files(folder: Path, options: str = "group_size:1") -> tuple[list[Path], list[bytes]]:
    all_records = [made_records(count, seed) for seed, count in enumerate(COUNTS)]
    paths = [
        write(folder / f"part-{number}.array_record", records, options)
        for number, records in enumerate(all_records)
    ]
    return paths, [record for records in all_records for record in records]


def gathered(source: ArrayRecordSource, rows: list[int]) -> list[bytes]:
    return source.gather(tf.constant(rows, tf.int64)).numpy().tolist()


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    logged: list[str] = []
    monkeypatch.setattr(
        logging, "warning", lambda message, *values: logged.append(message % values)
    )
    return logged


def test_all_rows_in_order_as_written(tmp_path: Path, warnings: list[str]) -> None:
    paths, records = write_files(tmp_path)
    source = ArrayRecordSource(tmp_path / "part-*")
    assert isinstance(source, RandomAccessSource)
    assert len(source) == sum(COUNTS)
    assert source.element_spec == tf.TensorSpec([], tf.string)
    assert gathered(source, list(range(len(source)))) == records
    filled = [str(path) for path, count in zip(paths, COUNTS, strict=True) if count]
    assert records == list(ArrayRecordDataSource(filled))  # the library's own, as a second oracle
    assert gathered(source, []) == []
    assert warnings == []


@pytest.mark.parametrize("options", ["group_size:1", "group_size:4", "group_size:3,uncompressed"])
def test_random_rows_with_repeats_from_several_threads(tmp_path: Path, options: str) -> None:
    _, records = write_files(tmp_path, options)
    source = ArrayRecordSource(str(tmp_path / "part-*"))
    rows = np.random.default_rng(1).integers(0, len(records), [300, 16])
    dataset = tf.data.Dataset.from_tensor_slices(rows).map(source.gather, num_parallel_calls=8)
    assert dataset.element_spec == tf.TensorSpec([16], tf.string)
    for numbers, batch in zip(rows, dataset.as_numpy_iterator(), strict=True):
        assert batch.tolist() == [records[number] for number in numbers]


def test_a_list_keeps_its_order(tmp_path: Path) -> None:
    paths, _ = write_files(tmp_path)
    source = ArrayRecordSource([paths[3], paths[0]])
    assert gathered(source, [39, 40, 44]) == [
        made_records(40, 3)[39],
        made_records(5, 0)[0],
        made_records(5, 0)[4],
    ]


def test_images_and_labels(tmp_path: Path) -> None:
    def example(image: bytes, label: int) -> bytes:
        features = tf.train.Features(
            feature={
                "image/encoded": tf.train.Feature(bytes_list=tf.train.BytesList(value=[image])),
                "image/class/label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
            }
        )
        return tf.train.Example(features=features).SerializeToString()

    path = write(tmp_path / "images", [example(b"jpeg%d\0" % i, 10 + i) for i in range(4)])
    source = ArrayRecordSource(path, parse_fn=parse_image_examples)
    assert source.element_spec == (tf.TensorSpec([], tf.string), tf.TensorSpec([], tf.int64))
    images, labels = source.gather(tf.constant([3, 0], tf.int64))
    assert images.numpy().tolist() == [b"jpeg3\0", b"jpeg0\0"]
    assert labels.numpy().tolist() == [13, 10]


def test_describe_row(tmp_path: Path) -> None:
    paths, _ = write_files(tmp_path)
    source = ArrayRecordSource(paths)
    assert source.describe_row(4) == f"record 4 of {str(paths[0])!r}"
    assert source.describe_row(5) == f"record 0 of {str(paths[2])!r}"
    assert source.describe_row(45) == f"record 39 of {str(paths[3])!r}"


@pytest.mark.parametrize("row", [-1, 46])
def test_rows_out_of_range(tmp_path: Path, row: int) -> None:
    paths, _ = write_files(tmp_path)
    source = ArrayRecordSource(paths)
    with pytest.raises(
        DataError, match=f"no row {row} in a source of 46 rows; the rows are 0 to 45"
    ):
        source.read_records(np.asarray([0, row]))
    with pytest.raises(DataError, match=f"no row {row} in"):
        source.describe_row(row)


@pytest.mark.parametrize("options", ["group_size:1", "group_size:2"])
def test_a_corrupt_record_is_named_and_the_others_are_read(tmp_path: Path, options: str) -> None:
    records = [bytes([i]) * 3000 + os.urandom(3000) for i in range(8)]
    path = write(tmp_path / "file", records, options)
    data = bytearray(path.read_bytes())
    data[data.index(records[5][3000:3032])] ^= 1
    path.write_bytes(data)
    source = ArrayRecordSource(path)
    assert source.read_records(np.asarray([3, 0])) == [records[3], records[0]]
    with pytest.raises(DataError, match=r"ecords? \[?5\]? of '.*/file' cannot be read: .*hash"):
        source.read_records(np.asarray([5]))
    dataset = tf.data.Dataset.from_tensors([0, 5]).map(source.gather)
    with pytest.raises(tf.errors.OpError, match=r"of '.*/file' cannot be read"):
        next(iter(dataset))
    assert gathered(source, [7]) == [records[7]]


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", [os.urandom(30_000) for _ in range(4)]).read_bytes()
    path = tmp_path / "cut"
    for num_bytes in (0, 1, 40, 65_536, len(whole) // 2, len(whole) - 65_536, len(whole) - 1):
        path.write_bytes(whole[:num_bytes])
        with pytest.raises(DataError, match=r"'.*/cut' cannot be read as an ArrayRecord file, or"):
            ArrayRecordSource(path)


def test_what_is_no_array_record_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a", [b"a"])
    with tf.io.TFRecordWriter(str(tmp_path / "b")) as writer:
        writer.write(os.urandom(100_000))
    with pytest.raises(DataError, match=r"'.*/b' cannot be read as an ArrayRecord file"):
        ArrayRecordSource(tmp_path / "*")
    with pytest.raises(DataError, match="does not exist"):
        ArrayRecordSource(tmp_path / "c")
    empty = write(tmp_path / "empty", [])
    with pytest.raises(DataError, match="ArrayRecordSource has no rows"):
        ArrayRecordSource(empty)


def test_a_scheme_that_the_library_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ram://` is TensorFlow's: the look-up finds the file, and array_record does not."""
    with tf.io.gfile.GFile("ram://folder/file", "wb") as file:
        file.write(write(tmp_path / "file", [b"a"]).read_bytes())
    with pytest.raises(DataError, match="does not read remote files as 'ram://folder/file'; copy"):
        ArrayRecordSource("ram://folder/file")


def test_groups_are_warned_of_once(tmp_path: Path, warnings: list[str]) -> None:
    write(tmp_path / "a", made_records(9))
    write(tmp_path / "b", made_records(9), "group_size:4")
    write(tmp_path / "c", made_records(9), "group_size:16")
    gathered(ArrayRecordSource(tmp_path / "?"), list(range(27)))
    (warning,) = warnings
    assert warning.startswith("2 of 3 ArrayRecord files are slow")
    assert "/b'" in warning
    assert "group_size:4" in warning


def bytes_read_by_this_process() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def test_rows_that_follow_one_another_read_their_group_once(tmp_path: Path) -> None:
    records = [os.urandom(100_000) for _ in range(16)]
    source = ArrayRecordSource(write(tmp_path / "file", records, "group_size:16"))
    before = bytes_read_by_this_process()
    assert source.read_records(np.arange(16)) == records
    assert bytes_read_by_this_process() - before < 2 * 1_600_000  # row by row it is 16 times


def open_files(folder: Path) -> int:
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return sum(os.readlink(link).startswith(str(folder)) for link in links if os.path.islink(link))


def test_no_more_files_stay_open_than_a_quarter_of_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    for number in range(12):
        write(tmp_path / f"{number:02}", [b"%d" % number])
    monkeypatch.setattr(resource, "getrlimit", lambda _: (20, 20))
    source = ArrayRecordSource(tmp_path / "*")
    rows = np.random.default_rng(0).integers(0, 12, 600).tolist()
    dataset = tf.data.Dataset.from_tensor_slices(rows).batch(4)
    batches = dataset.map(source.gather, num_parallel_calls=8).as_numpy_iterator()
    assert [int(record) for batch in batches for record in batch] == rows
    assert open_files(tmp_path) == 5
    assert "5 of 12 ArrayRecord files stay open" in warnings[0]
    assert "have 48 files open" in warnings[0]


def test_a_file_replaced_by_a_shorter_one_is_noticed_when_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader would return an empty record for a row of a file that has none."""
    first, second = (write(tmp_path / name, [b"1", b"2"]) for name in "ab")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4, 4))
    source = ArrayRecordSource([first, second])
    source.read_records(np.asarray([2]))
    write(tmp_path / "new", []).rename(first)
    with pytest.raises(DataError, match="/a' has changed: it has 0 records, and had 2"):
        source.read_records(np.asarray([0]))


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "file", [b"a"])
    monkeypatch.setitem(sys.modules, "array_record.python.array_record_module", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'tf_largebatch\[records\]'"):
        ArrayRecordSource(path)
