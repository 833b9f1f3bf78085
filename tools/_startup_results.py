"""What the runs of `benchmark_startup.py` amount to: checks, medians, ratios, a table."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table


@dataclasses.dataclass(frozen=True)
class Run:
    """One variant, built once by a set of workers.

    Args:
        variant: its name.
        repeat: its number among the runs of this variant, from 0.
        results: what each worker wrote, in rank order; empty if the run failed.
        problems: what went wrong, or is not as it should be.
    """

    variant: str
    repeat: int
    results: tuple[dict[str, Any], ...]
    problems: tuple[str, ...]

    @property
    def seconds(self) -> float | None:
        """Of the slowest worker; None if the run failed."""
        return max((result["seconds"] for result in self.results), default=None)

    @property
    def cpu_seconds(self) -> float:
        """Processor time of all workers together."""
        return sum(result["cpu_seconds"] for result in self.results)


def check_results(results: Sequence[dict[str, Any]], *, expected: str) -> list[str]:
    """Returns what is wrong with a run, whose time counts only if nothing is.

    Args:
        results: what each worker wrote, in rank order.
        expected: the digest of all variables in another run.
    """
    problems = [
        f"worker {rank} has other variables than worker 0"
        for rank, result in enumerate(results)
        if result["sha256"] != results[0]["sha256"]
    ]
    if results[0]["sha256"] != expected:
        problems.append("worker 0 has other variables than in the first run")
    return problems


def summarise(runs: Sequence[Run], *, reference: str) -> list[dict[str, Any]]:
    """One row a variant, in the order of first appearance; None is what was not measured."""
    by_variant: dict[str, dict[int, Run]] = {}
    for run in runs:
        by_variant.setdefault(run.variant, {})[run.repeat] = run
    rows = [_row(list(own.values())) for own in by_variant.values()]
    base = next((row for row in rows if row["variant"] == reference), None)
    for row in rows:
        row |= {"ratio": None, "ratio_lowest": None, "ratio_highest": None}
        if base is None or base["seconds_p50"] is None or row["seconds_p50"] is None:
            continue
        pairs = [
            run.seconds / other.seconds
            for repeat, run in by_variant[row["variant"]].items()
            if (other := by_variant[reference][repeat]).seconds and run.seconds
        ]
        row["ratio"] = row["seconds_p50"] / base["seconds_p50"]
        row["ratio_lowest"] = min(pairs, default=None)
        row["ratio_highest"] = max(pairs, default=None)
    return rows


def _row(runs: Sequence[Run]) -> dict[str, Any]:
    done = [run for run in runs if run.results]
    seconds = [run.seconds for run in done]
    problems = [f"repeat {run.repeat}: {text}" for run in runs for text in run.problems]

    def median_of(values: Sequence[float]) -> float | None:
        return statistics.median(values) if values else None

    return {
        "variant": runs[0].variant,
        "workers": len(done[0].results) if done else None,
        "seconds_p50": median_of(seconds),
        "seconds_min": min(seconds, default=None),
        "seconds_max": max(seconds, default=None),
        "seconds_all": seconds,
        "cpu_seconds_p50": median_of([run.cpu_seconds for run in done]),
        "strategy_seconds_p50": median_of(
            [max(result["strategy_seconds"] for result in run.results) for run in done]
        ),
        "variables": done[0].results[0]["variables"] if done else None,
        "verified": not problems,
        "problems": problems,
    }


def figures_table(rows: Sequence[dict[str, Any]], *, reference: str) -> Table:
    """The figures for people."""
    title = f"Seconds until all variables exist and are equal; ratio to {reference}"
    table = Table(title=title, box=box.SIMPLE_HEAD)
    for heading in ("variant", "workers", "p50", "min", "max", "CPU p50", "ratio", "verified"):
        justify = "left" if heading == "variant" else "right"
        table.add_column(heading, justify=justify, no_wrap=True)
    names = ("seconds_p50", "seconds_min", "seconds_max", "cpu_seconds_p50")
    for row in rows:
        ratio = ""
        if row["ratio"] is not None:
            ratio = "{ratio:.2f} ({ratio_lowest:.2f}-{ratio_highest:.2f})".format(**row)
        table.add_row(
            row["variant"],
            "-" if row["workers"] is None else str(row["workers"]),
            *("-" if row[name] is None else f"{row[name]:.2f}" for name in names),
            ratio,
            "yes" if row["verified"] else "NO",
        )
    return table
