from __future__ import annotations

import os
import random
import struct
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from absl import logging
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_largebatch.core.errors import ConfigurationError, DataError
from tf_largebatch.data import _tfrecord_index
from tf_largebatch.data._record_files import FileState, expand_files
from tf_largebatch.data._tfrecord_frames import masked_crc32c
from tf_largebatch.data._tfrecord_index import (
    RecordIndex,
    decode_index,
    encode_index,
    load_indexes,
)

RECORDS = [b"a", b"", b"bc" * 50, b"\0\0", b"d" * 10_000, b"e"]


def written(path: Path | str, records: list[bytes], compression: str = "") -> str:
    with tf.io.TFRecordWriter(str(path), compression) as writer:
        for record in records:
            writer.write(record)
    return str(path)


def lengths_of(path: str, **options: Any) -> list[int]:
    (index,) = load_indexes([path], **options)
    return index.lengths.tolist()


def no_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the record file was walked")

    monkeypatch.setattr(_tfrecord_index, "record_lengths", refuse)


def crc32c_bit_by_bit(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_the_checksum_is_that_of_its_definition() -> None:
    assert crc32c_bit_by_bit(b"123456789") == 0xE3069283  # the check value of CRC-32C
    for data in (b"", b"123456789", bytes(range(256))):
        crc = crc32c_bit_by_bit(data)
        assert masked_crc32c(data) == ((crc >> 15 | crc << 17) % 2**32 + 0xA282EAD8) % 2**32


@pytest.mark.parametrize("records", [[], [b""], [b"x"], RECORDS, [b"y" * 300] * 1000])
def test_lengths_are_those_of_the_written_records(
    tmp_path: Path, records: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "a", records)
    assert lengths_of(path) == [len(record) for record in records]
    assert sorted(os.listdir(tmp_path)) == ["a", "a.tlb_index"]
    no_walk(monkeypatch)
    assert lengths_of(path) == [len(record) for record in records]


def test_remote_files_are_indexed_where_they_lie() -> None:
    records = [bytes([i % 256]) * (100 * i) for i in range(400)]  # 8 MB, more than one block
    path = written("ram://tfrecord_index/a", records)
    assert lengths_of(path) == [len(record) for record in records]
    assert tf.io.gfile.listdir("ram://tfrecord_index") == ["a", "a.tlb_index"]


# The third of these frames begins at byte 16 + 3 + 16 + 5 = 40 and ends at 40 + 16 + 7 = 63.
THREE = [b"abc", b"defgh", b"ijklmno"]


@pytest.mark.parametrize("end", [41, 48, 51, 52, 53, 59, 62])
def test_a_file_cut_off_inside_a_record_is_reported(tmp_path: Path, end: int) -> None:
    path = written(tmp_path / "a", THREE)
    os.truncate(path, end)
    with pytest.raises(DataError, match=rf"ends inside record 2 of '{path}', at byte 40"):
        load_indexes([path])
    os.truncate(path, 40)  # between records, a shorter file is a whole one
    assert lengths_of(path) == [3, 5]


@pytest.mark.parametrize("byte", [40, 41, 47, 48, 51])
def test_a_damaged_length_is_reported(tmp_path: Path, byte: int) -> None:
    path = written(tmp_path / "a", THREE)
    content = bytearray(Path(path).read_bytes())
    content[byte] ^= 4
    Path(path).write_bytes(content)
    with pytest.raises(DataError, match=rf"length of record 2 of '{path}', at byte 40, is wrong"):
        load_indexes([path])


def test_text_is_no_tfrecord_file(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("These are no records at all.")
    with pytest.raises(DataError, match=r"record 0 of .*notes\.txt', at byte 0.*no TFRecord file"):
        load_indexes([str(tmp_path / "notes.txt")])


@pytest.mark.parametrize("compression", ["GZIP", "ZLIB"])
@pytest.mark.parametrize("records", [RECORDS, [], [b"short"]])
def test_compressed_files_are_refused(
    tmp_path: Path, compression: str, records: list[bytes]
) -> None:
    path = written(tmp_path / "a", records, compression)
    if not Path(path).read_bytes():
        pytest.skip("TensorFlow writes nothing at all")
    with pytest.raises(DataError, match=rf"compressed with {compression.lower()}.*{compression}"):
        load_indexes([path])


@pytest.mark.parametrize("level", [1, 6, 9])
def test_a_plain_file_that_begins_like_a_compressed_one_is_read(tmp_path: Path, level: int) -> None:
    beginning = zlib.compress(b"", level)[:2]
    length = int.from_bytes(beginning, "little")
    path = written(tmp_path / "a", [b"x" * length])
    assert Path(path).read_bytes()[:2] == beginning
    assert lengths_of(path) == [length]


def test_every_unusable_file_is_named_in_order(tmp_path: Path) -> None:
    paths = [written(tmp_path / f"{i:02}", THREE) for i in range(12)]
    for path in paths[3:10]:
        os.truncate(path, 50)
    with pytest.raises(DataError, match="7 of 12 record files") as caught:
        load_indexes(paths)
    named = [path for path in paths if path in str(caught.value)]
    assert named == paths[3:8]
    with pytest.raises(DataError, match="missing' cannot be read"):
        load_indexes([str(tmp_path / "missing")])


def test_a_stale_index_is_built_again(tmp_path: Path) -> None:
    path = written(tmp_path / "a", [b"12345", b"1"])
    assert lengths_of(path) == [5, 1]
    written(path, [b"12345", b"1", b"22"])  # another size
    assert lengths_of(path) == [5, 1, 2]

    before = os.stat(path)
    written(path, [b"1", b"12345", b"22"])  # the same size, another time
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert lengths_of(path) == [1, 5, 2]
    written(path, [b"22", b"1", b"12345"])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns - 5))  # an older one counts too
    assert lengths_of(path) == [2, 1, 5]


