"""Record files, local or remote: which ones are meant, and reading a part of one."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, NamedTuple, TypeVar

import tensorflow as tf

from tf_largebatch.core.errors import ConfigurationError, DataError

# What this package stores beside record files. A pattern such as "train*" must not match it.
INDEX_SUFFIX = ".tlb_index"

# Local files raise the one, remote ones the other.
FILE_ERRORS = (OSError, tf.errors.OpError)

FILES_ALLOWED_FOR_EACH_OPEN = 4

Opened = TypeVar("Opened")

_LOCAL_PREFIX = "file://"
_LOOKUP_THREADS = 16


def expand_files(
    files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
) -> tuple[str, ...]:
    """The record files that are meant, in the order in which their rows are counted.

    Args:
        files: a path, a pattern (`*`, `?`, `[abc]`), or a list of paths and patterns, local or
            of any file system that `tf.io.gfile` knows (`gs://...`). A list keeps its order. The
            files of one pattern are sorted by name, as text, so that numbers in names need
            leading zeros to count upwards. A file whose name holds such a character is taken as
            it is where it exists. Files that end in `.tlb_index` are not matched.

    Returns:
        The paths; local ones are made absolute, symbolic links are left as they are.

    Raises:
        ConfigurationError: `files` is of another kind or empty, or names a file twice.
        DataError: a path that does not exist, a pattern that matches nothing, or a folder.
    """
    given = [files] if isinstance(files, str | os.PathLike) else files
    if not isinstance(given, Sequence) or isinstance(given, bytes):
        raise ConfigurationError(
            "files must be a path, a pattern, or a list of them in the order of the rows, but is "
            f"{files!r} of type {type(files).__name__}."
        )
    if not given:
        raise ConfigurationError("files is an empty list; give at least one path or pattern.")
    with ThreadPoolExecutor(_LOOKUP_THREADS) as pool:  # a remote look-up takes tens of ms
        expanded = [path for paths in pool.map(_expand_one, given) for path in paths]
        _check_no_duplicates(expanded)
        for path, is_folder in zip(expanded, pool.map(_is_folder, expanded), strict=True):
            if is_folder:
                raise DataError(
                    f"{path!r} is a folder; give its record files, as {os.path.join(path, '*')!r}."
                )
    return tuple(expanded)


def is_local(path: str) -> bool:
    """Whether the operating system opens this path, rather than `tf.io.gfile`."""
    return "://" not in path


def _expand_one(given: str | os.PathLike[str]) -> list[str]:
    text = os.fspath(given) if isinstance(given, str | os.PathLike) else None
    if not isinstance(text, str) or not text:
        raise ConfigurationError(f"files must hold paths and patterns, but holds {given!r}.")
    path = text.removeprefix(_LOCAL_PREFIX)
    if is_local(path):
        path = os.path.abspath(path)
    try:
        if tf.io.gfile.exists(path):
            return [path]
        found = tf.io.gfile.glob(path) if any(sign in path for sign in "*?[") else None
    except tf.errors.OpError as error:
        raise DataError(f"{text!r} cannot be looked up: {error.message}") from error
    if found is None:
        raise DataError(f"{text!r} does not exist.")
    matches = sorted(match for match in found if not match.endswith(INDEX_SUFFIX))
    if not matches:
        raise DataError(f"The pattern {text!r} matches no file.")
    return matches


def _check_no_duplicates(paths: list[str]) -> None:
    if len(set(paths)) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise ConfigurationError(
            f"files names {twice!r} {paths.count(twice)} times; each file may be named once, or "
            "its rows would be read more than once an epoch."
        )


def _is_folder(path: str) -> bool:
    try:
        return bool(tf.io.gfile.isdir(path))
    except tf.errors.OpError as error:
        raise DataError(f"{path!r} cannot be looked up: {error.message}") from error


def files_fingerprint(paths: Sequence[str], sizes: Sequence[int]) -> str:
    """A hash of the files' names, without their folders, and of a size of each."""
    named = [[os.path.basename(path), int(size)] for path, size in zip(paths, sizes, strict=True)]
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()


