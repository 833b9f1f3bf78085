"""The plots of a run: learning rate, accuracy and loss against epochs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # files only: a worker has no screen

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

import tf_largebatch as tlb

_STYLE = {
    "figure.figsize": (7.0, 4.2),
    "figure.dpi": 150,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.titlesize": 12,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
}
_TRAINING, _VALIDATION = "#4477aa", "#cc6677"
_Series = Mapping[str, Sequence[float]]


def write_plots(history: _Series, recipe: tlb.Recipe, folder: Path, *, title: str) -> list[Path]:
    """Writes learning_rate.png, accuracy.png and loss.png; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = {
        "learning_rate": lambda axes: _draw_learning_rate(axes, history, recipe),
        "accuracy": lambda axes: _draw_accuracy(axes, history),
        "loss": lambda axes: _draw_loss(axes, history),
    }
    paths = []
    with plt.rc_context(_STYLE):
        for name, function in draw.items():
            figure, axes = plt.subplots(layout="constrained")
            function(axes)
            axes.set_xlabel("epoch")
            axes.set_xlim(0, recipe.epochs)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.set_title(title, loc="left")
            axes.legend()
            paths.append(folder / f"{name}.png")
            figure.savefig(paths[-1])
            plt.close(figure)
    return paths


def _draw_learning_rate(axes: Axes, history: _Series, recipe: tlb.Recipe) -> None:
    """The recipe's rate at every update, and what was applied in each epoch's last update."""
    updates = np.arange(recipe.total_steps)
    rates = recipe.learning_rate_at(updates)
    axes.plot(updates / recipe.steps_per_epoch, rates, color=_TRAINING, label="recipe")
    last_updates = np.arange(1, recipe.epochs + 1) * recipe.steps_per_epoch - 1
    axes.plot(
        last_updates / recipe.steps_per_epoch,
        history["learning_rate"],
        "o",
        color=_VALIDATION,
        markersize=5,
        clip_on=False,
        label="applied, end of epoch",
    )
    axes.set_ylabel("learning rate")
    axes.set_ylim(bottom=0)


def _draw_accuracy(axes: Axes, history: _Series) -> None:
    _draw_both(axes, history, "accuracy")
    axes.set_ylabel("accuracy")
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
    best = max(history["val_accuracy"])
    axes.axhline(best, color=_VALIDATION, linewidth=0.8, linestyle=":")
    axes.annotate(
        f"best {best:.1%}",
        (0, best),
        xytext=(4, 3),
        textcoords="offset points",
        color=_VALIDATION,
    )


def _draw_loss(axes: Axes, history: _Series) -> None:
    _draw_both(axes, history, "loss")
    axes.set_ylabel("cross-entropy (log scale)")
    axes.set_yscale("log")


def _draw_both(axes: Axes, history: _Series, name: str) -> None:
    for prefix, color, label in (("", _TRAINING, "training"), ("val_", _VALIDATION, "validation")):
        values = history[f"{prefix}{name}"]
        epochs = np.arange(1, len(values) + 1)
        axes.plot(epochs, values, "o-", color=color, markersize=4, clip_on=False, label=label)