def test_indexes_in_one_folder_do_not_collide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = []
    for number, folder in enumerate(("x", "y", "z" * 200)):
        (tmp_path / folder).mkdir()
        paths.append(written(tmp_path / folder / ("same" * 40), [b"r" * number]))
    cache = tmp_path / "new" / "cache"
    for _ in range(2):
        loaded = load_indexes(paths, index_dir=cache)
        assert [index.lengths.tolist() for index in loaded] == [[0], [1], [2]]
        no_walk(monkeypatch)
    assert len(os.listdir(cache)) == 3
    assert os.listdir(tmp_path / "x") == ["same" * 40]


def test_an_index_that_cannot_be_stored_is_kept_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(logging, "warning", lambda text, *values: warnings.append(text % values))

    def refuse(*_: Any, **__: Any) -> None:  # root may write anywhere
        raise tf.errors.PermissionDeniedError(None, None, "Read-only file system")

    paths = [written(tmp_path / name, THREE) for name in "abc"]
    with monkeypatch.context() as patched:
        patched.setattr(tf.io.gfile, "rename", refuse)
        loaded = load_indexes(paths)
    assert [index.lengths.tolist() for index in loaded] == [[3, 5, 7]] * 3
    (warning,) = warnings
    assert "3 of 3 indexes" in warning
    assert f"{paths[0]}.tlb_index: Read-only file system" in warning
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "c"]

    (tmp_path / "a.tlb_index").mkdir()  # in the way for reading and for writing
    assert lengths_of(paths[0]) == [3, 5, 7]
    assert "1 of 1 indexes" in warnings[1]


@pytest.mark.parametrize("index_dir", [3, "", b"x", ["a"]])
def test_an_index_dir_of_another_kind_is_refused(tmp_path: Path, index_dir: Any) -> None:
    with pytest.raises(ConfigurationError, match="index_dir must be a folder's path or None"):
        load_indexes([written(tmp_path / "a", THREE)], index_dir=index_dir)


def test_an_index_dir_that_is_a_file_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a", THREE)
    with pytest.raises(ConfigurationError, match="is a file"):
        load_indexes([path], index_dir=path)


STATE = FileState(file_bytes=3 * 16 + 15, modified_ns=1_700_000_000_123_456_789)
STORED = encode_index(RecordIndex(STATE, np.array([3, 5, 7], "<u4")))


def test_what_is_stored_holds_the_lengths_as_they_are() -> None:
    assert struct.pack("<3I", 3, 5, 7) in STORED
    read = decode_index(STORED, STATE)
    assert read is not None and read.state == STATE and read.lengths.tolist() == [3, 5, 7]
    large = RecordIndex(FileState(2**32 + 17, 1), np.array([2**32, 1], "<u8"))
    assert decode_index(encode_index(large), FileState(2**32 + 17, 1)) is None  # 32 bytes short
    state = FileState(2**32 + 33, 1)
    read = decode_index(encode_index(RecordIndex(state, large.lengths)), state)
    assert read is not None and read.lengths.tolist() == [2**32, 1]


