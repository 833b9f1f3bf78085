"""The tables of `plan_scaling.py`, for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from _plan_papers import Figure
from rich import box
from rich.table import Table


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def run_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Batch, rates, steps and hours of each number of hosts."""
    headings = ("hosts", "GPUs", "batch", "peak rate", "warmup", "steps", "images/s", "hours")
    table = _table("The run", *headings)
    for row in rows:
        table.add_row(
            str(row["hosts"]),
            f"{row['replicas']:,}",
            f"{row['global_batch_size']:,}",
            f"{row['peak_learning_rate']:.4g}",
            f"{row['warmup_steps']:,}",
            f"{row['total_steps']:,}",
            f"{row['images_per_second']:,.0f}",
            f"{row['hours']:.3g}",
        )
    return table


def step_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Milliseconds and efficiency of each number of hosts."""
    headings = ("hosts", "compute", "ring", "halving", "blocks", "used", "hidden", "step")
    more = ("efficiency", "to 1 host", "Gbit/s")
    title = "The step: ms of computing, of all-reduces by algorithm and as used, of the whole"
    table = _table(title, *headings, *more)
    for row in rows:
        all_reduce = row["all_reduce_ms"]
        table.add_row(
            str(row["hosts"]),
            f"{row['compute_ms']:.1f}",
            *(f"{all_reduce[name]:.2f}" for name in ("ring", "halving_doubling", "binary_blocks")),
            f"{row['used_all_reduce_ms']:.2f}",
            f"{row['hidden']:.0%}",
            f"{row['step_ms']:.1f}",
            f"{row['efficiency']:.1%}",
            f"{row['efficiency_to_one_host']:.1%}",
            f"{row['network_gbit_per_second']:.1f}",
        )
    return table


def papers_table(figures: Sequence[Figure]) -> Table:
    """The papers' figures against the planner's."""
    table = Table(title="The papers' figures", box=box.SIMPLE_HEAD)
    for heading in ("figure", "paper", "planner", "off by", "is", "within 10 %"):
        table.add_column(heading, justify="left" if heading in ("figure", "is") else "right")
    for figure in figures:
        table.add_row(
            figure.name,
            f"{figure.paper:,.4g}" if figure.paper < 1e4 else f"{figure.paper:,.0f}",
            f"{figure.planned:,.4g}" if figure.planned < 1e4 else f"{figure.planned:,.0f}",
            f"{figure.deviation:+.1%}",
            figure.kind,
            "yes" if figure.is_met else "NO",
        )
    return table


def size_text(size_bytes: int | None) -> str:
    """`256 KiB`, `8 MiB`; None is all in one."""
    if size_bytes is None:
        return "all in one"
    return f"{size_bytes // 2**20} MiB" if size_bytes >= 2**20 else f"{size_bytes // 2**10} KiB"


def answer_tables(answers: dict[str, Any]) -> list[Table]:
    """What the simulator says, each with its answer as the title."""
    best = size_text(answers["best_bucket_bytes"])
    title = f"Best bucket size: {best} (means of {answers['steps']} simulated steps)"
    sizes = _table(title, "size", "buckets", "simulated ms", "planned ms")
    for row in answers["bucket_bytes"]:
        sizes.add_row(size_text(row["bucket_bytes"]), str(row["buckets"]), *_both(row))
    title = f"Best number in flight: {answers['best_max_buckets_in_flight']} (buckets of {best})"
    flights = _table(title, "in flight", "simulated ms", "planned ms")
    for row in answers["max_buckets_in_flight"]:
        flights.add_row(str(row["max_buckets_in_flight"]), *_both(row))
    algorithms = _table("A step by algorithm", "algorithm", "simulated ms", "planned ms")
    for row in answers["algorithms"]:
        algorithms.add_row(row["algorithm"], *_both(row))
    return [sizes, flights, algorithms, _buffers_table(answers)]


def _both(row: dict[str, Any]) -> tuple[str, str]:
    return f"{row['simulated_ms']:.2f}", f"{row['planned_ms']:.2f}"


def _buffers_table(answers: dict[str, Any]) -> Table:
    first = answers["ring_is_faster_from_bytes"]
    sizes = [row["size_bytes"] for row in answers["buffers"]]
    title = (
        f"The ring is the fastest from {size_text(first)} on"
        if first
        else f"The ring is never the fastest, up to {size_text(sizes[-1])}"
    )
    table = _table(f"{title}: ms of one buffer", "size", "ring", "halving", "blocks")
    for row in answers["buffers"]:
        times = row["simulated_ms"]
        names = ("ring", "halving_doubling", "binary_blocks")
        table.add_row(size_text(row["size_bytes"]), *(f"{times[name]:.3f}" for name in names))
    return table
