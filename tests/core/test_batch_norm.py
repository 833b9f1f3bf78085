"""Formulas of moving statistics: against NumPy over all rows, and by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_largebatch.core.batch_norm import (
    batch_norm_momentum_advice,
    initial_weight,
    pooled_moments,
)
from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.core.recipe import Recipe


@given(st.lists(st.integers(0, 7), min_size=1, max_size=6).filter(any), st.integers(0, 2**32 - 1))
def test_pooled_moments_are_those_of_all_rows(rows: list[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    parts = [random.normal(loc=10 * random.normal(), size=(count, 3)) for count in rows]
    nothing = np.full(3, np.nan)  # what a part without rows has
    mean, variance = pooled_moments(
        [part.mean(0) if len(part) else nothing for part in parts],
        [part.var(0) if len(part) else nothing for part in parts],
        rows,
    )
    np.testing.assert_allclose(mean, np.concatenate(parts).mean(0), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(variance, np.concatenate(parts).var(0), rtol=1e-9, atol=1e-9)


def test_a_shift_between_the_means_is_in_the_variance() -> None:
    mean, variance = pooled_moments([[-3.0], [3.0]], [[1.0], [2.0]])
    assert (mean.tolist(), variance.tolist()) == ([0.0], [1.5 + 9.0])


@given(st.floats(-1e6, 1e6, width=32), st.floats(0, 1e6, width=32), st.integers(1, 300))
def test_equal_parts_come_back_bit_by_bit(mean: float, variance: float, parts: int) -> None:
    pooled = pooled_moments(np.full((parts, 1), mean), np.full((parts, 1), variance))
    assert [np.float32(value[0]) for value in pooled] == [np.float32(mean), np.float32(variance)]


@pytest.mark.parametrize("weights", [[], [0, 0]])
def test_no_rows_are_refused(weights: list[int]) -> None:
    with pytest.raises(ConfigurationError, match="no part has any rows"):
        pooled_moments(np.zeros((len(weights), 2)), np.zeros((len(weights), 2)), weights)


@pytest.mark.parametrize(
    ("steps", "momentum"), [(1, 0.0), (10, 0.0), (20, 0.5), (40, 0.75), (100, 0.9), (10**6, 0.9)]
)
def test_momentum_advice(steps: int, momentum: float) -> None:
    assert batch_norm_momentum_advice(steps) == pytest.approx(momentum)


@given(st.integers(1, 10**6))
def test_with_the_advice_the_start_is_forgotten_and_the_window_fits(steps: int) -> None:
    momentum = batch_norm_momentum_advice(steps)
    assert initial_weight(momentum, steps) <= np.exp(-10)
    assert 1 / (1 - momentum) <= max(1, steps / 10) * (1 + 1e-9)


@pytest.mark.parametrize("steps", [0, -3, 2.5, True])
def test_steps_must_be_a_count(steps: object) -> None:
    with pytest.raises(ConfigurationError, match="steps="):
        batch_norm_momentum_advice(steps)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "momentum"),
    [
        ({}, 0.9),  # 10 epochs of 156 updates after the last decay, at epoch 80
        ({"num_examples": 8192 * 4}, 0.75),  # 40 updates
        ({"num_examples": 8192 * 4, "per_replica_batch_size": 16, "accumulation_steps": 2}, 0.875),
        ({"num_examples": 8192, "decay_epochs": (), "epochs": 20}, 0.5),
        # Half an update from the end is rounded up to it: the phase before is the last.
        ({"num_examples": 8192, "decay_epochs": (19.5,), "epochs": 20}, 0.5),
        ({"num_examples": 8192 * 2, "decay_epochs": (100, 199.8), "epochs": 200}, 0.9),
        ({"num_examples": 8192, "decay_epochs": (180, 199.8), "epochs": 200}, 0.5),
    ],
)
def test_recipe_counts_the_batches_after_the_last_decay(
    changes: dict[str, object], momentum: float
) -> None:
    fields = {
        "num_examples": 1_281_167,
        "per_replica_batch_size": 32,
        "num_replicas": 256,
        "base_learning_rate": 0.1,
        "epochs": 90,
        **changes,
    }
    assert Recipe.from_dict(fields).batch_norm_momentum == pytest.approx(momentum)
