"""What the timed calls of `benchmark_overlap.py` amount to: checks, the hidden part, a table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

VARIANTS = ("buckets", "single_bucket")


def hidden_part(compute: float, all_reduce: float, step: float) -> float:
    """The part of an all-reduce that a step does not wait for: 1 for all, 0 for none.

    (compute + all_reduce - step) / all_reduce, of times in any one unit.
    """
    return (compute + all_reduce - step) / all_reduce


def rows_of(results: Sequence[dict[str, Any]], *, bucket_bytes: int) -> list[dict[str, Any]]:
    """One row a variant.

    Args:
        results: what each worker wrote, in rank order.
        bucket_bytes: of the variant `buckets`.
    """
    compute = times_of([result["timed"]["compute"] for result in results])
    rows = []
    for variant in VARIANTS:
        names = [f"{variant}_{part}" for part in ("all_reduce", "step")]
        timed = [[result["timed"][name] for result in results] for name in names]
        all_reduce, step = map(times_of, timed)
        problems = [
            f"worker {rank}: {problem}"
            for rank, result in enumerate(results)
            for problem in result["problems"][variant]
        ]
        problems += [
            f"worker {rank} has other bits than worker 0: {name}"
            for name, by_rank in zip(names, timed, strict=True)
            for rank, each in enumerate(by_rank)
            if each["sha256"] != by_rank[0]["sha256"]
        ]
        row = {
            "variant": variant,
            "bucket_bytes": bucket_bytes if variant == "buckets" else None,
            "compute": compute,
            "all_reduce": all_reduce,
            "step": step,
        }
        row |= _hidden(compute, all_reduce, step)
        rows.append(row | {"verified": not problems, "problems": problems})
    return rows


def times_of(by_rank: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Times of a function's calls; each is that of the slowest worker.

    Args:
        by_rank: what each worker reports of it, in rank order.
    """
    spans = zip(*(each["spans_seconds"] for each in by_rank), strict=True)  # [call][rank]
    cpu_seconds = zip(*(each["cpu_seconds"] for each in by_rank), strict=True)  # [call][rank]
    times = [1000.0 * max(end - start for start, end in call) for call in spans]
    return {
        "p50_ms": statistics.median(times),
        "min_ms": min(times),
        "max_ms": max(times),
        "all_ms": times,
        "cpu_p50_ms": 1000.0 * statistics.median(map(sum, cpu_seconds)),
    }


def _hidden(
    compute: dict[str, Any], all_reduce: dict[str, Any], step: dict[str, Any]
) -> dict[str, Any]:
    parts = (compute, all_reduce, step)
    hidden = hidden_part(*(part["p50_ms"] for part in parts))
    possible = min(1.0, compute["p50_ms"] / all_reduce["p50_ms"])
    by_repeat = [
        hidden_part(*repeat) for repeat in zip(*(part["all_ms"] for part in parts), strict=True)
    ]
    return {
        "hidden": hidden,
        "hidden_min": min(by_repeat),
        "hidden_max": max(by_repeat),
        "hidden_all": by_repeat,
        "possible": possible,
        "hidden_of_possible": hidden / possible,
    }


def figures_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The figures for people."""
    title = "Milliseconds (p50), the hidden part of the all-reduce, its processor time"
    table = Table(title=title, box=box.SIMPLE_HEAD)
    parts = ("compute", "all_reduce", "step")
    for heading in ("variant", *parts, "hidden", "of possible", "CPU", "verified"):
        justify = "left" if heading == "variant" else "right"
        table.add_column(heading, justify=justify, no_wrap=True)
    for row in rows:
        table.add_row(
            row["variant"],
            *(f"{row[part]['p50_ms']:.1f}" for part in parts),
            "{hidden:.0%} ({hidden_min:.0%} to {hidden_max:.0%})".format(**row),
            f"{row['hidden_of_possible']:.0%}",
            f"{row['all_reduce']['cpu_p50_ms']:.1f}",
            "yes" if row["verified"] else "NO",
        )
    return table
