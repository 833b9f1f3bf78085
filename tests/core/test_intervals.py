"""Sets of intervals, against sets of whole numbers."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tf_largebatch.core.intervals import difference, intersection, length, union

END = 12
PAIRS = st.lists(st.tuples(st.integers(0, END), st.integers(0, END)), max_size=8)


def members(pairs) -> set[int]:
    """The unit intervals [n, n + 1) that lie within."""
    return {point for begin, end in pairs for point in range(begin, end)}


def check(result, expected: set[int]) -> None:
    assert members(result) == expected
    assert result.dtype == np.int64 and result.shape[1:] == (2,)
    begins, ends = result[:, 0], result[:, 1]
    assert np.all(begins < ends) and np.all(ends[:-1] < begins[1:])
    assert length(result) == len(expected)


def as_set(pairs):
    return np.array(pairs, np.int64).reshape(-1, 2)


@given(PAIRS)
def test_union(pairs):
    check(union(pairs), members(pairs))
    check(union(as_set(pairs)), members(pairs))
    assert length(as_set(pairs)) == len(members(pairs))


@given(PAIRS, PAIRS)
def test_intersection_and_difference(first, second):
    check(intersection(as_set(first), as_set(second)), members(first) & members(second))
    check(difference(as_set(first), as_set(second)), members(first) - members(second))
