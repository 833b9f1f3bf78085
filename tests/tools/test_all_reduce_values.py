"""What the all-reduce benchmark's workers sum, and which errors it lets pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tool_runs import load

values = load("_all_reduce_values")


@pytest.mark.parametrize("workers", [2, 3, 32, 200])
@pytest.mark.parametrize("wire", [np.float16, ml_dtypes.bfloat16])
def test_whole_numbers_have_exact_partial_sums(workers: int, wire: Any) -> None:
    own = [values.values_of(rank, 257, workers)[0] for rank in range(workers)]
    largest = workers * max(float(np.abs(whole).max()) for whole in own)
    everything = np.arange(-largest, largest + 1, dtype=np.float32)
    assert np.array_equal(everything.astype(wire).astype(np.float32), everything)
    truth = values.Truth.of(257 * 4, workers)
    assert np.array_equal(truth.whole_sum, np.sum(own, axis=0, dtype=np.int64))
    assert len({whole.tobytes() for whole in own}) == workers


def ring_order(own: np.ndarray, round_: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """The sum as a ring makes it, in float32: rounded before each addition and at the end."""
    total = own[0]
    for value in own[1:]:
        total = value + round_(total)
    return round_(total)


@pytest.mark.parametrize("workers", [2, 8, 32])
@pytest.mark.parametrize(
    ("name", "dtype"), [(None, np.float32), ("float16", np.float16), ("bfloat16", None)]
)
def test_rounding_is_tolerated_and_a_lost_value_is_not(
    workers: int, name: str | None, dtype: Any
) -> None:
    dtype = dtype or ml_dtypes.bfloat16
    own = np.array([values.values_of(rank, 5000, workers)[1] for rank in range(workers)])
    truth = values.Truth.of(5000 * 4, workers)
    exact = own.sum(axis=0, dtype=np.float64)
    np.testing.assert_allclose(truth.normal_sum, exact, rtol=1e-12, atol=1e-12)

    def error(addends: np.ndarray) -> np.ndarray:
        total = ring_order(addends, lambda part: part.astype(dtype).astype(np.float32))
        return np.abs(total - exact)

    tolerance = truth.tolerance(name)
    assert np.all(error(own) <= tolerance)
    assert not np.all(error(own[1:]) <= tolerance)
