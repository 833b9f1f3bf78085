"""The plot of `plan_scaling.py`: a step and the efficiency against the number of GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter

_STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.titlesize": 11,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
}
_COMPUTE, _EXPOSED, _IDEAL = "#4477aa", "#ee7733", "#222222"


def write_plot(rows: Sequence[dict[str, Any]], *, alone_ms: float, path: str) -> None:
    """Writes the plot of these rows, of increasing numbers of hosts.

    Args:
        rows: of `_plan_rows.row_of`.
        alone_ms: what a step takes on one replica alone, the ideal.
        path: of the file; its ending says the format, as `.png` or `.svg`.
    """
    replicas = [row["replicas"] for row in rows]
    with plt.rc_context(_STYLE):
        figure, (step, efficiency) = plt.subplots(1, 2, figsize=(9.5, 3.8), layout="constrained")
        compute = [row["compute_ms"] for row in rows]
        whole = [row["step_ms"] for row in rows]
        step.fill_between(replicas, whole, compute, color=_EXPOSED, alpha=0.35, label="waiting")
        step.plot(replicas, whole, "o-", color=_EXPOSED, label="step")
        step.plot(replicas, compute, "o-", color=_COMPUTE, label="slowest replica computes")
        step.axhline(alone_ms, color=_IDEAL, ls="--", label="ideal")
        step.set(ylabel="ms a step", ylim=(0, 1.15 * max(whole)))
        step.legend(loc="lower right")
        efficiency.axhline(1.0, color=_IDEAL, ls="--", label="ideal")
        for name, color, label in (
            ("efficiency", _COMPUTE, "to one GPU alone"),
            ("efficiency_to_one_host", _EXPOSED, "to one host"),
        ):
            efficiency.plot(replicas, [row[name] for row in rows], "o-", color=color, label=label)
        efficiency.set(ylabel="efficiency", ylim=(0, 1.05))
        efficiency.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
        efficiency.legend(loc="lower right")
        for axes in (step, efficiency):
            _count_gpus(axes, replicas)
        figure.savefig(path, dpi=120)
        plt.close(figure)


def _count_gpus(axes: Axes, replicas: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(replicas)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{count:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params("x", rotation=45 if len(replicas) > 6 else 0)
    axes.set_xlabel("GPUs (log scale)")
