"""What the runs of `benchmark_optimizers.py` amount to: an oracle, medians, ratios, a table."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from rich import box
from rich.table import Table

Arrays = Sequence[npt.NDArray[Any]]
# Of float32 updates from float64 ones, as a part of the largest weight and move of a variable.
_WEIGHT_TOLERANCE, _MOVE_TOLERANCE = 1e-6, 1e-4


@dataclasses.dataclass(frozen=True)
class Timing:
    """Some updates by one optimizer.

    Args:
        optimizer: its name.
        wall_ms: milliseconds an update, by the clock.
        cpu_ms: milliseconds an update, of processor time of the whole process.
    """

    optimizer: str
    wall_ms: float
    cpu_ms: float


def expected_weights(
    weights: Arrays,
    gradients: Arrays,
    *,
    updates: int,
    learning_rate: float,
    momentum: float,
    weight_decay: float = 0.0,
    trust_coefficient: float | None = None,
) -> list[npt.NDArray[np.float64]]:
    """Momentum SGD, or LARS where there is a trust coefficient, in float64 and for one rate."""
    results = []
    for start, gradient in zip(weights, gradients, strict=True):
        w, g = start.astype(np.float64), gradient.astype(np.float64)
        v = np.zeros_like(w)
        for _ in range(updates):
            treated = w.ndim > 1
            step = g + weight_decay * w if treated else g
            if treated and trust_coefficient is not None:
                norms = np.linalg.norm(w), np.linalg.norm(g)
                step = step * (trust_coefficient * norms[0] / (norms[1] + weight_decay * norms[0]))
            v = momentum * v + step
            w = w - learning_rate * v
        results.append(w)
    return results


def check_weights(
    names: Sequence[str], starts: Arrays, found: Arrays, expected: Arrays
) -> list[str]:
    """Returns what is wrong with the weights after a few updates."""
    problems = []
    for name, start, ours, oracle in zip(names, starts, found, expected, strict=True):
        error = float(np.max(np.abs(ours - oracle)))
        move = float(np.max(np.abs(oracle - start)))
        allowed = _WEIGHT_TOLERANCE * float(np.max(np.abs(start))) + _MOVE_TOLERANCE * move
        if not error <= allowed:
            problems.append(f"{name} is {error:.1e} from NumPy's, of a move of {move:.1e}")
    return problems


def summarise(timings: Sequence[Timing], problems: dict[str, list[str]]) -> list[dict[str, Any]]:
    """One row an optimizer, in the order of first appearance."""
    rows = []
    for name in dict.fromkeys(each.optimizer for each in timings):
        wall = [each.wall_ms for each in timings if each.optimizer == name]
        cpu = [each.cpu_ms for each in timings if each.optimizer == name]
        rows.append(
            {
                "optimizer": name,
                "update_ms_p50": statistics.median(wall),
                "update_ms_min": min(wall),
                "update_ms_max": max(wall),
                "update_ms_all": wall,
                "cpu_ms_p50": statistics.median(cpu),
                "cpu_ms_all": cpu,
                "verified": not problems[name],
                "problems": problems[name],
            }
        )
    return rows


def compare(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ratios to the first row: of the medians by clock and by processor time.

    `lowest` and `highest` are over repeats by the clock, each of which compares two runs that
    followed one another.
    """
    reference, *others = rows
    ratios = []
    for row in others:
        pairs = zip(row["update_ms_all"], reference["update_ms_all"], strict=True)
        by_repeat = [ours / theirs for ours, theirs in pairs]
        ratios.append(
            {
                "optimizer": row["optimizer"],
                "reference": reference["optimizer"],
                "ratio": row["update_ms_p50"] / reference["update_ms_p50"],
                "cpu_ratio": row["cpu_ms_p50"] / reference["cpu_ms_p50"],
                "lowest": min(by_repeat),
                "highest": max(by_repeat),
                "verified": row["verified"] and reference["verified"],
            }
        )
    return ratios


def figures_table(rows: Sequence[dict[str, Any]], ratios: Sequence[dict[str, Any]]) -> Table:
    """The figures for people."""
    table = Table(title="Milliseconds an update", box=box.SIMPLE_HEAD)
    reference = rows[0]["optimizer"]
    headings = ("optimizer", "median", "least", "greatest", "by CPU", f"ratio to {reference}")
    for heading in (*headings, "ratio by CPU", "verified"):
        justify = "left" if heading == "optimizer" else "right"
        table.add_column(heading, justify=justify, no_wrap=True)
    texts = {
        each["optimizer"]: (
            f"{each['ratio']:.2f} ({each['lowest']:.2f} to {each['highest']:.2f})",
            f"{each['cpu_ratio']:.2f}",
        )
        for each in ratios
    }
    for row in rows:
        keys = ("update_ms_p50", "update_ms_min", "update_ms_max", "cpu_ms_p50")
        table.add_row(
            row["optimizer"],
            *(f"{row[key]:.1f}" for key in keys),
            *texts.get(row["optimizer"], ("", "")),
            "yes" if row["verified"] else "NO",
        )
    return table