def most_open_files() -> int:
    """How many files a source keeps open at most: a quarter of what the process may have open.

    Other sources need some as well, and so does TensorFlow.
    """
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        return sys.maxsize
    return max(1, allowed // FILES_ALLOWED_FOR_EACH_OPEN)


class OpenFiles(Generic[Opened]):
    """Files by number that stay open, as many as are allowed, the first opened making room.

    Rows come in random order, so which one goes makes no difference. One that is given up while
    another thread still reads from it is to close itself after that, once nothing refers to it.

    Args:
        open_file: opens the file of a number.
        limit: how many stay open, at least 1.
    """

    def __init__(self, open_file: Callable[[int], Opened], *, limit: int) -> None:
        self.limit = limit
        self._open_file = open_file
        self._files: dict[int, Opened] = {}
        self._lock = threading.Lock()

    def __getitem__(self, number: int) -> Opened:
        """The file; raises what `open_file` does."""
        file = self._files.get(number)
        if file is not None:
            return file
        file = self._open_file(number)  # may take long, so without the lock
        with self._lock:
            while len(self._files) >= self.limit:
                del self._files[next(iter(self._files))]
            return self._files.setdefault(number, file)


class FileState(NamedTuple):
    """What tells whether a file is still the one it was."""

    file_bytes: int
    modified_ns: int


def file_state(path: str) -> FileState:
    """The state of a file; raises one of `FILE_ERRORS`."""
    if is_local(path):  # gfile has whole seconds only
        status = os.stat(path)
        return FileState(status.st_size, status.st_mtime_ns)
    remote = tf.io.gfile.stat(path)
    return FileState(remote.length, remote.mtime_nsec)


class LocalFile:
    """An open descriptor, closed once nothing refers to it.

    `os.pread` moves no position, so threads share it, and none can close it under another.
    """

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        # At exit TensorFlow's threads may still read, and the system closes it anyway.
        weakref.finalize(self, os.close, self._descriptor).atexit = False
        self.file_bytes = os.fstat(self._descriptor).st_size

    def will_read(self, offset: int, num_bytes: int) -> None:
        """Starts to bring these bytes into memory, without waiting for them.

        Asked for all rows of a chunk before the first is read, it lets a disk work on them
        together: rows of 80 kB not yet in memory took 150 to 165 microseconds, and 155 to 255
        without. Where they are in memory it takes about 3.
        """
        os.posix_fadvise(self._descriptor, offset, num_bytes, os.POSIX_FADV_WILLNEED)

    def read_at(self, offset: int, num_bytes: int) -> bytes:
        """These bytes, fewer at the end of the file; raises `OSError`."""
        data = os.pread(self._descriptor, num_bytes, offset)
        while len(data) < num_bytes:  # Linux reads at most 2 GiB at once
            more = os.pread(self._descriptor, num_bytes - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data


class RemoteFile:
    """A `tf.io.gfile.GFile`, which has a position: one thread at a time."""

    def __init__(self, path: str) -> None:
        self._lock = threading.Lock()
        self._file = tf.io.gfile.GFile(path, "rb")
        self.file_bytes = self._file.size()

    def will_read(self, offset: int, num_bytes: int) -> None:
        """Nothing: `tf.io.gfile` has no such thing."""

    def read_at(self, offset: int, num_bytes: int) -> bytes:
        """These bytes, fewer at the end of the file; raises `tf.errors.OpError`."""
        with self._lock:
            self._file.seek(offset)
            return bytes(self._file.read(num_bytes))


def open_file(path: str) -> LocalFile | RemoteFile:
    """The file, to be read from any thread; raises one of `FILE_ERRORS`."""
    return LocalFile(path) if is_local(path) else RemoteFile(path)
