"""State files: everything comes back as it was, and anything else is refused by name."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import resource
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.core.test_state_text import CONTENTS
from tf_largebatch.core.errors import ConfigurationError, DataError, StateWriteError
from tf_largebatch.core.state_file import load_state_file, read_state_file, write_state_file

FIRST_LINE = b"tf_largebatch state, version 1\n"
ML_DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "int4", "uint4")


def assert_same(read: list[np.ndarray], written: list[Any]) -> None:
    assert len(read) == len(written)
    for one, other in zip(read, map(np.asarray, written), strict=True):
        assert one.dtype == other.dtype.newbyteorder("=") and one.shape == other.shape
        assert one.dtype.isnative and one.flags.c_contiguous and one.flags.writeable
        assert one.tobytes() == other.astype(one.dtype).tobytes()  # bits, as of not-a-numbers


def crafted(manifest: bytes, arrays: bytes = b"") -> bytes:
    """A file as the layout is documented, with a right hash whatever the manifest says."""
    header = struct.pack("<Q", len(manifest)) + hashlib.sha256(manifest).digest()
    return FIRST_LINE + header + manifest + arrays


NUMBERS = st.one_of(
    *(hnp.boolean_dtypes(), hnp.integer_dtypes(endianness="?")),
    *(hnp.unsigned_integer_dtypes(endianness="?"), hnp.floating_dtypes(sizes=(16, 32, 64))),
    hnp.complex_number_dtypes(sizes=(64, 128)),
)
ARRAYS = hnp.arrays(NUMBERS, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(CONTENTS, st.lists(ARRAYS, max_size=4), st.booleans())
def test_what_is_written_comes_back(
    tmp_path_factory: pytest.TempPathFactory,
    contents: dict[str, Any],
    arrays: list[np.ndarray],
    transpose: bool,
) -> None:
    path = tmp_path_factory.getbasetemp() / "round_trip"
    if transpose:
        arrays = [array.T for array in arrays]
    write_state_file(path, contents, arrays)
    read_contents, read_arrays = read_state_file(path)
    assert repr(read_contents) == repr(contents)
    assert_same(read_arrays, arrays)


@pytest.mark.parametrize("name", ML_DTYPES)
def test_ml_dtypes_come_back(tmp_path: Path, name: str) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name))
    written = [
        np.arange(6).astype(dtype).reshape(2, 3),
        np.asarray(1, dtype),
        np.zeros((0, 2), dtype),
        np.arange(6).astype(dtype).reshape(2, 3).T[1:],
    ]
    write_state_file(tmp_path / "a", {}, written)
    assert_same(read_state_file(tmp_path / "a")[1], written)


def test_scalars_views_and_maps_of_files_are_arrays(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "mapped", np.int16, "w+", shape=(3,))
    mapped[:] = (1, 2, 3)
    frozen = np.arange(4)
    frozen.flags.writeable = False
    written = [np.float32(0.5), mapped, frozen, np.arange(9)[::-2], np.broadcast_to(3, (2, 2))]
    write_state_file(tmp_path / "a", {}, written)
    assert_same(read_state_file(tmp_path / "a")[1], written)


def test_the_layout_is_the_documented_one(tmp_path: Path) -> None:
    arrays = [np.array([1, -2], "<i2"), np.array(True)]
    raw = [b"\x01\x00\xfe\xff", b"\x01"]
    write_state_file(tmp_path / "a", {"step": 3, "loss": float("nan")}, arrays)
    entries = [
        {"dtype": name, "shape": shape, "sha256": hashlib.sha256(of).hexdigest()}
        for name, shape, of in zip(("int16", "bool"), ([2], []), raw, strict=True)
    ]
    contents = '{"step":3,"loss":{"__float__":"nan"}}'
    manifest = f'{{"contents":{contents},"arrays":{json.dumps(entries)}}}\n'.encode()
    assert (tmp_path / "a").read_bytes() == crafted(manifest, b"".join(raw))
    digest = load_state_file(tmp_path / "a").digest
    assert digest == hashlib.sha256(manifest).hexdigest()


def test_the_digest_tells_states_apart_and_not_files(tmp_path: Path) -> None:
    states: list[tuple[dict[str, Any], list[Any]]] = [
        ({"a": 1}, [np.zeros(2)]),
        ({"a": 1.0}, [np.zeros(2)]),
        ({"a": 1}, [-np.zeros(2)]),
        ({"a": 1}, [np.zeros(2, np.int64)]),
        ({"a": 1}, [np.zeros((2, 1))]),
        ({"a": 1}, [np.zeros(1), np.zeros(1)]),
    ]
    digests = set()
    for contents, arrays in states:
        write_state_file(tmp_path / "a", contents, arrays)
        write_state_file(tmp_path / "b", contents, arrays)
        first, second = (load_state_file(tmp_path / name).digest for name in "ab")
        assert first == second
        digests.add(first)
    assert len(digests) == len(states)


class Trap:
    def __reduce__(self) -> Any:
        return pytest.fail, ("a pickle was executed",)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        ([1.0], r"arrays\[1\] is of type list"),
        (np.ma.masked_array([1], [True]), "MaskedArray; it must be a NumPy array without a mask"),
        (np.array([Trap()]), r"arrays\[1\] has the dtype object; it must be one of bool, "),
        (np.array(["a"]), r"dtype <U1; .*Text belongs into contents"),
        (np.zeros(1, "M8[s]"), "dtype datetime64"),
        (np.zeros(1, [("a", int)]), r"dtype \[\('a'"),
        (np.zeros(1, np.longdouble), "dtype float128"),
    ],
)
def test_other_arrays_are_refused_and_nothing_is_written(
    tmp_path: Path, array: Any, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        write_state_file(tmp_path / "a", {}, [np.zeros(1), array])
    with pytest.raises(ConfigurationError, match=r"contents\['a'\]"):
        write_state_file(tmp_path / "a", {"a": ()}, [])
    assert os.listdir(tmp_path) == []


def test_contents_that_would_not_be_read_again_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="as JSON, but at most 67,108,864 are read"):
        write_state_file(tmp_path / "a", {"a": "x" * 2**26}, [])
    assert os.listdir(tmp_path) == []


@pytest.fixture(scope="module")
def good() -> bytes:
    raw = np.arange(20, dtype="<f4").tobytes()
    entries = [
        {"dtype": "float32", "shape": [4, 5], "sha256": hashlib.sha256(raw).hexdigest()},
        {"dtype": "bool", "shape": [0], "sha256": hashlib.sha256().hexdigest()},
    ]
    return crafted(json.dumps({"contents": {"a": 1}, "arrays": entries}).encode(), raw)


def test_cut_off_after_any_byte_it_is_refused(tmp_path: Path, good: bytes) -> None:
    path = tmp_path / "a"
    path.write_bytes(good)
    assert read_state_file(path)[0] == {"a": 1}
    for end in reversed(range(len(good))):
        os.truncate(path, end)
        with pytest.raises(DataError, match="copied in full") as raised:
            read_state_file(path)
        assert repr(str(path)) in str(raised.value)


def test_with_any_byte_changed_it_is_refused(tmp_path: Path, good: bytes) -> None:
    path = tmp_path / "a"
    for position in range(len(good)):
        for mask in (1 << position % 8, 0xFF):
            damaged = bytearray(good)
            damaged[position] ^= mask
            path.write_bytes(damaged)
            with pytest.raises(DataError):
                read_state_file(path)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(st.data())
def test_with_parts_moved_replaced_or_added_it_is_refused(
    tmp_path_factory: pytest.TempPathFactory, good: bytes, data: st.DataObject
) -> None:
    places = st.integers(0, len(good))
    start, end, source = data.draw(st.tuples(places, places, places))
    piece = data.draw(st.binary(max_size=8) | st.just(good[source : source + abs(end - start)]))
    changed = good[: min(start, end)] + piece + good[max(start, end) :]
    path = tmp_path_factory.getbasetemp() / "edited"
    path.write_bytes(changed)
    if changed == good:
        assert read_state_file(path)[0] == {"a": 1}
    else:
        with pytest.raises(DataError):
            read_state_file(path)


SHA_OF_NOTHING = hashlib.sha256().hexdigest()


def entry(**changed: Any) -> dict[str, Any]:
    return {"dtype": "float32", "shape": [0], "sha256": SHA_OF_NOTHING, **changed}


MANIFEST = {"contents": {}, "arrays": [entry()]}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**70) | st.floats() | st.text(max_size=5),
    lambda of: st.lists(of, max_size=3) | st.dictionaries(st.text(max_size=5), of, max_size=3),
    max_leaves=6,
)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["float32", "int4", "object", "f4,f4", "finfo", "O"]) | JSON,
        "shape": st.lists(st.integers(-1, 2) | st.integers(), max_size=70) | JSON,
        "sha256": st.just(SHA_OF_NOTHING) | JSON,
    }
)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(
    st.fixed_dictionaries({"contents": JSON, "arrays": st.lists(ENTRIES, max_size=2) | JSON})
    | JSON,
    st.binary(max_size=16),
)
def test_a_manifest_with_a_right_hash_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, manifest: Any, tail: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "crafted"
    path.write_bytes(crafted(json.dumps(manifest).encode(), tail))
    try:
        contents, arrays = read_state_file(path)
    except DataError as error:
        assert repr(str(path)) in str(error)
    else:
        assert isinstance(contents, dict)
        assert sum(array.nbytes for array in arrays) == len(tail)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "ends after 0 bytes"),
        (b"PK\3\4" + bytes(99), r"is no state file: it begins with b'PK"),
        (pickle.dumps(Trap()), "is no state file"),
        (crafted(b"{}").replace(b"version 1", b"version 2"), "of version 2, .* up to version 1"),
        (crafted(b"{}").replace(b"version 1", b"version 31"), "of version 31"),
        (crafted(b"{}").replace(b"version 1", b"version 0"), "is no state file"),
        (crafted(b"\xff{}"), "cannot be used: 'utf-8' codec"),
        (crafted(b"{}"), "must have contents and arrays"),
        (crafted(json.dumps({**MANIFEST, "x": 1}).encode()), "must have contents and arrays"),
        (crafted(b'{"contents":{"a":NaN},"arrays":[]}'), "the constant NaN"),
        (crafted(b'{"contents":[],"arrays":[]}'), "contents must be an object"),
        (crafted(b"[" * 100_000), "nested too deeply"),
        (crafted(json.dumps(MANIFEST).encode(), b"x"), "has [0-9]+ bytes, but what is in it"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(DataError, match=message) as raised:
        read_state_file(tmp_path / "a")
    assert repr(str(tmp_path / "a")) in str(raised.value)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dtype": "object"}, "there is no dtype 'object' here"),
        ({"dtype": "finfo"}, "there is no dtype 'finfo' here"),
        ({"dtype": "float32,O"}, "there is no dtype"),
        ({"dtype": "longdouble"}, "there is no dtype"),
        ({"dtype": None}, "there is no dtype None"),
        ({"shape": 0}, "list of sizes"),
        ({"shape": [-1]}, "list of sizes"),
        ({"shape": [True, 0]}, "list of sizes"),
        ({"shape": [0.0]}, "list of sizes"),
        ({"shape": [0, 2**70]}, "cannot be used"),
        ({"shape": [0] * 100}, "cannot be used"),
        ({"shape": [2**62]}, "what is in it takes"),
        ({"sha256": 0}, "hash must be text"),
        ({"sha256": "0" * 64}, "the hash of array 0 is wrong"),
        ({"other": 1}, "must have dtype, shape and sha256"),
    ],
)
def test_other_descriptions_of_arrays_are_refused(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    manifest = json.dumps({**MANIFEST, "arrays": [entry(**changed)]}).encode()
    (tmp_path / "a").write_bytes(crafted(manifest))
    with pytest.raises(DataError, match=message):
        read_state_file(tmp_path / "a")


def test_no_memory_is_taken_for_what_a_file_only_says(tmp_path: Path) -> None:
    said = [crafted(json.dumps({**MANIFEST, "arrays": [entry(shape=[2**33])] * 3}).encode())]
    said.append(FIRST_LINE + struct.pack("<Q", 2**33) + bytes(32) + b"{}")
    for content in said:
        (tmp_path / "a").write_bytes(content)
        tracemalloc.start()
        try:
            with pytest.raises(DataError):
                read_state_file(tmp_path / "a")
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 2**20


def test_what_is_no_regular_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(DataError, match="is no regular file"):
            read_state_file(path)
    with pytest.raises(DataError, match="missing' cannot be read: No such file"):
        read_state_file(tmp_path / "missing")


@pytest.fixture
def at_most_a_megabyte() -> Any:
    """A limit for the size of files, at which the system ends a write as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_write_that_ends_halfway_leaves_the_old_file_alone(
    tmp_path: Path, at_most_a_megabyte: None
) -> None:
    path = tmp_path / "a"
    write_state_file(path, {"step": 1}, [np.arange(5)])
    with pytest.raises(StateWriteError, match=r"File too large\. It takes 3,000,") as raised:
        write_state_file(path, {"step": 2}, [np.zeros(10**6, "u1")] * 3)
    assert raised.value.errno == errno.EFBIG
    assert repr(str(path)) in str(raised.value)
    assert os.listdir(tmp_path) == ["a"]
    assert read_state_file(path)[0] == {"step": 1}


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_what_the_disk_says_late_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    write_state_file(tmp_path / "a", {"step": 1}, [])

    def fail(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fail)
        with pytest.raises(OSError, match=os.strerror(code)) as raised:
            write_state_file(tmp_path / "a", {"step": 2}, [])
    assert isinstance(raised.value, StateWriteError) and raised.value.errno == code
    assert os.listdir(tmp_path) == ["a"]
    assert read_state_file(tmp_path / "a")[0] == {"step": 1}


def test_an_interrupt_leaves_no_part_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            write_state_file(tmp_path / "a", {}, [np.zeros(9)])
    assert os.listdir(tmp_path) == []


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder" / "inside").mkdir(parents=True)
    (tmp_path / "file").touch()
    for place, reason in (
        ("missing/a", "No such file"),
        ("folder", "Is a directory"),
        ("file/a", "Not a directory"),
        ("n" * 300, "File name too long"),
    ):
        with pytest.raises(StateWriteError, match=f"{place}': {reason}"):
            write_state_file(tmp_path / place, {}, [])
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]
