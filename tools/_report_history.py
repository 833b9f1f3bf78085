"""history.csv of a run, as CSVLogger leaves it: also of one that was killed, or went on."""

from __future__ import annotations

import csv
import dataclasses
import math
from pathlib import Path

Values = list[float | None]
_MOST_EPOCHS = 2**53  # as far as whole numbers are exact for the script of the page


@dataclasses.dataclass(frozen=True, kw_only=True)
class History:
    """What was logged at the end of each epoch.

    Attributes:
        epochs: numbers of the epochs, from 1 on, rising; there may be gaps.
        columns: the values by column, one for each of `epochs`; None where there is no number.
        notes: sentences on what is wrong with the file.
    """

    epochs: list[int]
    columns: dict[str, Values]
    notes: tuple[str, ...] = ()

    def last(self, column: str) -> float | None:
        """Of the last epoch that has one; None if none has."""
        values = [value for value in self.columns.get(column, []) if value is not None]
        return values[-1] if values else None

    def best(self, column: str) -> tuple[float, int] | None:
        """The largest value and its epoch, the first of equals; None if there is none."""
        found = [
            (value, -epoch)
            for value, epoch in zip(self.columns.get(column, []), self.epochs, strict=False)
            if value is not None and not math.isnan(value)
        ]
        if not found:
            return None
        value, epoch = max(found)
        return value, -epoch

    def first_not_finite(self, *columns: str) -> tuple[int, str, float] | None:
        """Epoch, column and value of the first NaN or infinity in these columns."""
        found = [
            (epoch, column, value)
            for column in columns
            for epoch, value in zip(self.epochs, self.columns.get(column, []), strict=False)
            if value is not None and not math.isfinite(value)
        ]
        return min(found, key=lambda each: each[0], default=None)


def read_history(path: Path) -> History:
    """The epochs in the file; none, if there is no file yet.

    What is not a whole line is passed over and noted, as the last one of a process that was killed
    while it wrote. Of an epoch that is there twice the later line counts: a run that goes on from
    an older state logs again what it had logged. A header in the middle names the columns of what
    follows.
    """
    if not path.exists():
        return History(epochs=[], columns={})
    *lines, rest = path.read_bytes().decode("utf-8", "replace").split("\n")
    notes: list[str] = []
    names: list[str] = []
    rows: dict[int, dict[str, float | None]] = {}
    for number, line in enumerate(lines, start=1):
        cells = _cells(line)
        if cells[:1] == ["epoch"]:
            names = cells[1:]
            continue
        epoch = _epoch(cells, names)
        if epoch is None:
            notes.append(f"{path.name}, line {number}: is not an epoch, passed over.")
            continue
        if epoch in rows:
            notes.append(f"{path.name}, line {number}: epoch {epoch} again; the later line counts.")
        rows[epoch] = dict(zip(names, map(_number, cells[1:]), strict=True))
    if rest:
        notes.append(f"{path.name}, line {len(lines) + 1}: has no end, passed over.")
    return _history(rows, notes)


def _cells(line: str) -> list[str]:
    try:
        return next(csv.reader([line]), [])
    except csv.Error:  # as for a NUL, of a file that lost its end in a crash
        return []


def _epoch(cells: list[str], names: list[str]) -> int | None:
    """From 1 on; None for a line that has not one cell for each column."""
    if not names or len(cells) != len(names) + 1:
        return None
    try:
        epoch = int(cells[0])
    except ValueError:
        return None
    return epoch + 1 if 0 <= epoch < _MOST_EPOCHS else None


def _number(cell: str) -> float | None:
    """None for what is no number: CSVLogger's "NA", and arrays."""
    try:
        return float(cell)
    except ValueError:
        return None


def _history(rows: dict[int, dict[str, float | None]], notes: list[str]) -> History:
    epochs = sorted(rows)
    names = {name: None for epoch in epochs for name in rows[epoch]}  # in order, each once
    columns = {name: [rows[epoch].get(name) for epoch in epochs] for name in names}
    with_numbers = {
        name: values
        for name, values in columns.items()
        if any(value is not None for value in values)
    }
    return History(epochs=epochs, columns=with_numbers, notes=tuple(notes))
