"""What the trials of `benchmark_failures.py` amount to: checks, medians, a table."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

ROLES = ("chief", "other")
INTERRUPTED = 143  # 128 + SIGTERM


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One kind of failure.

    Attributes:
        name: `"kill"`, `"stop"`, `"absent"` or `"terminate"`.
        culprit: the rank that is killed, stopped, absent or told to end.
        workers: of the cluster.
    """

    name: str
    culprit: int
    workers: int

    @property
    def role(self) -> str:
        return ROLES[min(self.culprit, 1)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """A case, tried once.

    Attributes:
        case: which.
        seconds: until the last worker had ended whose end was waited for; None if one had not.
        problems: what is not as it should be.
    """

    case: Case
    seconds: float | None
    problems: tuple[str, ...]


def check_ends(
    case: Case, codes: Mapping[int, int | None], logs: Mapping[int, str], addresses: Sequence[str]
) -> list[str]:
    """Returns what is wrong with the ends of the workers.

    Args:
        case: which.
        codes: of the workers whose end was waited for; None of one that did not end.
        logs: theirs.
        addresses: of all workers, by rank.
    """
    expected = INTERRUPTED if case.name == "terminate" else 1
    named = f"worker {case.culprit} at {addresses[case.culprit]}"
    problems = []
    for rank, code in codes.items():
        if code is None:
            problems.append(f"worker {rank} did not end")
        elif code != expected:
            problems.append(f"worker {rank} ended with code {code} instead of {expected}")
        elif case.name != "terminate" and named not in logs[rank]:
            problems.append(f"worker {rank} does not name {named}")
    return problems


def check_states(before: Sequence[int], after: Sequence[int]) -> list[str]:
    """Likewise, of the states' numbers of batches before and after a SIGTERM."""
    newest = max(after, default=None)
    if newest is None or newest <= max(before, default=-1):
        return [f"no newer state was saved: there were {list(before)}, there are {list(after)}"]
    return []


def summarise(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """One row a case, in the order of first appearance."""
    by_case: dict[Case, list[Trial]] = {}
    for trial in trials:
        by_case.setdefault(trial.case, []).append(trial)
    rows = []
    for case, own in by_case.items():
        seconds = [trial.seconds for trial in own if trial.seconds is not None]
        problems = [
            f"repeat {repeat}: {text}"
            for repeat, trial in enumerate(own)
            for text in trial.problems
        ]
        rows.append(
            {
                "case": case.name,
                "culprit": case.role,
                "workers": case.workers,
                "seconds_p50": statistics.median(seconds) if seconds else None,
                "seconds_max": max(seconds, default=None),
                "seconds_all": seconds,
                "verified": not problems,
                "problems": problems,
            }
        )
    return rows


def figures_table(rows: Sequence[Mapping[str, Any]], *, timeout_seconds: float) -> Table:
    """The figures for people."""
    title = f"Seconds until all others have ended; timeouts of {timeout_seconds:g} s"
    table = Table(title=title, box=box.SIMPLE_HEAD)
    for heading in ("case", "culprit", "workers", "p50", "worst", "repeats", "verified"):
        justify = "left" if heading in ("case", "culprit") else "right"
        table.add_column(heading, justify=justify, no_wrap=True)
    for row in rows:
        table.add_row(
            row["case"],
            row["culprit"],
            str(row["workers"]),
            *("-" if row[name] is None else f"{row[name]:.2f}" for name in _FIGURES),
            str(len(row["seconds_all"])),
            "yes" if row["verified"] else "NO",
        )
    return table


_FIGURES = ("seconds_p50", "seconds_max")
