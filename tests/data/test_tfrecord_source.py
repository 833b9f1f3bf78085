from __future__ import annotations

import gc
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tf_largebatch.core.errors import ConfigurationError, DataError
from tf_largebatch.data import RandomAccessSource, _tfrecord_source
from tf_largebatch.data._records import parse_image_examples
from tf_largebatch.data._tfrecord_source import TFRecordSource

# Frames of 16 bytes around the data: they begin at 0, 19 and 40, and the file has 63 bytes.
THREE = [b"abc", b"defgh", b"ijklmno"]


def written(path: Path | str, records: Sequence[bytes]) -> str:
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in records:
            writer.write(record)
    return str(path)


def oracle(paths: Sequence[str]) -> list[bytes]:
    return list(tf.data.TFRecordDataset(paths).as_numpy_iterator())


def gathered(source: TFRecordSource, rows: Sequence[int], chunk: int = 4) -> list[bytes]:
    dataset = tf.data.Dataset.from_tensor_slices(np.asarray(rows, np.int64)).batch(chunk)
    dataset = dataset.map(source.gather, num_parallel_calls=2).unbatch()
    return list(dataset.as_numpy_iterator())


def read(source: TFRecordSource, *rows: int) -> list[bytes]:
    return list(source.read_records(np.array(rows, np.int64)))


def files_of(tmp_path: Path, sizes: Sequence[int]) -> list[str]:
    random = np.random.default_rng(len(sizes))
    return [
        written(tmp_path / f"{i:03}", [random.bytes(int(random.integers(60))) for _ in range(size)])
        for i, size in enumerate(sizes)
    ]


@pytest.mark.parametrize("sizes", [[1], [7], [0, 3, 0, 0, 5, 1, 0], [1] * 20])
def test_rows_in_any_order_are_those_that_tensorflow_reads(
    tmp_path: Path, sizes: list[int]
) -> None:
    paths = files_of(tmp_path, sizes)
    source = TFRecordSource(paths)
    expected = oracle(paths)
    assert isinstance(source, RandomAccessSource)
    assert len(source) == len(expected) == sum(sizes)
    assert source.element_spec == tf.TensorSpec([], tf.string)
    rows = np.random.default_rng(0).permutation(np.repeat(np.arange(len(source)), 2))
    assert gathered(source, rows.tolist()) == [expected[row] for row in rows]
    assert source.read_records(np.zeros(0, np.int64)) == []


def test_empty_large_and_binary_records(tmp_path: Path) -> None:
    records = [b"", b"\0", b"ab\0\0", np.random.default_rng(0).bytes(3_000_000), b""]
    source = TFRecordSource(written(tmp_path / "a", records))
    assert gathered(source, [4, 3, 2, 1, 0]) == records[::-1]
    assert gathered(source, [1], chunk=1) == [b"\0"]


def test_the_batch_dimension_is_static_where_that_of_the_rows_is(tmp_path: Path) -> None:
    source = TFRecordSource(written(tmp_path / "a", THREE))
    dataset = tf.data.Dataset.from_tensors(tf.constant([2, 0], tf.int64)).map(source.gather)
    assert dataset.element_spec == tf.TensorSpec([2], tf.string)


def test_remote_files() -> None:
    paths = [
        written(f"ram://tfrecord_source/{i}", [b"%d-%d" % (i, j) for j in range(50)])
        for i in range(3)
    ]
    source = TFRecordSource("ram://tfrecord_source/*")
    rows = np.random.default_rng(0).permutation(150)
    expected = oracle(paths)
    assert gathered(source, rows.tolist()) == [expected[row] for row in rows]
    unopened = TFRecordSource(paths)
    tf.io.gfile.remove(paths[2])
    with pytest.raises(DataError, match="'ram://tfrecord_source/2' has 0 bytes, but had"):
        read(unopened, 100)


def test_image_examples_are_parsed(tmp_path: Path) -> None:
    def example(image: bytes, label: int) -> bytes:
        feature = {
            "image/encoded": tf.train.Feature(bytes_list=tf.train.BytesList(value=[image])),
            "image/class/label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
        }
        return tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()

    path = written(tmp_path / "a", [example(b"image %d" % i, 10 * i) for i in range(5)])
    source = TFRecordSource(path, parse_fn=parse_image_examples)
    assert source.element_spec == (tf.TensorSpec([], tf.string), tf.TensorSpec([], tf.int64))
    assert gathered(source, [3, 0, 4, 3, 1]) == [(b"image %d" % i, 10 * i) for i in (3, 0, 4, 3, 1)]


def flip(path: str, byte: int) -> None:
    with open(path, "r+b") as file:
        file.seek(byte)
        value = file.read(1)[0]
        file.seek(byte)
        file.write(bytes([value ^ 1]))


