"""Damaged record files and indexes: the right rows, or a DataError; never other rows."""

from __future__ import annotations

import hashlib
import itertools
import os
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_largebatch.core.errors import DataError
from tf_largebatch.data import TFRecordSource
from tf_largebatch.data._record_files import file_state
from tf_largebatch.data._tfrecord_index import RecordIndex, decode_index, encode_index

FUZZ = settings(max_examples=300, deadline=None, derandomize=True)
# [record]: with one that looks like a frame itself, and lengths whose sum stays when swapped.
RECORDS = [b"", b"a", b"bc" * 20, b"\x01" + bytes(7) + b"\xae\xa1\x5b\x19" + b"x" * 5, b"d", b"ef"]
DIGEST_BYTES = 16
FRAME_BYTES = 16
numbers = itertools.count()


def written(path: Path, records: list[bytes]) -> bytes:
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in records:
            writer.write(record)
    return path.read_bytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records")


@pytest.fixture(scope="module")
def good(folder: Path) -> bytes:
    return written(folder / "good", RECORDS)


@pytest.fixture(scope="module")
def good_index(folder: Path, good: bytes) -> bytes:
    TFRecordSource(folder / "good")
    return (folder / "good.tlb_index").read_bytes()


def all_rows(path: Path) -> list[bytes]:
    source = TFRecordSource(path)
    return list(source.read_records(np.arange(len(source))))


def as_tensorflow_reads(path: Path) -> list[bytes] | None:
    """None where it finds damage, or leaves a part of a header at the end of the file unread."""
    try:
        records = list(tf.data.TFRecordDataset([str(path)]).as_numpy_iterator())
    except tf.errors.DataLossError:
        return None
    frames = sum(FRAME_BYTES + len(record) for record in records)
    return records if frames == path.stat().st_size else None


def edited(content: bytes, data: st.DataObject) -> bytes:
    """One part of it replaced: by other bytes, by another part of it, or by nothing."""
    places = st.integers(0, len(content))
    start, source = data.draw(places), data.draw(places)
    length = data.draw(st.integers(0, 24))
    piece = data.draw(st.binary(max_size=8) | st.just(content[source : source + length]))
    return content[:start] + piece + content[start + length :]


def crafted(body: bytes) -> bytes:
    """With a right checksum over what may be wrong."""
    return body + hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest()


@FUZZ
@given(st.data())
def test_a_damaged_record_file_is_read_as_tensorflow_reads_it(
    folder: Path, good: bytes, data: st.DataObject
) -> None:
    path = folder / f"damaged-{next(numbers)}"  # a new one, as times of modification are coarse
    path.write_bytes(edited(good, data))
    expected = as_tensorflow_reads(path)
    if expected:
        assert all_rows(path) == expected
    else:  # no records are an error, too
        with pytest.raises(DataError) as raised:
            all_rows(path)
        assert repr(str(path)) in str(raised.value)
    for name in os.listdir(folder):
        if name.startswith(path.name):
            os.unlink(folder / name)


@FUZZ
@given(st.data())
def test_a_damaged_index_is_built_again(
    folder: Path, good_index: bytes, data: st.DataObject
) -> None:
    index = folder / "good.tlb_index"
    index.write_bytes(edited(good_index, data))
    assert all_rows(folder / "good") == RECORDS
    assert index.read_bytes() == good_index


@FUZZ
@given(st.data())
def test_a_wrong_index_with_a_right_checksum_gives_no_other_rows(
    folder: Path, good_index: bytes, data: st.DataObject
) -> None:
    index = folder / "good.tlb_index"
    index.write_bytes(crafted(edited(good_index[:-DIGEST_BYTES], data)))
    try:
        assert all_rows(folder / "good") == RECORDS
    except DataError as error:
        assert "checksum" in str(error)  # of a record where no record is


@pytest.mark.parametrize(
    "lengths",
    [
        [2**64 - 16, 16, 0, 0, 0, 0],  # the sum is right, in 64 bits
        [2**63, 2**63, 0, 0, 0, 0],
        [2**64 - 1, 1, 0, 0, 0, 0],
    ],
)
def test_lengths_beyond_the_file_are_no_index(
    folder: Path, good_index: bytes, lengths: list[int]
) -> None:
    state = file_state(str(folder / "good"))
    lengths[-1] = sum(map(len, RECORDS))
    encoded = encode_index(RecordIndex(state, np.array(lengths, "<u8")))
    assert decode_index(encoded, state) is None


def test_lengths_of_the_records_in_another_order_are_found_out(
    folder: Path, good_index: bytes
) -> None:
    state = file_state(str(folder / "good"))
    lengths = np.array([len(record) for record in reversed(RECORDS)], "<u4")
    index = folder / "good.tlb_index"
    index.write_bytes(encode_index(RecordIndex(state, lengths)))
    with pytest.raises(DataError, match="do not have the checksum that follows them"):
        all_rows(folder / "good")
    index.write_bytes(good_index)
