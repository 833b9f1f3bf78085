"""What one packing of a source consists of: its shards, its manifest, its lock."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from tf_largebatch.core.epoch_order import checked_integer
from tf_largebatch.core.errors import ConfigurationError, DataError

SHARD_BYTES = 128 * 2**20  # what a shard holds, about, unless the number of shards is given
_FORMAT_VERSION = 1
_MOST_SHARDS = 99_999  # five digits in the names
_SHARD = r"-\d{5}-of-\d{5}\.(tfrecord|array_record)"


@dataclass(frozen=True)
class Manifest:
    """What lies in the shards, stored beside them as NAME.json before the first one.

    Attributes:
        record_format: "tfrecord" or "array_record", also the extension of the shards.
        num_rows: rows of the source.
        num_shards: files that they are cut into.
        class_names: those of the source, or `None`.
        fingerprint: SHA-256 of the names of all rows and of the bytes and labels of some.
    """

    record_format: str
    num_rows: int
    num_shards: int
    class_names: tuple[str, ...] | None
    fingerprint: str

    def to_json(self) -> str:
        return json.dumps({"format_version": _FORMAT_VERSION, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def read(cls, path: Path) -> Manifest | None:
        """The stored one; `None` where there is no file.

        Raises:
            DataError: the file is no manifest, or one of another version.
        """
        try:
            stored = json.loads(path.read_bytes())
            version = stored.pop("format_version")
            if version == _FORMAT_VERSION:
                names = stored.pop("class_names")
                return cls(**stored, class_names=None if names is None else tuple(names))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError(
                f"{path} is not the manifest of packed records ({error!r}); give another name "
                "or folder, or remove it and the shards beside it."
            ) from error
        raise DataError(
            f"{path} has format version {version!r}, but this release reads {_FORMAT_VERSION}; "
            "give another name or folder."
        )

    def check_same(self, stored: Manifest, path: Path) -> None:
        """Raises `DataError`, with both sides, unless the stored manifest is this one."""
        differences = [
            f"{key}: {_shown(theirs)} there, {_shown(ours)} now"
            for (key, theirs), ours in zip(
                asdict(stored).items(), asdict(self).values(), strict=True
            )
            if theirs != ours
        ]
        if differences:
            raise DataError(
                f"{path} describes shards of something else ({'; '.join(differences)}); give "
                "another name or folder, or remove it and its shards."
            )


def _shown(value: Any) -> str:
    if not isinstance(value, tuple):
        return repr(value)
    digest = hashlib.sha256("\0".join(map(str, value)).encode()).hexdigest()[:8]
    return f"{len(value)} names {', '.join(map(repr, value[:2]))}, ... (digest {digest})"


@dataclass(frozen=True)
class Shard:
    """Rows `[begin, end)` and the file that they are for."""

    path: Path
    begin: int
    end: int

    @property
    def partial_path(self) -> Path:
        """Where it is written: hidden, so that a pattern like NAME-* does not match it."""
        return self.path.with_name(f".{self.path.name}.partial")


def plan_shards(directory: Path, name: str, manifest: Manifest) -> list[Shard]:
    """Shard `s` of `k` holds rows `[s * n // k, (s + 1) * n // k)`."""
    rows, shards = manifest.num_rows, manifest.num_shards
    return [
        Shard(
            path=directory / f"{name}-{s:05d}-of-{shards:05d}.{manifest.record_format}",
            begin=s * rows // shards,
            end=(s + 1) * rows // shards,
        )
        for s in range(shards)
    ]


def choose_num_shards(num_rows: int, mean_row_bytes: float) -> int:
    """As many shards as hold about `SHARD_BYTES` each, at least 1, at most one a row."""
    return min(max(1, round(num_rows * mean_row_bytes / SHARD_BYTES)), num_rows, _MOST_SHARDS)


def checked_num_shards(num_shards: int, num_rows: int) -> int:
    """Raises `ConfigurationError` unless each shard gets a row."""
    return checked_integer(num_shards, "num_shards", minimum=1, maximum=min(num_rows, _MOST_SHARDS))


def checked_target(directory: str | os.PathLike[str], name: str) -> Path:
    """The folder, made if need be.

    Raises:
        ConfigurationError: the folder is remote, or `name` is no plain start of a file name.
        DataError: the folder cannot be made.
    """
    path = os.fspath(directory)
    if "://" in path:
        raise ConfigurationError(
            f"directory must be local, as shards are locked and renamed there, but is {path!r}; "
            "write to a local folder, then copy the files."
        )
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
        raise ConfigurationError(
            "name must be letters, digits, '_', '.' and '-', the first a letter or digit, but is "
            f"{name!r}; an example is 'train'."
        )
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"The folder {path} cannot be made: {error.strerror}.") from error
    return Path(path)


def remove_partial_files(directory: Path, name: str) -> None:
    """Removes what an interrupted run left; only the holder of the lock may."""
    for path in _matching(directory, rf"\.{re.escape(name)}(\.json|{_SHARD})\.partial"):
        path.unlink(missing_ok=True)


def store_manifest(manifest: Manifest, path: Path) -> None:
    """Writes it atomically.

    Raises:
        DataError: it cannot be written, or shards of this name are there already without one.
    """
    strays = _matching(path.parent, re.escape(path.stem) + _SHARD)
    if strays:
        raise DataError(
            f"{strays[0]} is there, but not {path}, which would tell what it holds; give another "
            "name or folder, or remove such shards."
        )
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(manifest.to_json())
        publish(partial, path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise DataError(f"{path} cannot be written: {error}") from error


def publish(partial: Path, path: Path) -> None:
    """Gives a written file its name, once its bytes are on the disk."""
    _sync(partial)
    partial.replace(path)
    with suppress(OSError):  # not every file system can do it for folders
        _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _matching(directory: Path, pattern: str) -> Sequence[Path]:
    return sorted(path for path in directory.iterdir() if re.fullmatch(pattern, path.name))


@contextmanager
def locked(directory: Path, name: str) -> Iterator[None]:
    """Holds .NAME.lock, which the kernel frees when the process ends, in whatever way.

    Raises:
        DataError: another process holds it, or the file system has no locks.
    """
    path = directory / f".{name}.lock"
    with _opened(path) as file:
        _lock(file, path)
        try:
            yield
        finally:
            with suppress(OSError):
                path.unlink()


def _opened(path: Path) -> IO[str]:
    try:
        return path.open("a")
    except OSError as error:
        raise DataError(f"{path.parent} cannot be written to: {error}") from error


def _lock(file: IO[str], path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A holder removes the file before it lets go; then this lock is on a file without a name.
        alone = os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except (BlockingIOError, FileNotFoundError):
        alone = False
    except OSError as error:
        raise DataError(f"{path.parent} lies where files cannot be locked: {error}") from error
    if not alone:
        raise DataError(
            f"Another process packs into {path.parent} under this name (it holds {path}); wait "
            "for its end, or give another name or folder."
        )