# The second record: data at 31 to 35, its checksum at 36 to 39.
@pytest.mark.parametrize("byte", [31, 35, 36, 39])
def test_damaged_data_are_reported_with_their_place(tmp_path: Path, byte: int) -> None:
    path = written(tmp_path / "a", THREE)
    source = TFRecordSource([written(tmp_path / "before", [b"x"]), path])
    flip(path, byte)
    message = rf"record 1 of '{path}', at byte 19: its 5 bytes do not have the checksum"
    with pytest.raises(DataError, match=message):
        read(source, 2)
    assert read(source, 0, 1, 3) == [b"x", b"abc", b"ijklmno"]
    with pytest.raises(tf.errors.OpError, match=message):
        gathered(source, [2])
    # Lengths are right, so a new start finds the same.
    with pytest.raises(DataError, match=message):
        read(TFRecordSource(path), 1)


@pytest.mark.parametrize("byte", [19, 26, 27, 30])
def test_damaged_lengths_are_found_at_the_next_start(tmp_path: Path, byte: int) -> None:
    path = written(tmp_path / "a", THREE)
    TFRecordSource(path)
    flip(path, byte)
    os.utime(path)
    with pytest.raises(DataError, match=rf"length of record 1 of '{path}', at byte 19"):
        TFRecordSource(path)


@pytest.mark.parametrize("size", [20, 31, 33, 36, 39])
def test_a_file_cut_off_while_it_is_open_is_reported(tmp_path: Path, size: int) -> None:
    path = written(tmp_path / "a", THREE)
    source = TFRecordSource(path)
    assert read(source, 0) == [b"abc"]
    os.truncate(path, size)
    with pytest.raises(DataError, match=rf"record 1 of '{path}', at byte 19: the file now ends"):
        read(source, 1)


def test_a_file_of_another_size_or_gone_is_reported_when_it_is_opened(tmp_path: Path) -> None:
    path = written(tmp_path / "a", THREE)
    longer, gone = TFRecordSource(path), TFRecordSource(path)
    written(path, [*THREE, b"more"])
    with pytest.raises(DataError, match=rf"'{path}' has 83 bytes, but had 63"):
        read(longer, 0)
    os.remove(path)
    with pytest.raises(
        DataError, match=rf"Cannot read record 1 of '{path}', at byte 19: .*No such"
    ):
        read(gone, 1)


def test_rows_that_are_replaced_by_others_do_not_pass_for_them(tmp_path: Path) -> None:
    path = written(tmp_path / "a", THREE)
    source = TFRecordSource(path)
    written(path, [b"abcde", b"fgh", b"ijklmno"])  # the same size
    with pytest.raises(DataError, match=r"record 0 .* do not have the checksum"):
        read(source, 0)


@pytest.mark.parametrize("row", [-1, 3, 2**62])
def test_rows_outside_are_refused(tmp_path: Path, row: int) -> None:
    source = TFRecordSource(written(tmp_path / "a", THREE))
    message = re.escape(f"no row {row} in a source of 3 rows; the rows are 0 to 2")
    with pytest.raises(DataError, match=message):
        read(source, 0, row)
    with pytest.raises(DataError, match=message):
        source.describe_row(row)


def test_a_row_is_described_by_file_and_place(tmp_path: Path) -> None:
    paths = [
        written(tmp_path / name, records)
        for name, records in {"a": [b"x"], "b": [], "c": THREE}.items()
    ]
    source = TFRecordSource(paths)
    assert source.describe_row(0) == f"record 0 of '{paths[0]}', at byte 0"
    assert source.describe_row(3) == f"record 2 of '{paths[2]}', at byte 40"


def test_files_without_any_record_are_refused(tmp_path: Path) -> None:
    paths = files_of(tmp_path, [0, 0])
    with pytest.raises(DataError, match="TFRecordSource has no rows"):
        TFRecordSource(paths)
    with pytest.raises(ConfigurationError, match="empty list"):
        TFRecordSource([])


def open_in(folder: Path) -> int:
    """How many descriptors of this process, on which other tests may leave some, lie there."""
    targets = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            targets.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sum(target.startswith(str(folder)) for target in targets)


def test_few_files_stay_open_and_none_after_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_tfrecord_source, "most_open_files", lambda: 3)
    paths = files_of(tmp_path, [2] * 30)
    expected = oracle(paths)
    gc.collect()
    source = TFRecordSource(paths)
    assert open_in(tmp_path) == 0
    rows = np.random.default_rng(0).integers(60, size=2000)

    with ThreadPoolExecutor(8) as pool:  # files close while other threads read from them
        chunks = list(pool.map(source.read_records, np.split(rows, 500)))
    assert [record for chunk in chunks for record in chunk] == [expected[row] for row in rows]
    gc.collect()
    assert 1 <= open_in(tmp_path) <= 3  # threads may each have closed one to make room
    del source, pool
    gc.collect()
    assert open_in(tmp_path) == 0


def test_sorted_classes_come_back_mixed(tmp_path: Path) -> None:
    paths = [written(tmp_path / f"{label}", [b"%d" % label] * 100) for label in range(10)]
    source = TFRecordSource(paths)
    order = np.random.default_rng(0).permutation(1000)
    labels = [int(label) for label in gathered(source, order.tolist(), chunk=16)]
    assert labels == (order // 100).tolist()
