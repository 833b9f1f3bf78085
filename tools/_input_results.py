"""What the passes of `benchmark_input.py` amount to: medians, ratios, a table."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table


@dataclasses.dataclass(frozen=True)
class Pass:
    """One pass of a pipeline.

    Args:
        pipeline: its name.
        images: how many came.
        wall_seconds: from the start of the pass to the last image.
        cpu_seconds: processor time of the whole process meanwhile.
        growth_bytes: the process' largest resident memory in the pass, above that before it.
    """

    pipeline: str
    images: int
    wall_seconds: float
    cpu_seconds: float
    growth_bytes: int


def summarise(
    passes: Sequence[Pass], *, cores: int, problems: dict[str, list[str]]
) -> list[dict[str, Any]]:
    """One row a pipeline, in the order of first appearance."""
    rows = []
    for pipeline in dict.fromkeys(each.pipeline for each in passes):
        own = [each for each in passes if each.pipeline == pipeline]
        by_wall = [each.images / each.wall_seconds / cores for each in own]
        by_cpu = [each.images / each.cpu_seconds for each in own]
        rows.append(
            {
                "pipeline": pipeline,
                "images_per_second_per_core_p50": statistics.median(by_wall),
                "images_per_second_per_core_all": by_wall,
                "images_per_cpu_second_p50": statistics.median(by_cpu),
                "images_per_cpu_second_all": by_cpu,
                "memory_growth_mib": max(each.growth_bytes for each in own) / 2**20,
                "verified": not problems.get(pipeline),
                "problems": problems.get(pipeline, []),
            }
        )
    return rows


def compare(rows: Sequence[dict[str, Any]], *, references: Sequence[str]) -> list[dict[str, Any]]:
    """How many times as fast as each reference the other pipelines are.

    `ratio` is that of images a second of processor time, `wall_ratio` that of images a second:
    the first is what the pipeline costs, the second also holds cores that idle or are taken by
    others.
    """
    by_name = {row["pipeline"]: row for row in rows}
    ratios = []
    for row in rows:
        for reference in (by_name[name] for name in references if name in by_name):
            if row["pipeline"] not in references:
                cpu, wall = (
                    row[key] / reference[key]
                    for key in ("images_per_cpu_second_p50", "images_per_second_per_core_p50")
                )
                ratios.append(
                    {
                        "pipeline": row["pipeline"],
                        "reference": reference["pipeline"],
                        "ratio": cpu,
                        "wall_ratio": wall,
                        "verified": row["verified"],
                    }
                )
    return ratios


def figures_table(rows: Sequence[dict[str, Any]], ratios: Sequence[dict[str, Any]]) -> Table:
    """The figures for people."""
    references = list(dict.fromkeys(ratio["reference"] for ratio in ratios))
    table = Table(title="Images a second and core; times as fast, by CPU", box=box.SIMPLE_HEAD)
    for heading in ("pipeline", "by CPU", "by clock", "memory MiB", *references, "verified"):
        justify = "left" if heading == "pipeline" else "right"
        table.add_column(heading, justify=justify, no_wrap=True)
    of = {(ratio["pipeline"], ratio["reference"]): ratio["ratio"] for ratio in ratios}
    for row in rows:
        texts = [
            f"{of[row['pipeline'], each]:.2f}" if (row["pipeline"], each) in of else ""
            for each in references
        ]
        table.add_row(
            row["pipeline"],
            f"{row['images_per_cpu_second_p50']:.0f}",
            f"{row['images_per_second_per_core_p50']:.0f}",
            f"{row['memory_growth_mib']:.0f}",
            *texts,
            "yes" if row["verified"] else "NO",
        )
    return table
