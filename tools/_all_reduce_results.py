"""What the runs of `benchmark_all_reduce.py` amount to: checks, rates, a fitted link, a table."""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from _all_reduce_ways import RAW, Way
from rich import box
from rich.table import Table

_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_MOST_FITS = 20
_FITTED = ("ring", "halving_doubling")
_MEASURED = (
    "wire_dtype",
    "time_p50_ms",
    "time_min_ms",
    "time_max_ms",
    "time_all_ms",
    "start_spread_p50_ms",
    "cpu_p50_ms",
    "in_graph_p50_ms",
    "algbw_mb_per_second",
    "busbw_mb_per_second",
)
_SHOWN = (  # heading and what stands under it
    ("algorithm", "algorithm"),
    ("p50", "time_p50_ms"),
    ("min", "time_min_ms"),
    ("max", "time_max_ms"),
    ("predicted", "predicted_ms"),
    ("ratio", "ratio"),
    ("algbw", "algbw_mb_per_second"),
    ("busbw", "busbw_mb_per_second"),
)
_SHOWN_WITH_MPI = (  # all would not fit into a terminal
    ("transport", "transport"),
    *_SHOWN[:4],
    ("ratio", "ratio"),
    ("in graph", "in_graph_p50_ms"),
    ("ratio", "in_graph_ratio"),
    ("to raw", "to_raw"),
)
_USUAL_BYTES_PER_SECOND = 1e9


@dataclasses.dataclass(frozen=True)
class Run:
    """One set of workers, which measured all ways to sum at all sizes.

    Args:
        workers: how many.
        results: what each worker wrote, in rank order; empty if the run failed.
        problem: what went wrong; None if nothing did.
        relay: the facts of the relay between them; None without one.
    """

    workers: int
    results: tuple[dict[str, Any], ...]
    problem: str | None
    relay: dict[str, float] | None


@dataclasses.dataclass(frozen=True)
class Link:
    """What a step costs, and each byte in it, whatever the algorithm."""

    latency_seconds: float
    seconds_per_byte: float

    def seconds(self, cost: tuple[float, float]) -> float:
        steps, num_bytes = cost
        return steps * self.latency_seconds + num_bytes * self.seconds_per_byte


def parse_size(text: str) -> int:
    """Bytes of `1024`, `1024B`, `1KiB`, `4MiB` or `1GiB`; ValueError for anything else."""
    found = re.fullmatch(r"(\d+)\s*(B|KiB|MiB|GiB|)", text.strip())
    if found is None or not int(found[1]):
        raise ValueError(f"{text!r} is no size; use a whole number and B, KiB, MiB or GiB.")
    return int(found[1]) * _UNITS[found[2]]


def format_size(num_bytes: int) -> str:
    """`1KiB` and the like, by the largest unit that divides it."""
    unit = next(unit for unit in ("GiB", "MiB", "KiB", "B") if num_bytes % _UNITS[unit] == 0)
    return f"{num_bytes // _UNITS[unit]}{unit}"


def rows_of(run: Run, *, ways: Sequence[Way], sizes_bytes: Sequence[int]) -> list[dict[str, Any]]:
    """One row a size and way to sum, in the order in which they were measured.

    Values of a row that was not measured are None. The time of a call is that of the slowest
    worker; that within the graph is from when the last worker has its values to when the last one
    has the sums.
    """
    names = [(size, way) for size in sizes_bytes for way in ways]
    rows = []
    for number, (size, way) in enumerate(names):
        by_rank = [result["rows"][number] for result in run.results]
        problems = [run.problem] if run.problem else []
        problems += check_row(by_rank)
        row = dataclasses.asdict(way) | {"workers": run.workers, "size_bytes": size}
        row |= _measured(by_rank, workers=run.workers, size_bytes=size)
        rows.append(row | {"verified": not problems, "problems": problems})
    _add_ratios(rows, "ratio", of="time_p50_ms", to=ways[0])
    if RAW in ways:
        _add_ratios(rows, "in_graph_ratio", of="in_graph_p50_ms", to=ways[0])
        _add_ratios(rows, "to_raw", of="in_graph_p50_ms", to=RAW)
    return rows


