"""Files that appear under their name whole or not at all, whenever the process dies."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from tf_largebatch.core.errors import StateWriteError

_TEMPORARY_NAME = re.compile(r"\.(?P<name>.+)\.[0-9]+-[0-9a-f]{8}\.tmp", re.DOTALL)
# What file systems say that cannot synchronise a folder, or have no locks.
_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)


@contextlib.contextmanager
def replacing(path: Path, *, num_bytes: int) -> Iterator[BinaryIO]:
    """A file to write into, which takes the place of `path` at the end of the block.

    It is written under a temporary name in the same folder, `.NAME.PID-RANDOM.tmp`, synchronised
    with the disk and renamed; then the folder is synchronised. So `path` is at all times what it
    was, or the new file as a whole. After an exception, of the block or of the disk, the temporary
    file is gone. A process that is killed leaves it behind, to `remove_leftovers`: it is locked
    (`flock`) for as long as somebody writes into it.

    Args:
        path: the file; its folder must exist.
        num_bytes: how many there will be, for the message of the error.

    Raises:
        StateWriteError: it cannot be written; `errno` says why, as `ENOSPC` does.
    """
    temporary: str | None = None
    try:
        try:
            with _open_locked(path) as file:
                temporary = file.name
                yield file
                file.flush()
                os.fsync(file.fileno())
                os.replace(temporary, path)  # while it is locked, or it could pass for a leftover
                temporary = None
        finally:
            if temporary is not None:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
        _synchronise_folder(path.parent)
    except OSError as error:
        raise write_error(path, error, num_bytes=num_bytes) from error


def remove_leftovers(folder: Path, name: re.Pattern[str]) -> None:
    """Removes the temporary files of processes that died while they wrote.

    Those that are locked are left alone, as somebody still writes into them, on this host or,
    where the file system shares its locks (NFS does), on another. So are those of which no lock
    can tell, and those that cannot be removed.

    Args:
        folder: where to look, without its subfolders.
        name: matches the whole name of the files that were to be written.
    """
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            parts = _TEMPORARY_NAME.fullmatch(entry.name)
            if parts and name.fullmatch(parts["name"]) and entry.is_file(follow_symlinks=False):
                _remove_unless_locked(entry.path)


def write_error(path: Path, error: OSError, *, num_bytes: int) -> StateWriteError:
    """The typed error, which has the `errno` of the original one."""
    raised = StateWriteError(
        f"Cannot write {str(path)!r}: {error.strerror or error}. It takes {num_bytes:,} bytes, and "
        f"its file system has {_free_bytes(path.parent)} left for this user. What was written "
        "before is as it was."
    )
    raised.errno = error.errno
    return raised


def _open_locked(path: Path) -> BinaryIO:
    while True:
        name = f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp"
        # Closed by the caller's `with`.
        file = open(path.with_name(name), "xb")  # noqa: SIM115
        try:
            _lock(file.fileno())
        except OSError as error:
            if error.errno not in _UNSUPPORTED and not isinstance(error, BlockingIOError):
                file.close()
                os.unlink(file.name)
                raise
        # Between opening and locking, another process may take it for a leftover.
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()


def _lock(descriptor: int) -> None:
    """Raises `BlockingIOError` where it is locked already."""
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _remove_unless_locked(path: str) -> None:
    with contextlib.suppress(OSError):
        # NFS wants a file open for writing before it locks it for one process alone.
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            _lock(descriptor)
            os.unlink(path)
        finally:
            os.close(descriptor)


def _synchronise_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    finally:
        os.close(descriptor)


def _free_bytes(folder: Path) -> str:
    """As text; the nearest folder that exists is asked."""
    while not os.path.exists(folder) and folder != folder.parent:
        folder = folder.parent
    try:
        status = os.statvfs(folder)
    except OSError:
        return "an unknown number"
    return f"{status.f_bavail * status.f_frsize:,}"
