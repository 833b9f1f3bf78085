"""The tables of the study, from the file of its runs."""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Mapping, Sequence

import scipy.stats
from _study_results import Row
from _study_settings import SELECTION_SEED, STUDIES, Setting
from rich import box
from rich.console import Console
from rich.table import Table

_CURVE_EPOCHS = (4, 6, 8, 10, 15, 20)
_TABLE_WIDTH = 120
# (what should be worse or equal, what it is held against), by study.
COMPARISONS = {
    "table": (
        ("gradual", "baseline"),
        ("none", "gradual"),
        ("constant", "gradual"),
        ("unscaled", "baseline"),
        ("sqrt", "gradual"),
    ),
    "gamma": (("baseline_gamma_1", "baseline"), ("gradual_gamma_1", "gradual")),
    "controls": (
        ("gradual_at_0.05", "baseline_at_0.05"),
        ("none_at_0.05", "gradual_at_0.05"),
        ("constant_at_0.05", "gradual_at_0.05"),
    ),
    "workers": (("workers_2", "accumulated_16"), ("workers_4", "accumulated_32")),
}
Runs = Mapping[str, Sequence[Row]]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two variants' test errors.

    Args:
        difference: of the means.
        low, high: its 95 % interval by Welch's t, for unequal deviations.
        p_value: of the exact rank test of Mann and Whitney, two-sided.
    """

    difference: float
    low: float
    high: float
    p_value: float


def compare(errors: Sequence[float], others: Sequence[float]) -> Comparison:
    """Both of two values or more. The rank test asks less than a t test of runs that vary much."""
    interval = scipy.stats.ttest_ind(errors, others, equal_var=False).confidence_interval(0.95)
    return Comparison(
        statistics.mean(errors) - statistics.mean(others),
        float(interval.low),
        float(interval.high),
        float(scipy.stats.mannwhitneyu(errors, others, method="exact").pvalue),
    )


def runs_of_study(
    rows: Mapping[Setting, Row], study: str, *, split: int, selection: bool = False
) -> dict[str, list[Row]]:
    """The runs of each variant, by rising seed: those that count, or those of selection."""
    return {
        name: [
            rows[setting]
            for setting in sorted(rows, key=lambda setting: setting.seed)
            if setting == dataclasses.replace(variant, seed=setting.seed, split=split)
            and (setting.seed == SELECTION_SEED) == selection
        ]
        for name, variant in STUDIES[study].items()
    }


def percent(errors: Sequence[float]) -> str:
    """Mean and deviation of the sample, in percent."""
    if not errors:
        return "-"
    deviation = f" ± {100 * statistics.stdev(errors):.1f}" if len(errors) > 1 else ""
    return f"{100 * statistics.mean(errors):.1f}{deviation}"


def print_report(rows: Mapping[Setting, Row], *, split: int) -> None:
    """All tables of which there are runs."""
    # A file or a pipe has no width of its own, and rich would cut the columns at 80.
    console = Console(width=None if sys.stdout.isatty() else _TABLE_WIDTH)
    for study in STUDIES:
        runs = runs_of_study(rows, study, split=split)
        selection = runs_of_study(rows, study, split=split, selection=True)
        if any(runs.values()) or any(selection.values()):
            console.print(_errors_table(study, runs, selection))
        comparisons = _comparisons_table(study, runs)
        if comparisons.row_count:
            console.print(comparisons)
        if any(runs.values()) and study == "table":
            console.print(_curves_table(runs))


def _errors_table(study: str, runs: Runs, selection: Runs) -> Table:
    table = Table(title=f"{study}: error, %, mean ± deviation over seeds", box=box.SIMPLE_HEAD)
    headings = ("batch", "rate", "warmup", "runs", "test", "validation", "training", "seed 0, val.")
    table.add_column("variant", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for name, variant in STUDIES[study].items():
        own = runs[name]
        if not own and not selection[name]:
            continue
        table.add_row(
            name,
            str(variant.batch),
            f"{variant.rate:g}",
            variant.warmup,
            str(len(own)),
            percent([row["test_error"] for row in own]),
            percent([row["val_error"] for row in own]),
            percent([row["train_error"][-1] for row in own]),
            percent([row["val_error"] for row in selection[name]]),
        )
    return table


def _comparisons_table(study: str, runs: Runs) -> Table:
    table = Table(title=f"{study}: differences of the test error, points", box=box.SIMPLE_HEAD)
    for heading in ("", "difference", "95 % interval", "exact rank test"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for name, other in COMPARISONS.get(study, ()):
        errors, others = ([100 * row["test_error"] for row in runs[key]] for key in (name, other))
        if len(errors) > 1 and len(others) > 1:
            found = compare(errors, others)
            table.add_row(
                f"{name} - {other}",
                f"{found.difference:+.1f}",
                f"{found.low:+.1f} to {found.high:+.1f}",
                f"p = {found.p_value:.2g}",
            )
    return table


def _curves_table(runs: Runs) -> Table:
    table = Table(title="table: mean training error by epoch, %", box=box.SIMPLE_HEAD)
    table.add_column("variant", no_wrap=True)
    for epoch in _CURVE_EPOCHS:
        table.add_column(str(epoch), justify="right")
    for name, own in runs.items():
        if own:
            by_epoch = list(zip(*(row["train_error"] for row in own), strict=True))
            means = [100 * statistics.mean(by_epoch[epoch - 1]) for epoch in _CURVE_EPOCHS]
            table.add_row(name, *(f"{mean:.0f}" for mean in means))
    return table
