"""Estimates of the gradient noise scale, on moments that are known."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_largebatch.core.noise_scale import (
    GradientMoments,
    example_efficiency,
    gain_of_doubling,
    gradient_moments,
    noise_scale,
)

POSITIVE = st.floats(1e-3, 1e3)


@given(POSITIVE, POSITIVE, st.integers(1, 512), st.integers(2, 64))
def test_moments_come_back_from_expected_squares(
    squared_norm: float, variance: float, small: int, factor: int
) -> None:
    large = small * factor
    found = gradient_moments(
        small_square=squared_norm + variance / small,
        large_square=squared_norm + variance / large,
        small_batch_size=small,
        large_batch_size=large,
    )
    scale = squared_norm + variance
    assert found.squared_norm == pytest.approx(squared_norm, abs=1e-9 * scale * large)
    assert found.variance == pytest.approx(variance, abs=1e-9 * scale * large)


def test_noise_scale_of_moments() -> None:
    assert noise_scale(GradientMoments(0.5, 100.0)) == 200.0
    assert noise_scale(GradientMoments(-0.1, 100.0)) == math.inf
    assert noise_scale(GradientMoments(0.0, 1.0)) == math.inf
    assert noise_scale(GradientMoments(1.0, -0.1)) == 0.0
    assert math.isnan(noise_scale(GradientMoments(math.nan, 1.0)))
    assert math.isnan(noise_scale(GradientMoments(-math.inf, math.inf)))


@pytest.mark.parametrize(
    ("batch", "scale", "efficiency", "gain"),
    [
        (100, 100.0, 1 / 2, 4 / 3),
        (100, 1000.0, 10 / 11, 11 / 6),
        (1000, 100.0, 1 / 11, 22 / 21),
        (100, 0.0, 0.0, 1.0),
        (100, math.inf, 1.0, 2.0),
    ],
)
def test_what_a_batch_is_worth(batch: int, scale: float, efficiency: float, gain: float) -> None:
    assert example_efficiency(batch, scale) == pytest.approx(efficiency)
    assert gain_of_doubling(batch, scale) == pytest.approx(gain)
