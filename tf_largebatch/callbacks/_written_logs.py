"""What CSVLogger and TensorBoard have written: as it was when a state was saved.

A process that is killed has often logged more than it saved. Resumed, it would log that again, and
curves would have two points for one epoch; so what came after the state is taken away.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

_EVENT_FILE = re.compile(r"events\.out\.tfevents\.([0-9]+)\..*")


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


def read_event_files(board: Any) -> dict[str, Any]:
    """The lengths of a `TensorBoard`'s files, once all is written that it holds back."""
    for writer in board._writers.values():
        writer.flush()
    return {
        "event_files": {
            str(path.relative_to(board.log_dir)): path.stat().st_size
            for path in _event_files(board)
        }
    }


def restore_event_files(board: Any, state: dict[str, Any]) -> None:
    """Cuts files off where they ended, and removes those that were not there.

    Those of this process stay: their writers are open.
    """
    lengths = state.get("event_files", {})
    open_files = _files_of_this_process()
    for path in _event_files(board):
        if path.resolve() in open_files:
            continue
        length = lengths.get(str(path.relative_to(board.log_dir)))
        if length is None:
            path.unlink()
        elif length < path.stat().st_size:
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
    return {
        Path(os.readlink(link))
        for link in Path("/proc/self/fd").iterdir()
        if link.is_symlink()  # the one that lists the folder is gone by now
    }