def test_an_index_of_another_state_or_version_is_none() -> None:
    assert decode_index(STORED, STATE._replace(file_bytes=64)) is None
    assert decode_index(STORED, STATE._replace(modified_ns=STATE.modified_ns + 1)) is None
    body = STORED[:-16].replace(b"version 1", b"version 2")
    assert decode_index(body + _tfrecord_index._digest(body), STATE) is None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"records": 3', b'"records": 2'),
        (b'"dtype": "<u4"', b'"dtype": "O"'),
        (b'"dtype": "<u4"', b'"dtype": []'),
        (b'"records"', b'"rows"'),
        (b'{"file_bytes"', b'[{"file_bytes"'),
        (b"{", b"[" * 600),
        (b"}\n", b"}"),
        (struct.pack("<I", 7), struct.pack("<I", 8)),
        (struct.pack("<I", 7), b"\7\0"),
    ],
)
def test_a_wrong_index_with_a_right_checksum_is_none(old: bytes, new: bytes) -> None:
    assert old in STORED
    body = STORED[:-16].replace(old, new)
    assert decode_index(body + _tfrecord_index._digest(body), STATE) is None


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, len(STORED) - 1), st.integers(1, 255)), max_size=4),
    st.integers(0, len(STORED)),
    st.binary(max_size=3),
)
def test_a_damaged_index_is_none(flips: list[tuple[int, int]], end: int, tail: bytes) -> None:
    damaged = bytearray(STORED)
    for position, mask in flips:
        damaged[position] ^= mask
    content = bytes(damaged[:end]) + tail
    read = decode_index(content, STATE)
    assert (read is not None) == (content == STORED)


def test_a_damaged_index_is_built_again(tmp_path: Path) -> None:
    path = written(tmp_path / "a", RECORDS)
    index = tmp_path / "a.tlb_index"
    load_indexes([path])
    good = index.read_bytes()
    for content in (b"", good[:-1], good + b"\0", good.replace(b"<u4", b"<u8"), os.urandom(99)):
        index.write_bytes(content)
        assert lengths_of(path) == [len(record) for record in RECORDS]
        assert index.read_bytes() == good


def test_several_build_at_once(tmp_path: Path) -> None:
    records = [b"r" * (i % 40) for i in range(500)]
    paths = [written(tmp_path / f"{i}", records) for i in range(8)]
    together = threading.Barrier(8)

    def build(_: int) -> list[list[int]]:
        together.wait()
        return [index.lengths.tolist() for index in load_indexes(paths)]

    with ThreadPoolExecutor(8) as pool:
        built = list(pool.map(build, range(8)))
    assert built == [[[len(record) for record in records]] * 8] * 8
    assert sorted(os.listdir(tmp_path)) == sorted(
        name for i in range(8) for name in (f"{i}", f"{i}.tlb_index")
    )


def test_the_programs_random_state_is_left_alone(tmp_path: Path) -> None:
    paths = [written(tmp_path / name, THREE) for name in "abc"]
    random.seed(1)
    expected = random.random()
    random.seed(1)
    load_indexes(paths)
    assert random.random() == expected


def test_files_are_expanded_in_order_of_name(tmp_path: Path) -> None:
    for name in ("b-10", "b-9", "a", "[x]", "b-9.tlb_index"):
        (tmp_path / name).write_bytes(b"")
    inside = str(tmp_path) + "/"
    assert expand_files(tmp_path / "a") == (inside + "a",)
    assert expand_files(f"file://{inside}b*") == (inside + "b-10", inside + "b-9")
    assert expand_files([inside + "b-?", tmp_path / "a"]) == (inside + "b-9", inside + "a")
    assert expand_files(inside + "[x]") == (inside + "[x]",)  # there is such a file
    assert expand_files(inside + "[ab]") == (inside + "a",)
    assert expand_files(os.path.relpath(tmp_path / "a")) == (inside + "a",)
    written("ram://expand/r-1", [])
    written("ram://expand/r-0", [])
    assert expand_files("ram://expand/*") == ("ram://expand/r-0", "ram://expand/r-1")


@pytest.mark.parametrize(
    ("files", "error", "message"),
    [
        ([], ConfigurationError, "empty list"),
        ({"a"}, ConfigurationError, "list of them.*of type set"),
        (b"a", ConfigurationError, "of type bytes"),
        (["a", 3], ConfigurationError, "holds 3"),
        ("", ConfigurationError, "holds ''"),
        ("missing", DataError, "'missing' does not exist"),
        ("missing*", DataError, r"pattern 'missing\*' matches no file"),
        ("no/such/folder/*", DataError, "matches no file"),
        (".", DataError, "is a folder"),
        ("*", DataError, "sub' is a folder"),
        (["a", "./a"], ConfigurationError, "a' 2 times"),
        (["a", "[a]"], ConfigurationError, "a' 2 times"),
        ("nothing://a", DataError, "cannot be looked up.*nothing"),
    ],
)
def test_files_that_cannot_be_meant_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: Any, error: Any, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").write_bytes(b"")
    (tmp_path / "sub").mkdir()
    with pytest.raises(error, match=message):
        expand_files(files)
