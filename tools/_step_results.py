"""What the runs of `benchmark_step.py` amount to: checks, medians, ratios, a table."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

TOLERANCE = 1e-5  # between weights that saw the same rows
TRANSPORT_TOLERANCE = 1e-6  # if, besides, all but what carried the gradients was the same


@dataclasses.dataclass(frozen=True)
class Entry:
    """What is compared: a variant, and what carries its gradients between workers."""

    variant: str
    transport: str = "tensorflow"

    def __str__(self) -> str:
        return self.variant if self.transport == "tensorflow" else f"{self.variant} by mpi"


@dataclasses.dataclass(frozen=True)
class Run:
    """One entry, trained once by a set of workers.

    Args:
        entry: which.
        workers: how many.
        repeat: its number among the runs of this entry and number of workers, from 0.
        results: what each worker wrote, in rank order; empty if the run failed.
        problems: what went wrong, or is not as it should be.
    """

    entry: Entry
    workers: int
    repeat: int
    results: tuple[dict[str, Any], ...]
    problems: tuple[str, ...]

    @property
    def step_ms(self) -> list[float]:
        """Milliseconds a step on the chief, one value a timed epoch."""
        return list(self.results[0]["step_ms"]) if self.results else []

    @property
    def cpu_ms(self) -> list[float]:
        """Milliseconds of processor time a step, of all workers together, one a timed epoch."""
        by_rank = [result["cpu_ms"] for result in self.results]  # [rank, epoch]
        return [sum(epoch) for epoch in zip(*by_rank, strict=True)]


def check_results(
    results: Sequence[dict[str, Any]], *, steps: int, reference_weights: Sequence[float]
) -> list[str]:
    """Returns what is wrong with a run, whose time counts only if nothing is.

    Args:
        results: what each worker wrote, in rank order.
        steps: the optimizer updates that the run must have made.
        reference_weights: those of another run over the same rows.
    """
    problems = []
    weights = [np.asarray(result["weights"]) for result in results]
    for rank, result in enumerate(results):
        losses = result["losses"]
        if result["steps"] != steps:
            problems.append(f"worker {rank} made {result['steps']} updates instead of {steps}")
        if not (all(map(math.isfinite, losses)) and losses[-1] < losses[0]):
            problems.append(f"worker {rank}: the loss does not fall: {losses}")
        if not np.array_equal(weights[rank], weights[0]):
            problems.append(f"worker {rank} has other weights than worker 0")
    problems += compare_weights(
        weights[0], reference_weights, of="the first run's over the same rows", allowed=TOLERANCE
    )
    return problems


def compare_weights(
    weights: Sequence[float], others: Sequence[float], *, of: str, allowed: float
) -> list[str]:
    """Says that weights differ by more than `allowed` from `others`, which are `of`, if they do."""
    difference = float(np.max(np.abs(np.asarray(weights) - np.asarray(others))))
    if difference <= allowed:
        return []
    return [f"weights differ by {difference:.1e} from {of}; {allowed:g} is allowed"]


def check_transport(run: Run, runs: Sequence[Run]) -> list[str]:
    """What is wrong with a run's weights beside those that another transport led to.

    Args:
        run: that is checked, with results.
        runs: those before it.
    """
    for other in runs:
        differs_by_transport = (
            other.entry.variant == run.entry.variant
            and other.entry.transport != run.entry.transport
            and other.workers == run.workers
        )
        if differs_by_transport and other.results:
            return compare_weights(
                run.results[0]["weights"],
                other.results[0]["weights"],
                of=f"those by transport {other.entry.transport}",
                allowed=TRANSPORT_TOLERANCE,
            )
    return []


def summarise(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One row an entry and number of workers, in the order of first appearance."""
    rows = []
    for entry, workers in dict.fromkeys((run.entry, run.workers) for run in runs):
        own = [run for run in runs if (run.entry, run.workers) == (entry, workers)]
        values = [value for run in own for value in run.step_ms]
        cpu = [value for run in own for value in run.cpu_ms]
        problems = [f"repeat {run.repeat}: {text}" for run in own for text in run.problems]
        rows.append(
            {
                **dataclasses.asdict(entry),
                "workers": workers,
                "step_ms_p50": statistics.median(values) if values else None,
                "step_ms_min": min(values, default=None),
                "step_ms_max": max(values, default=None),
                "step_ms_all": values,
                "cpu_ms_p50": statistics.median(cpu) if cpu else None,
                "step_ms_by_repeat": [run.step_ms for run in own],
                "verified": not problems,
                "problems": problems,
            }
        )
    return rows


def entry_of(row: dict[str, Any]) -> Entry:
    return Entry(row["variant"], row["transport"])


def compare(rows: Sequence[dict[str, Any]], *, reference: Entry) -> list[dict[str, Any]]:
    """Ratios of the step times of all entries to those of `reference`, at equal workers.

    `ratio` is that of the medians over all epochs of all repeats. `lowest` and `highest` are over
    repeats, each of which compares two runs that followed one another.
    """
    ratios = []
    by_workers = {row["workers"]: row for row in rows if entry_of(row) == reference}
    for row in rows:
        base = by_workers[row["workers"]]
        pairs = [
            statistics.median(own) / statistics.median(others)
            for own, others in zip(row["step_ms_by_repeat"], base["step_ms_by_repeat"], strict=True)
            if own and others
        ]
        if row is not base and pairs:
            ratios.append(
                {
                    "workers": row["workers"],
                    **dataclasses.asdict(entry_of(row)),
                    "reference": reference.variant,
                    "reference_transport": reference.transport,
                    "ratio": row["step_ms_p50"] / base["step_ms_p50"],
                    "lowest": min(pairs),
                    "highest": max(pairs),
                    "verified": row["verified"] and base["verified"],
                }
            )
    return ratios


def figures_table(
    rows: Sequence[dict[str, Any]], ratios: Sequence[dict[str, Any]], *, reference: Entry
) -> Table:
    """The figures for people."""
    table = Table(title=f"Milliseconds a step; ratio to {reference}", box=box.SIMPLE_HEAD)
    for heading in ("workers", "variant", "p50", "min", "max", "CPU p50", "ratio", "verified"):
        justify = "left" if heading == "variant" else "right"
        table.add_column(heading, justify=justify, no_wrap=True)
    texts = {
        (ratio["workers"], entry_of(ratio)): "{ratio:.2f} ({lowest:.2f}-{highest:.2f})".format(
            **ratio
        )
        for ratio in ratios
    }
    for row in sorted(rows, key=lambda row: row["workers"]):
        times = [row[name] for name in ("step_ms_p50", "step_ms_min", "step_ms_max", "cpu_ms_p50")]
        table.add_row(
            str(row["workers"]),
            str(entry_of(row)),
            *("-" if value is None else f"{value:.2f}" for value in times),
            texts.get((row["workers"], entry_of(row)), ""),
            "yes" if row["verified"] else "NO",
        )
    return table
