"""The file of results: a line of JSON a run, which several processes may add to."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from _study_settings import Setting

import tf_largebatch as tlb

Row = dict[str, Any]


def read_rows(path: Path) -> dict[Setting, Row]:
    """The runs in the file, by setting; none, if there is no file yet.

    The first of two equal runs counts. A last line without an end is of a process that was killed
    while it wrote, and is passed over.

    Raises:
        DataError: a line is not a run.
    """
    if not path.exists():
        return {}
    rows: dict[Setting, Row] = {}
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        if not line.endswith(b"\n"):
            continue
        try:
            row = json.loads(line)
            rows.setdefault(Setting(**row["setting"]), row)
        except (ValueError, TypeError, KeyError) as error:
            raise tlb.DataError(
                f"{path}, line {number}: is not a run ({error!r}); take the line out."
            ) from error
    return rows


def append_row(path: Path, setting: Setting, outcome: Mapping[str, Any]) -> None:
    """Adds a run as a whole line; another process that writes is waited for."""
    line = json.dumps({"setting": setting.to_dict(), **outcome}, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
        _cut_unfinished_line(file)
        file.write(line.encode())
        file.flush()
        os.fsync(file.fileno())


def _cut_unfinished_line(file: Any) -> None:
    file.seek(0)
    contents = file.read()
    end = contents.rfind(b"\n") + 1
    if end < len(contents):
        file.truncate(end)
