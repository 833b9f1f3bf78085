"""Sets of intervals on a line of whole numbers, such as nanoseconds: joined, cut, subtracted.

A set is an int64 array `[interval, (begin, end)]`. What the functions here return is in order, its
intervals have a length and touch nobody; what they take may be in any order and overlap.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Intervals = npt.NDArray[np.int64]


def union(pairs: Iterable[tuple[int, int]] | Intervals) -> Intervals:
    """What is in at least one of them; pairs that end before they begin are in none."""
    given = np.asarray(pairs if isinstance(pairs, np.ndarray) else list(pairs), np.int64)
    given = given.reshape(-1, 2)
    given = given[given[:, 0] < given[:, 1]]
    if not len(given):
        return given
    given = given[np.argsort(given[:, 0], kind="stable")]
    reached = np.maximum.accumulate(given[:, 1])  # the latest end so far
    opens = np.concatenate([[True], given[1:, 0] > reached[:-1]])
    closes = np.concatenate([opens[1:], [True]])
    return np.stack([given[opens, 0], reached[closes]], axis=1)


def intersection(first: Intervals, second: Intervals) -> Intervals:
    """What is in both."""
    both = [union(first), union(second)]
    edges = np.concatenate([each.ravel() for each in both])
    if not len(edges):
        return edges.reshape(-1, 2)
    order = np.argsort(edges, kind="stable")
    # Each opens or closes one of the two sets, in which no intervals overlap.
    steps = np.where(np.arange(len(edges)) % 2 == 0, 1, -1)
    in_both = np.cumsum(steps[order])[:-1] == 2
    edges = edges[order]
    return union(np.stack([edges[:-1][in_both], edges[1:][in_both]], axis=1))


def difference(first: Intervals, second: Intervals) -> Intervals:
    """What is in `first` and not in `second`."""
    first, second = union(first), union(second)
    if not len(first):
        return first
    begin, end = first[0, 0], first[-1, 1]
    edges = np.clip(second, begin, end).ravel()
    gaps = np.concatenate([[begin], edges, [end]]).reshape(-1, 2)
    return intersection(first, union(gaps))


def length(intervals: Intervals) -> int:
    """The sum of their lengths, where those that overlap count once."""
    joined = union(intervals)
    return int(np.sum(joined[:, 1] - joined[:, 0]))
