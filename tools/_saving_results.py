"""What the runs of `benchmark_saving.py` amount to: medians, ratios, a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

VARIANTS = ("training_state", "backup_and_restore", "save_weights")


def rows_of(
    workers: int, results: Sequence[Mapping[str, Any]], problem: str | None
) -> list[dict[str, Any]]:
    """One row a variant, of what each worker handed back in rank order; none if they failed.

    `TrainingState` holds up the slowest worker's training; the others save on the chief alone.
    """
    problems = [problem] if problem else [
        f"worker {rank}: {text}" for rank, each in enumerate(results) for text in each["problems"]
    ]  # fmt: skip
    return [_row(variant, workers, results, problems) for variant in VARIANTS]


def _row(
    variant: str, workers: int, results: Sequence[Mapping[str, Any]], problems: list[str]
) -> dict[str, Any]:
    by_worker = [each["seconds"][variant] for each in results if each["seconds"][variant]]
    seconds = [max(of_save) for of_save in zip(*by_worker, strict=True)]
    written = results[0]["seconds"]["written"] if results and variant == VARIANTS[0] else []
    median = statistics.median(seconds) if seconds else None
    megabytes = results[0]["megabytes"] if results else None
    return {
        "variant": variant,
        "workers": workers,
        "megabytes": megabytes,
        "stall_ms_p50": None if median is None else 1e3 * median,
        "stall_ms_max": 1e3 * max(seconds) if seconds else None,
        "stall_ms_all": [1e3 * each for each in seconds],
        "stall_ms_per_mb": 1e3 * median / megabytes if median is not None else None,
        "written_ms_p50": 1e3 * statistics.median(written) if written else None,
        "verified": not problems and bool(seconds),
        "problems": problems,
    }


def figures_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The figures for people."""
    table = Table(title="Milliseconds that training waits for one save", box=box.SIMPLE_HEAD)
    columns = ("workers", "variant", "MB", "p50", "max", "per MB", "written after", "verified")
    for heading in columns:
        justify = "left" if heading == "variant" else "right"
        table.add_column(heading, justify=justify, no_wrap=True)
    for row in rows:
        table.add_row(
            str(row["workers"]),
            row["variant"],
            _shown(row["megabytes"], ".0f"),
            _shown(row["stall_ms_p50"], ".1f"),
            _shown(row["stall_ms_max"], ".1f"),
            _shown(row["stall_ms_per_mb"], ".3f"),
            _shown(row["written_ms_p50"], ".0f"),
            "yes" if row["verified"] else "NO",
        )
    return table


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
