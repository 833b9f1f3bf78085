"""Run directories of examples/train.py, read to be compared."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _report_history import History, read_history

import tf_largebatch as tlb

_RESTARTED_LOG = re.compile(r"worker_[0-9]+\.restart_([0-9]+)\.log")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One run directory.

    Attributes:
        label: how it is called beside the others.
        settings: of config.json, without run_dir and recipe.
        recipe: of config.json.
        summary: of summary.json; None for a run that has not finished.
        history: of history.csv.
        restarts: how often a launcher started it again, where the logs are in the directory.
        notes: sentences on what is wrong with the files.
    """

    label: str
    settings: dict[str, Any]
    recipe: tlb.Recipe
    summary: dict[str, Any] | None
    history: History
    restarts: int = 0
    notes: tuple[str, ...] = ()

    @property
    def state(self) -> str:
        """Finished, or at which epoch; and what went wrong on the way."""
        done, epochs = max(self.history.epochs, default=0), self.recipe.epochs
        if self.summary is None:
            parts = [f"{done} of {epochs} epochs" if done else "no epoch yet"]
        else:
            parts = ["finished" if done in (0, epochs) else f"finished after {done} epochs"]
        if broken := self.history.first_not_finite("loss", "val_loss"):
            epoch, column, value = broken
            parts.append(f"{column} {'NaN' if math.isnan(value) else 'infinite'} at epoch {epoch}")
        if self.restarts:
            times = "once" if self.restarts == 1 else f"{self.restarts} times"
            parts.append(f"started again {times}")
        return ", ".join(parts)

    @property
    def steps(self) -> int:
        """Updates made: those of the summary, else those of the epochs in the history."""
        steps = (self.summary or {}).get("steps")
        if isinstance(steps, int):
            return steps
        return max(self.history.epochs, default=0) * self.recipe.steps_per_epoch

    @property
    def images_per_second(self) -> float | None:
        """The median of the epochs without the first, which compiles."""
        values = self.history.columns.get("images_per_second", [])
        speeds = [value for value in values if value is not None]
        return statistics.median(speeds[1:] or speeds) if speeds else None


def printable(text: str) -> str:
    """The text without what would steer a terminal or cannot be written to a file."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs in these directories.

    Raises:
        DataError: one is no run directory of examples/train.py.
        ConfigurationError: one is named twice.
    """
    folders = [Path(os.path.normpath(path.absolute())) for path in paths]
    for number, path in enumerate(paths):
        if any(path.resolve() == other.resolve() for other in paths[:number]):
            raise tlb.ConfigurationError(f"{printable(str(path))}: is named twice.")
    labels = _labels(folders)
    return [_read_run(*each) for each in zip(paths, labels, strict=True)]


def _labels(folders: Sequence[Path]) -> list[str]:
    """As few of the last parts of the paths as tell them apart."""
    longest = max(len(folder.parts) for folder in folders)
    for count in range(1, longest + 1):
        labels = ["/".join(folder.parts[-count:]) for folder in folders]
        if len(set(labels)) == len(labels):
            break
    return [printable(label) for label in labels]


def _read_run(folder: Path, label: str) -> Run:
    try:
        return _read_files(folder, label)
    except OSError as error:
        raise tlb.DataError(
            f"{printable(str(error.filename or folder))}: cannot be read: {error.strerror}."
        ) from error


def _read_files(folder: Path, label: str) -> Run:
    config = _read_config(folder)
    notes: list[str] = []
    try:
        summary = _read_object(folder / "summary.json")
    except tlb.DataError as error:
        summary, notes = None, [str(error)]
    history = read_history(folder / "history.csv")
    return Run(
        label=label,
        settings={key: config[key] for key in config if key not in ("run_dir", "recipe")},
        recipe=_recipe(folder, config),
        summary=summary,
        history=history,
        restarts=_restarts(folder),
        notes=(*notes, *history.notes),
    )


def _read_config(folder: Path) -> dict[str, Any]:
    shown = printable(str(folder))
    if not folder.is_dir():
        raise tlb.DataError(f"{shown}: is no directory; give run directories of examples/train.py.")
    config = _read_object(folder / "config.json")
    if config is None:
        inside = sorted(str(path.parent) for path in folder.glob("*/config.json"))
        advice = f" Did you mean {printable(' '.join(inside[:3]))}?" if inside else ""
        raise tlb.DataError(
            f"{shown}: is no run directory: it has no config.json, which examples/train.py writes "
            f"first.{advice}"
        )
    return config


def _recipe(folder: Path, config: dict[str, Any]) -> tlb.Recipe:
    path = printable(str(folder / "config.json"))
    fields = config.get("recipe")
    if not isinstance(fields, dict):
        raise tlb.DataError(f"{path}: has no recipe, so it is not of examples/train.py.")
    try:
        return tlb.Recipe.from_dict(fields)
    except tlb.ConfigurationError as error:
        raise tlb.DataError(f"{path}: its recipe is refused: {printable(str(error))}") from error


def _read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None if there is no file."""
    if not path.exists():
        return None
    shown = printable(str(path))
    try:
        contents = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise tlb.DataError(f"{shown}: is not JSON: {printable(str(error))}.") from error
    if not isinstance(contents, dict):
        raise tlb.DataError(f"{shown}: is not an object of JSON.")
    return contents


def _restarts(folder: Path) -> int:
    """From the names of a launcher's logs, in the directory or in a folder of it."""
    logs = (*folder.glob("worker_*.log"), *folder.glob("*/worker_*.log"))
    found = (_RESTARTED_LOG.fullmatch(log.name) for log in logs)
    return max((int(match[1]) for match in found if match), default=0)
