"""The plots of the study, from the file of its runs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # files only

import matplotlib.pyplot as plt
import numpy as np
from _study_report import Runs, runs_of_study
from _study_results import Row
from _study_settings import STUDIES, Setting
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

_STYLE = {
    "figure.figsize": (7.0, 4.2),
    "figure.dpi": 100,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.titlesize": 11,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
}
_COLORS = {"baseline": "#222222", "gradual": "#4477aa", "none": "#ee7733", "constant": "#cc3311"}
_BATCH_COLORS = {8: "#222222", 128: "#4477aa"}


def write_plots(rows: Mapping[Setting, Row], folder: Path, *, split: int) -> list[Path]:
    """Writes those plots of which there are runs; returns their paths."""
    draw = {
        "training_error": ("table", _draw_training_error),
        "size": ("size", _draw_sizes),
        "gamma": ("gamma", _draw_gamma),
        "rates": ("rates", _draw_rates),
    }
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with plt.rc_context(_STYLE):
        for name, (study, function) in draw.items():
            runs = {key: own for key, own in runs_of_study(rows, study, split=split).items() if own}
            if runs:
                figure = function(study, runs)
                paths.append(folder / f"{name}.png")
                figure.savefig(paths[-1])
                plt.close(figure)
    return paths


def _draw_training_error(_: str, runs: Runs) -> Figure:
    """The paper's figure: curves of small and large on each other with the right warmup only."""
    figure, panels = plt.subplots(1, 3, figsize=(10.5, 3.8), sharey=True, layout="constrained")
    for axes, warmup in zip(panels, ("none", "constant", "gradual"), strict=True):
        for name in ("baseline", warmup):
            if name in runs:
                batch = STUDIES["table"][name].batch
                _draw_curve(axes, runs[name], _COLORS[name], f"{batch}, {name}")
        axes.set_title(f"warmup: {warmup}", loc="left")
        axes.set_xlabel("epoch")
        if axes.lines:
            axes.legend()
    panels[0].set_ylabel("training error")
    panels[0].yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
    return figure


def _draw_gamma(_: str, runs: Runs) -> Figure:
    figure, axes = plt.subplots(layout="constrained")
    for name, own in runs.items():
        batch_name = name.removesuffix("_gamma_1")
        gamma = 1 if name.endswith("_gamma_1") else 0
        batch = STUDIES["gamma"][name].batch
        _draw_curve(
            axes,
            own,
            _COLORS[batch_name],
            f"{batch}, last $\\gamma$ = {gamma}",
            style="--" if gamma else "-",
        )
    axes.set_xlabel("epoch")
    axes.set_ylabel("training error")
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
    axes.legend()
    return figure


def _draw_curve(axes: Axes, own: Sequence[Row], color: str, label: str, style: str = "-") -> None:
    """The mean over seeds, in a band of one deviation."""
    curves = np.array([row["train_error"] for row in own])  # [seed, epoch]
    mean, deviation = curves.mean(axis=0), curves.std(axis=0)
    epochs = np.arange(1, curves.shape[1] + 1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.plot(epochs, mean, style, color=color, label=label)
    axes.fill_between(epochs, mean - deviation, mean + deviation, color=color, alpha=0.15, lw=0)


def _draw_sizes(study: str, runs: Runs) -> Figure:
    figure, axes = plt.subplots(layout="constrained")
    batches = [STUDIES[study][name].batch for name in runs]
    _draw_errors(axes, batches, list(runs.values()), _BATCH_COLORS[128], "linear, gradual warmup")
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set_xlabel("minibatch (log scale)")
    return figure


def _draw_rates(study: str, runs: Runs) -> Figure:
    figure, axes = plt.subplots(layout="constrained")
    for batch, color in _BATCH_COLORS.items():
        names = [name for name in runs if STUDIES[study][name].batch == batch]
        if names:
            rates = [STUDIES[study][name].rate for name in names]
            _draw_errors(axes, rates, [runs[name] for name in names], color, f"minibatch {batch}")
    rates = sorted({STUDIES[study][name].rate for name in runs})
    axes.set_xscale("log")
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates], minor=False)
    axes.minorticks_off()
    axes.set_xlabel("peak learning rate (log scale)")
    axes.legend()
    return figure


def _draw_errors(
    axes: Axes, places: Sequence[float], runs: Sequence[Sequence[Row]], color: str, label: str
) -> None:
    """Test error with one deviation over seeds, against `places`."""
    errors = [[row["test_error"] for row in own] for own in runs]
    axes.errorbar(
        places,
        [statistics.mean(values) for values in errors],
        yerr=[statistics.stdev(values) if len(values) > 1 else 0.0 for values in errors],
        fmt="o-",
        capsize=3,
        color=color,
        label=label,
    )
    axes.set_ylabel("test error")
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
