"""What CSVLogger and TensorBoard have written: as it was when a state was saved.

A process that is killed has often logged more than it saved. Resumed, it would log that again, and
curves would have two points for one epoch; so what came after the state is taken away.
"""

from __future__ import annotations

import os
import re
import weakref
from pathlib import Path
from typing import Any

_EVENT_FILE = re.compile(r"events\.out\.tfevents\.([0-9]+)\..*")


# Of each TensorBoard, the files of this process and of those before it, relative to its folder.
_of_this_run: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


def read_csv(logger: Any) -> dict[str, Any]:
    """The text of a `CSVLogger`'s file, and its columns."""
    path = Path(logger.filename)
    if logger.csv_file is None or not path.exists():
        return {}
    if not logger.csv_file.closed:
        logger.csv_file.flush()
    with path.open(newline="") as file:  # line ends as they are
        return {"text": file.read(), "keys": logger.keys}


def restore_csv(logger: Any, state: dict[str, Any]) -> None:
    """Puts the text back, behind which the logger goes on."""
    if "text" not in state or logger.csv_file is None:
        return
    if logger.csv_file.closed:
        with Path(logger.filename).open("w", newline="") as file:
            file.write(state["text"])
        return
    logger.csv_file.seek(0)
    logger.csv_file.truncate()
    logger.csv_file.write(state["text"])
    logger.csv_file.flush()
    logger.keys = state["keys"]
    logger.append_header = not state["text"]


def open_event_files(board: Any, *, validates: bool) -> None:
    """Has a `TensorBoard` open the files that it will write, so that the next state knows them."""
    _ = board._train_writer, validates and board._val_writer


def read_event_files(board: Any) -> dict[str, Any]:
    """The lengths of this run's files, once all is written that a `TensorBoard` holds back.

    Others may lie in the same folder.
    """
    for writer in board._writers.values():
        writer.flush()
    names, open_files = _of_this_run.setdefault(board, set()), _files_of_this_process()
    files = {str(path.relative_to(board.log_dir)): path for path in _event_files(board)}
    names |= {name for name, path in files.items() if path.resolve() in open_files}
    return {"event_files": {name: files[name].stat().st_size for name in names & set(files)}}


def restore_event_files(board: Any, state: dict[str, Any]) -> None:
    """Cuts this run's files off where they ended."""
    lengths = state.get("event_files", {})
    _of_this_run[board] = set(lengths)
    for path in _event_files(board):
        length = lengths.get(str(path.relative_to(board.log_dir)))
        if length is not None and length < path.stat().st_size:
            with path.open("r+b") as file:
                file.truncate(length)


def _event_files(board: Any) -> list[Path]:
    folders = [Path(board.log_dir) / name for name in ("train", "validation")]
    return [
        path
        for folder in folders
        if folder.is_dir()
        for path in sorted(folder.iterdir())
        if _EVENT_FILE.fullmatch(path.name)
    ]


def _files_of_this_process() -> set[Path]:
    links = Path("/proc/self/fd")  # of Linux; elsewhere an epoch may be there twice
    return {
        Path(os.readlink(link))
        for link in (links.iterdir() if links.is_dir() else ())
        if link.is_symlink()  # the one that lists the folder is gone by now
    }
