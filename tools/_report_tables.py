"""What a report of runs says in tables, in the terminal and in the page alike."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from _report_runs import Run, printable
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

NOTHING = "-"
TEXT_COLUMNS = ("run", "data set", "model", "warmup", "state")  # the others are numbers
_UNBOUNDED = 100_000  # characters


def overview(run: Run) -> dict[str, str]:
    """The line of a run, by heading."""
    recipe, history = run.recipe, run.history
    accuracy, best = history.last("val_accuracy"), history.best("val_accuracy")
    return {
        "run": run.label,
        "data set": _value_text(run.settings.get("dataset", NOTHING)),
        "model": _value_text(run.settings.get("model", NOTHING)),
        "global batch": f"{recipe.global_batch_size:,}",
        "replicas": f"{recipe.num_replicas:,}",
        "peak rate": f"{recipe.peak_learning_rate:.4g}",
        "warmup": recipe.warmup
        if recipe.warmup == "none"
        else f"{recipe.warmup}, {recipe.warmup_epochs:g}",
        "epochs": f"{recipe.epochs:,}",
        "val. accuracy": _percent(accuracy),
        "best": f"{_percent(best[0])} ({best[1]})" if best else NOTHING,
        "loss": _number(history.last("loss")),
        "val. loss": _number(history.last("val_loss")),
        "images/s": NOTHING if run.images_per_second is None else f"{run.images_per_second:,.0f}",
        "updates": f"{run.steps:,}",
        "state": run.state,
    }


def differences(runs: Sequence[Run]) -> dict[str, list[str]]:
    """The settings and fields of the recipe that are not the same in all runs; a text for each run.

    A field of the recipe that says what the setting of its name says is not told twice. Versions
    are those of the runs that have finished.
    """
    fields = [_fields(run) for run in runs]
    names = {name: None for each in fields for name in each}  # in order, each once
    differing = {}
    for name in names:
        texts = [_value_text(each[name]) if name in each else NOTHING for each in fields]
        known = [
            text
            for run, text in zip(runs, texts, strict=True)
            if run.summary is not None or not name.startswith("versions.")
        ]
        if len(set(known)) > 1:
            differing[printable(name)] = texts
    return differing


def print_report(runs: Sequence[Run], console: Console) -> None:
    """Both tables, and the notes."""
    console.print(_overview_table(runs, console))
    if len(runs) > 1:
        console.print(_differences_table(runs))
    for run in runs:
        for note in run.notes:
            console.print(Text(f"{run.label}: {note}"), soft_wrap=True)


def _fields(run: Run) -> dict[str, Any]:
    recipe = run.recipe.to_dict()
    fields = dict(run.settings)
    for name, value in recipe.items():
        if name not in fields:
            fields[name] = value
        elif _value_text(fields[name]) != _value_text(value):
            fields[f"recipe.{name}"] = value
    versions = (run.summary or {}).get("versions")
    if isinstance(versions, dict):
        fields.update({f"versions.{name}": value for name, value in versions.items()})
    return fields


def _overview_table(runs: Sequence[Run], console: Console) -> Table:
    """A line a run; in a narrow terminal a column a run."""
    rows = [overview(run) for run in runs]
    headings = list(rows[0])
    table = Table(box=box.SIMPLE_HEAD)
    for heading in headings:
        justify = "left" if heading in TEXT_COLUMNS else "right"
        table.add_column(heading, justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row.values()))
    unbounded = console.options.update(width=_UNBOUNDED)
    if Measurement.get(console, unbounded, table).maximum <= console.width:
        return table
    turned = Table(box=box.SIMPLE_HEAD)
    turned.add_column("", no_wrap=True)
    for row in rows:
        turned.add_column(Text(row["run"]), overflow="fold")
    for heading in headings[1:]:
        turned.add_row(heading, *(Text(row[heading]) for row in rows))
    return turned


def _differences_table(runs: Sequence[Run]) -> Table | Text:
    differing = differences(runs)
    if not differing:
        return Text("All settings are the same.")
    table = Table(title="What differs", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("", overflow="fold")
    for run in runs:
        table.add_column(Text(run.label), overflow="fold")
    for name, texts in differing.items():
        table.add_row(*map(Text, (name, *texts)))
    return table


def _value_text(value: Any) -> str:
    """As in the file; a text without quotes, unless it is empty."""
    if isinstance(value, str) and value:
        return printable(value)
    if value is None:
        return "default"
    return printable(json.dumps(value, ensure_ascii=False))


def _percent(value: float | None) -> str:
    return f"{value:.2%}" if value is not None and math.isfinite(value) else _number(value)


def _number(value: float | None) -> str:
    if value is None:
        return NOTHING
    return "NaN" if math.isnan(value) else f"{value:#.4g}"
