"""The newest training states of a run in one folder, of which one can always be read."""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from tf_largebatch.core.atomic_file import remove_leftovers, write_error
from tf_largebatch.core.epoch_order import checked_integer
from tf_largebatch.core.errors import ConfigurationError, DataError
from tf_largebatch.core.state_file import load_state_file, write_state_file

_FILE_NAME = re.compile(r"state_([0-9]{12}|[1-9][0-9]{12,18})\.tlb")
_MOST_UPDATES = 10**18


@dataclass(frozen=True, kw_only=True)
class LoadedState:
    """A state that was read, and where it stands.

    Attributes:
        path: its file.
        update: the number of optimizer updates before it.
        contents: its plain values.
        arrays: its arrays, in the order in which they were given.
        digest: by which workers compare what they have read; see `StoredState.digest`.
    """

    path: Path
    update: int
    contents: dict[str, Any]
    arrays: list[npt.NDArray[Any]]
    digest: str


class StateDirectory:
    """A folder of state files, `state_UPDATE.tlb`, the newest of which are kept.

    One process writes into it at a time; any number read, also meanwhile. Other files are left
    alone.

    Args:
        path: the folder; the first `save` makes it if it is missing.
        keep: how many states stay after a save, at least 1. With one more than that there must be
            room on the disk, as old ones go only after a new one is safe.

    Raises:
        ConfigurationError: `path` is no path, or not that of a folder, or `keep` is out of range.
    """

    def __init__(self, path: str | os.PathLike[str], *, keep: int = 2) -> None:
        self.path = _checked_folder(path)
        self.keep = checked_integer(keep, "keep", minimum=1)
        # Found by `load_newest` to be of no use; removed once there is a newer state.
        self._unusable: set[Path] = set()

    def save(
        self, update: int, contents: Mapping[str, Any], arrays: Sequence[npt.NDArray[Any]]
    ) -> Path:
        """Writes a state, then removes all but the newest ones; returns its path.

        Whenever the process is killed, every state that was there before, or all that are to
        stay, can be read. Temporary files of processes that were killed are removed as well. A
        state of the same update is replaced.

        Args:
            update: the number of optimizer updates so far, not below that of any state here that
                `load_newest` of this object has not found to be unusable.
            contents: as `write_state_file` takes them.
            arrays: likewise.

        Raises:
            ConfigurationError: contents or arrays of another kind, or a later state in the
                folder, which would be loaded instead of this one.
            StateWriteError: the folder or the file cannot be written; what was there, stays.
        """
        update = checked_integer(update, "update", minimum=0, maximum=_MOST_UPDATES)
        path = self.path / f"state_{update:012d}.tlb"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            stored = self._stored()
        except OSError as error:
            num_bytes = sum(getattr(array, "nbytes", 0) for array in arrays)
            raise write_error(path, error, num_bytes=num_bytes) from error
        usable = {number: of for number, of in stored.items() if of not in self._unusable}
        later = [number for number in usable if number > update]
        if later:
            raise ConfigurationError(
                f"{str(self.path)!r} has a state of update {max(later)}, which is later than "
                f"update {update} that is to be saved, and would be loaded instead of it. Load "
                "that one first, or choose an empty folder."
            )
        remove_leftovers(self.path, _FILE_NAME)  # first, as they may fill the disk
        write_state_file(path, contents, arrays)
        kept = sorted({*usable, update})[-self.keep :]
        self._unusable.discard(path)
        for number, old in stored.items():
            if number not in kept:
                self._remove(old)
        return path

    def load_newest(self) -> LoadedState | None:
        """The newest state that can be read; None where there is no state at all.

        One that cannot be read is passed over for the one before it, with a warning that names it
        and says what is wrong; the next `save` removes it. The file is read once.

        Raises:
            DataError: the folder cannot be read, or there are states, none of which can; the
                message lists all.
        """
        while True:
            before = self._listed()
            failures: dict[Path, DataError] = {}
            for update in sorted(before, reverse=True):
                path = before[update]
                try:
                    stored = load_state_file(path)
                except DataError as error:
                    failures[path] = error
                    continue
                self._pass_over(failures, instead=path)
                return LoadedState(path=path, update=update, **stored._asdict())
            if self._listed() == before:  # else another process has saved one, and removed these
                break
        if not failures:
            return None
        listed = "\n".join(f"  {error}" for error in failures.values())
        raise DataError(
            f"None of the {len(failures)} states in {str(self.path)!r} can be used. To begin "
            f"anew, choose an empty folder. What is wrong with each:\n{listed}"
        )

    def _stored(self) -> dict[int, Path]:
        """{update: path} of the state files; raises `OSError`."""
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return {}
        matches = ((name, _FILE_NAME.fullmatch(name)) for name in names)
        return {int(match[1]): self.path / name for name, match in matches if match}

    def _listed(self) -> dict[int, Path]:
        try:
            return self._stored()
        except OSError as error:
            reason = error.strerror or error
            raise DataError(f"The folder {str(self.path)!r} cannot be read: {reason}.") from error

    def _pass_over(self, failures: Mapping[Path, DataError], *, instead: Path) -> None:
        for path, error in failures.items():
            if not os.path.lexists(path):  # removed meanwhile by the process that writes
                continue
            self._unusable.add(path)
            warnings.warn(
                f"A state is passed over, and {instead.name} is loaded instead: {error} The next "
                "save removes it.",
                stacklevel=3,
            )

    def _remove(self, path: Path) -> None:
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        except OSError as error:
            warnings.warn(
                f"The old state {str(path)!r} cannot be removed: {error.strerror or error}.",
                stacklevel=3,
            )
        else:
            self._unusable.discard(path)


def _checked_folder(path: Any) -> Path:
    given = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(given, str) or not given or not _can_name_a_file(given):
        raise ConfigurationError(f"path must be that of a folder, but is {path!r}.")
    if os.path.exists(given) and not os.path.isdir(given):
        raise ConfigurationError(f"path must be that of a folder, but {given!r} is a file.")
    return Path(given)


def _can_name_a_file(text: str) -> bool:
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False
