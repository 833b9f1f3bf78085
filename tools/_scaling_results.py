"""What the runs of `benchmark_scaling.py` amount to: checks, speed, efficiency, a plot."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

ALONE = "alone"
PARTS = ("compute", "input_wait", "exposed_communication", "other")
_LABELS = {"ours": "LargeBatchStrategy", "stock": "MultiWorkerMirroredStrategy"}
_COLORS = {"ours": "#4477aa", "stock": "#ee7733"}


@dataclasses.dataclass(frozen=True)
class Run:
    """One variant, trained once by a set of workers.

    Args:
        variant: its name.
        workers: how many.
        repeat: its number among the runs of this variant and number of workers, from 0.
        results: what each worker wrote, in rank order; empty if the run failed.
        problem: why it failed, if it did.
    """

    variant: str
    workers: int
    repeat: int
    results: tuple[Mapping[str, Any], ...]
    problem: str | None = None

    @property
    def step_ms(self) -> float | None:
        """Milliseconds a step on worker 0: the mean of the timed ones.

        A mean, as workers that start a step early in turn make every other one long on each.
        """
        seconds = self.results[0]["step_seconds"] if self.results else ()
        return 1e3 * statistics.mean(seconds) if seconds else None

    @property
    def problems(self) -> list[str]:
        """What is not as it should be; the time counts only if nothing is."""
        if self.problem is not None:
            return [self.problem]
        digests = [result["weights_sha256"] for result in self.results]
        return [
            *(f"worker 0: {text}" for text in self.results[0]["problems"]),
            *(
                f"worker {rank} has other weights than worker 0"
                for rank, own in enumerate(digests)
                if own != digests[0]
            ),
        ]


def rows_of(runs: Sequence[Run], *, per_replica_batch_size: int) -> list[dict[str, Any]]:
    """One row a variant and number of workers, in the order of first appearance.

    Efficiency is the speed of p workers by p times that of one alone, without a strategy: of
    medians over repeats. `efficiency_min` and `efficiency_max` are of single repeats.
    """
    alone = {run.repeat: run.step_ms for run in runs if run.variant == ALONE and run.step_ms}
    rows = []
    for variant, workers in dict.fromkeys((run.variant, run.workers) for run in runs):
        own = [run for run in runs if (run.variant, run.workers) == (variant, workers)]
        timed = [run for run in own if run.step_ms]
        times = [run.step_ms for run in timed]
        step_ms = statistics.median(times) if times else None
        # All do the same work a worker and step, so the ratio of speeds is that of times.
        by_repeat = [alone[run.repeat] / run.step_ms for run in timed if run.repeat in alone]
        problems = [f"repeat {run.repeat}: {text}" for run in own for text in run.problems]
        rows.append(
            {
                "variant": variant,
                "workers": workers,
                "step_ms": step_ms,
                "step_ms_by_repeat": times,
                "images_per_second": workers * per_replica_batch_size * 1e3 / step_ms
                if step_ms
                else None,
                "efficiency": statistics.median(alone.values()) / step_ms
                if step_ms and alone
                else None,
                "efficiency_min": min(by_repeat, default=None),
                "efficiency_max": max(by_repeat, default=None),
                "cpu_ms": _median_of([1e3 * _sum(run, "cpu_seconds_a_step") for run in timed]),
                "parts_ms": {part: _median_of(_parts_ms(timed, part)) for part in PARTS},
                "verified": not problems,
                "problems": problems,
            }
        )
    return rows


def _sum(run: Run, name: str) -> float:
    return sum(result[name] for result in run.results)


def _parts_ms(runs: Sequence[Run], part: str) -> list[float]:
    """Of the runs that were profiled."""
    profiles = [run.results[0]["parts"] for run in runs]
    return [1e3 * profile[part] for profile in profiles if profile]


def _median_of(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def figures_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The figures for people."""
    title = "Images a second, efficiency, milliseconds a step and where they go (worker 0)"
    table = Table(title=title, box=box.SIMPLE_HEAD)
    headings = ("workers", "variant", "images/s", "efficiency", "step", "compute", "exposed")
    for heading in (*headings, "input", "other", "CPU of all", "verified"):
        table.add_column(heading, justify="left" if heading == "variant" else "right", no_wrap=True)
    for row in sorted(rows, key=lambda row: row["workers"]):
        parts = [row["parts_ms"][part] for part in ("compute", "exposed_communication")]
        parts += [row["parts_ms"][part] for part in ("input_wait", "other")]
        table.add_row(
            str(row["workers"]),
            row["variant"],
            _text(row["images_per_second"], ".1f"),
            _text(row["efficiency"], ".1%"),
            *(_text(value, ".0f") for value in (row["step_ms"], *parts, row["cpu_ms"])),
            "yes" if row["verified"] else "NO",
        )
    return table


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def write_plot(path: Path, rows: Sequence[Mapping[str, Any]], *, title: str) -> None:
    """Images a second against workers, with the ideal line; efficiency beside it."""
    import matplotlib

    matplotlib.use("Agg")  # files only
    import matplotlib.pyplot as plt
    from matplotlib.ticker import PercentFormatter

    style = {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True}
    with plt.rc_context({**style, "grid.alpha": 0.3, "legend.frameon": False, "font.size": 9}):
        figure, (speed, efficiency) = plt.subplots(1, 2, figsize=(7.2, 3.2), layout="constrained")
        counts = sorted({row["workers"] for row in rows})
        for variant, label in _LABELS.items():
            own = [row for row in rows if row["variant"] == variant and row["step_ms"]]
            if not own:
                continue
            own.sort(key=lambda row: row["workers"])
            for axes, name in ((speed, "images_per_second"), (efficiency, "efficiency")):
                values = [row[name] for row in own]
                places = [row["workers"] for row in own]
                axes.plot(places, values, "o-", ms=4, color=_COLORS[variant], label=label)
        (alone,) = [row["images_per_second"] for row in rows if row["variant"] == ALONE]
        speed.plot(counts, [alone * count for count in counts], "k--", lw=1, label="ideal")
        efficiency.axhline(1.0, color="k", ls="--", lw=1)
        speed.set_yscale("log", base=2)
        speed.set_ylabel("images a second")
        speed.yaxis.set_major_formatter("{x:g}")
        efficiency.set_ylabel("of p times one worker alone")
        efficiency.set_ylim(0.0, 1.05)
        efficiency.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
        for axes in (speed, efficiency):
            axes.set_xscale("log", base=2)
            axes.set_xticks(counts, [str(count) for count in counts])
            axes.minorticks_off()
            axes.set_xlabel("workers")
        speed.legend()
        figure.suptitle(title, fontsize=9)
        figure.savefig(path, dpi=110)
        plt.close(figure)