def _add_ratios(rows: Sequence[dict[str, Any]], name: str, *, of: str, to: Way) -> None:
    for row in rows:
        (base,) = [
            other
            for other in rows
            if way_of(other) == to and other["size_bytes"] == row["size_bytes"]
        ]
        row[name] = row[of] / base[of] if row[of] and base[of] else None


def way_of(row: dict[str, Any]) -> Way:
    return Way(row["transport"], row["algorithm"])


def check_row(by_rank: Sequence[dict[str, Any]]) -> list[str]:
    """Returns what is wrong with a row, whose time counts only if nothing is.

    Args:
        by_rank: what each worker reports of it, in rank order.
    """
    problems = [
        f"worker {rank}: {problem}"
        for rank, row in enumerate(by_rank)
        for problem in row["problems"]
    ]
    for rank, row in enumerate(by_rank):
        if row["sha256"] != by_rank[0]["sha256"]:
            problems.append(f"worker {rank} has other bits than worker 0")
        if len(row["spans_seconds"]) != len(by_rank[0]["spans_seconds"]):
            problems.append(f"worker {rank} has timed another number of calls than worker 0")
    return problems


def _measured(
    by_rank: Sequence[dict[str, Any]], *, workers: int, size_bytes: int
) -> dict[str, Any]:
    if not by_rank:
        return dict.fromkeys(_MEASURED)
    spans = list(zip(*(row["spans_seconds"] for row in by_rank), strict=False))  # [call][rank]
    times = [1000.0 * max(end - start for start, end in call) for call in spans]
    starts = [[start for start, _ in call] for call in spans]
    graph_spans = zip(*(row["graph_spans_seconds"] for row in by_rank), strict=False)
    in_graph = [
        max(end for _, end in call) - max(begin for begin, _ in call) for call in graph_spans
    ]
    cpu_seconds = zip(*(row["cpu_seconds"] for row in by_rank), strict=False)  # [call][rank]
    p50 = statistics.median(times)
    rate = size_bytes / (p50 / 1000.0) / 1e6
    values = (
        by_rank[0]["wire_dtype"],
        p50,
        min(times),
        max(times),
        times,
        1000.0 * statistics.median(max(call) - min(call) for call in starts),
        1000.0 * statistics.median(map(sum, cpu_seconds)),
        1000.0 * statistics.median(in_graph),
        rate,
        rate * 2 * (workers - 1) / workers,
    )
    return dict(zip(_MEASURED, values, strict=True))


def costs(algorithm: str, *, workers: int, size_bytes: float) -> list[tuple[float, float]]:
    """(steps, bytes that a worker sends) of the forms that an algorithm can take.

    Ring, with p workers and b bytes: 2(p - 1) steps, 2b(p - 1)/p bytes. Halving/doubling with
    p = 2^k: h steps of halving, k - h in which both sides send all that is left (b / 2^h), h of
    doubling, for h = 0 .. k; any other p folds the surplus onto a power of two, which takes two
    more steps with b bytes each. `auto` takes any of them.

    Source: Thakur, Rabenseifner and Gropp 2005; Goyal et al. 2017, section 4.1.
    """
    if workers == 1:
        return [(0.0, 0.0)]
    ring = [(2.0 * (workers - 1), 2 * size_bytes * (workers - 1) / workers)]
    if algorithm in ("ring", "tensorflow"):
        return ring
    doublings = workers.bit_length() - 1
    folds = 2 if workers > 2**doublings else 0
    halving_doubling = [
        (
            float(doublings + halvings + folds),
            size_bytes * (2 * (1 - 0.5**halvings) + (doublings - halvings) * 0.5**halvings + folds),
        )
        for halvings in range(doublings + 1)
    ]
    return halving_doubling if algorithm == "halving_doubling" else ring + halving_doubling


