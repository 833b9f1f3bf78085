from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_largebatch.core.buckets import assign_buckets

# (size in bytes, kind); sizes on both sides of the limits, zero among them.
VALUES = st.lists(
    st.tuples(st.one_of(st.just(0), st.integers(0, 20), st.integers(0, 300)), st.sampled_from("ab"))
)
BUCKET_BYTES = st.integers(1, 200)


def buckets_of(values: list[tuple[int, str]], bucket_bytes: int) -> list[list[int]]:
    return assign_buckets(
        [size for size, _ in values], [kind for _, kind in values], bucket_bytes=bucket_bytes
    )


@settings(deadline=None)
@given(VALUES, BUCKET_BYTES)
def test_each_position_is_in_one_bucket_of_its_kind(
    values: list[tuple[int, str]], bucket_bytes: int
) -> None:
    buckets = buckets_of(values, bucket_bytes)
    assert sorted(place for bucket in buckets for place in bucket) == list(range(len(values)))
    for bucket in buckets:
        assert len({values[place][1] for place in bucket}) == 1


@settings(deadline=None)
@given(VALUES, BUCKET_BYTES)
def test_buckets_stand_in_the_order_in_which_they_are_complete(
    values: list[tuple[int, str]], bucket_bytes: int
) -> None:
    buckets = buckets_of(values, bucket_bytes)
    complete = [bucket[-1] for bucket in buckets]
    assert complete == sorted(complete)
    for kind in "ab":
        places = [place for bucket in buckets for place in bucket if values[place][1] == kind]
        assert places == sorted(places)


@settings(deadline=None)
@given(VALUES, BUCKET_BYTES)
def test_several_values_stay_within_the_limit_and_a_bucket_is_closed_only_for_it(
    values: list[tuple[int, str]], bucket_bytes: int
) -> None:
    for kind in "ab":
        buckets = [
            [values[place][0] for place in bucket]
            for bucket in buckets_of(values, bucket_bytes)
            if values[bucket[0]][1] == kind
        ]
        is_split = sum(map(sum, buckets)) > bucket_bytes
        assert is_split or len(buckets) <= 1
        limits = [bucket_bytes // 8 if is_split and n == 0 else bucket_bytes for n in range(99)]
        for sizes, limit in zip(buckets, limits, strict=False):
            assert len(sizes) == 1 or sum(sizes) <= limit
        for (sizes, following), limit in zip(pairwise(buckets), limits, strict=False):
            assert sum(sizes) + following[0] > limit


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([0], [[0]]),
        ([0, 0, 0], [[0, 1, 2]]),
        ([30, 30, 20], [[0, 1, 2]]),  # 80 in all: one bucket needs no small first one
        ([30, 30, 21], [[0], [1, 2]]),  # the first is past an eighth of 80 at once
        ([5, 5, 1, 70, 9, 1], [[0, 1], [2, 3, 4], [5]]),  # 5 + 5 is an eighth; 1 + 70 + 9 is 80
        ([80], [[0]]),
        ([500], [[0]]),
        ([5, 500, 5, 5], [[0], [1], [2, 3]]),
        ([500, 5, 5], [[0], [1, 2]]),
        ([0, 500, 0, 5], [[0], [1], [2, 3]]),
        ([0, 10, 0, 80, 0], [[0, 1, 2], [3, 4]]),
    ],
)
def test_one_kind_in_buckets_of_80_bytes(sizes: list[int], expected: list[list[int]]) -> None:
    assert assign_buckets(sizes, ["float32"] * len(sizes), bucket_bytes=80) == expected


def test_kinds_that_alternate_are_kept_apart_and_each_starts_small() -> None:
    sizes = [4, 40, 6, 40, 71, 1]
    # a: 4 + 6 are an eighth of 80, then 71; b: 40 is past an eighth, then 40 + 1.
    expected = [[1], [0, 2], [4], [3, 5]]
    assert assign_buckets(sizes, list("ababab"), bucket_bytes=80) == expected


def test_a_kind_that_is_complete_earlier_comes_first() -> None:
    assert assign_buckets([1, 1, 1], ["a", "b", "a"], bucket_bytes=80) == [[1], [0, 2]]


@pytest.mark.parametrize("bucket_bytes", [1, 7])
def test_an_eighth_of_a_tiny_bucket_is_nothing(bucket_bytes: int) -> None:
    sizes = [0, bucket_bytes, bucket_bytes, 0]
    # Nothing fits an eighth but what has no bytes.
    assert assign_buckets(sizes, [None] * 4, bucket_bytes=bucket_bytes) == [[0], [1], [2, 3]]