def predict(algorithm: str, *, workers: int, size_bytes: float, link: Link) -> float:
    """Seconds of the algorithm's best form over this link."""
    return min(map(link.seconds, costs(algorithm, workers=workers, size_bytes=size_bytes)))


def fit_link(rows: Iterable[dict[str, Any]], *, one_way_delay_seconds: float) -> Link | None:
    """The link that explains the verified rows of this package's algorithms best.

    Least squares of the relative errors, neither cost below 0. Which form of halving/doubling is
    best depends on the link, and the other way round: they are found in turn. None where these
    rows cannot tell the two costs apart.
    """
    fitted = [
        row
        for row in rows
        if row["algorithm"] in _FITTED and row["verified"] and row["time_p50_ms"]
    ]
    link = Link(max(one_way_delay_seconds, 1e-4), 1 / _USUAL_BYTES_PER_SECOND)
    for _ in range(_MOST_FITS):
        forms = [
            min(
                costs(row["algorithm"], workers=row["workers"], size_bytes=wire_bytes(row)),
                key=link.seconds,
            )
            for row in fitted
        ]
        seconds = np.array([row["time_p50_ms"] / 1000.0 for row in fitted])
        better = _least_squares(np.array(forms).reshape(-1, 2), seconds)
        if better is None or better == link:
            return better
        link = better
    return link


def _least_squares(forms: np.ndarray, seconds: np.ndarray) -> Link | None:
    relative = forms / seconds[:, None]  # [row, (steps, bytes)]; each row is to give 1
    scale = np.linalg.norm(relative, axis=0)
    if not np.all(scale) or np.linalg.matrix_rank(relative / scale, tol=1e-6) < 2:
        return None
    target = np.ones(len(seconds))
    latency, per_byte = np.linalg.lstsq(relative / scale, target, rcond=None)[0] / scale
    if latency < 0.0 or per_byte < 0.0:  # then one of them is 0, and the other alone is fitted
        alone = relative.sum(axis=0) / scale**2
        latency, per_byte = (0.0, alone[1]) if latency < 0.0 else (alone[0], 0.0)
    return Link(float(latency), float(per_byte))


def wire_bytes(row: dict[str, Any]) -> float:
    """A size as it travels: both of the wire's dtypes have half the bytes of float32."""
    return row["size_bytes"] / (2 if row["wire_dtype"] else 1)


def add_predictions(rows: Iterable[dict[str, Any]], *, link: Link | None) -> None:
    """Sets `predicted_ms` of each row; None without a link, and where MPI's own algorithm sums."""
    for row in rows:
        row["predicted_ms"] = None
        is_known = row["transport"] == "tensorflow" or row["algorithm"] in _FITTED
        if link is not None and is_known:
            row["predicted_ms"] = 1000.0 * predict(
                row["algorithm"], workers=row["workers"], size_bytes=wire_bytes(row), link=link
            )


def figures_table(rows: Sequence[dict[str, Any]], *, reference: Way) -> Table:
    """The figures for people."""
    has_mpi = any("to_raw" in row for row in rows)
    by = f" by {reference.transport}" if has_mpi else ""
    title = f"All-reduce: milliseconds; ratio to {reference.algorithm}{by}; rates in MB/s"
    table = Table(title=title, box=box.SIMPLE_HEAD)
    shown = _SHOWN_WITH_MPI if has_mpi else _SHOWN
    for heading in ("workers", "size", *(heading for heading, _ in shown), "verified"):
        justify = "left" if heading in ("transport", "algorithm") else "right"
        table.add_column(heading, justify=justify, no_wrap=True)
    for row in rows:
        table.add_row(
            str(row["workers"]),
            format_size(row["size_bytes"]),
            *(_shown(row[name]) for _, name in shown),
            "yes" if row["verified"] else "NO",
        )
    return table


def _shown(value: str | float | None) -> str:
    return value if isinstance(value, str) else "-" if value is None else f"{value:.2f}"
