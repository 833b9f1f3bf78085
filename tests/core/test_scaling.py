"""Scaling rules and the pure formulas of warmup and decay."""

from __future__ import annotations

import math
import re
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.core.scaling import (
    constant_warmup,
    epochs_to_steps,
    gradual_warmup,
    linear_scaling_rule,
    sqrt_scaling_rule,
    step_decay,
)

BEYOND_FLOAT32 = 2**24 + 1


def test_linear_rule_has_the_figures_of_the_paper():
    assert linear_scaling_rule(0.1, global_batch_size=256) == 0.1
    assert linear_scaling_rule(0.1, global_batch_size=8192) == pytest.approx(3.2, rel=1e-15)
    assert linear_scaling_rule(0.1, global_batch_size=64) == 0.025
    assert linear_scaling_rule(0.02, global_batch_size=64, base_batch_size=16) == 0.08


def test_sqrt_rule():
    assert sqrt_scaling_rule(0.1, global_batch_size=1024) == 0.2
    assert sqrt_scaling_rule(0.1, global_batch_size=8192) == pytest.approx(0.1 * math.sqrt(32))


@pytest.mark.parametrize("rule", [linear_scaling_rule, sqrt_scaling_rule])
@pytest.mark.parametrize(
    "change",
    [
        {"base_learning_rate": 0.0},
        {"base_learning_rate": -0.1},
        {"base_learning_rate": math.nan},
        {"base_learning_rate": math.inf},
        {"base_learning_rate": True},
        {"base_learning_rate": "0.1"},
        {"global_batch_size": 0},
        {"global_batch_size": 256.0},
        {"base_batch_size": True},
        {"base_batch_size": -1},
        {"base_learning_rate": 10**400},
        {"base_learning_rate": 1.7e308},  # twice as much is infinite
        {"global_batch_size": 10**400},
        {"base_batch_size": 2**53 + 1},
    ],
)
def test_rules_refuse_what_is_no_rate_or_size(rule, change):
    arguments = {"base_learning_rate": 0.1, "global_batch_size": 1024, "base_batch_size": 256}
    name, value = next(iter(change.items()))
    arguments.update(change)
    rate = arguments.pop("base_learning_rate")
    with pytest.raises(ConfigurationError, match=re.escape(f"{name}={value!r}")):
        rule(rate, **arguments)


@pytest.mark.parametrize(
    ("epochs", "steps_per_epoch", "steps"),
    [(5, 156, 780), (0.5, 5, 3), (0.3, 5, 2), (0.1, 5, 1), (0.09, 5, 0), (1.5, 1, 2), (0, 7, 0)],
)
def test_epochs_round_to_whole_updates_halves_up(epochs, steps_per_epoch, steps):
    assert epochs_to_steps(epochs, steps_per_epoch=steps_per_epoch) == steps


def test_rules_refuse_a_rate_that_vanishes():
    with pytest.raises(ConfigurationError, match=r"base_learning_rate=5e-324: times 0\.25 .* is 0"):
        linear_scaling_rule(5e-324, global_batch_size=64)


def warm(step, warmup_steps, initial=0.1, peak=3.2):
    return gradual_warmup(
        np.asarray(step, np.int64),
        peak,
        warmup_steps=warmup_steps,
        initial_learning_rate=initial,
        peak_learning_rate=peak,
        xp=np,
    )


@settings(deadline=None)
@given(
    step=st.integers(0, 2**40),
    warmup_steps=st.integers(1, 2**40),
    initial=st.floats(1e-6, 1.0),
    factor=st.floats(1.0, 1000.0),
)
def test_gradual_warmup_is_the_line_in_exact_arithmetic(step, warmup_steps, initial, factor):
    peak = initial * factor
    exact = Fraction(initial)
    exact += (Fraction(peak) - Fraction(initial)) * Fraction(min(step, warmup_steps), warmup_steps)
    got = float(warm(step, warmup_steps, initial, peak))
    assert got == pytest.approx(float(exact), rel=1e-14)
    if step >= warmup_steps:
        assert got == peak


def test_gradual_warmup_grows_by_the_same_amount_every_update():
    rates = warm(np.arange(781), 780)
    np.testing.assert_allclose(np.diff(rates), 3.1 / 780, rtol=1e-10)
    assert rates[0] == 0.1
    assert rates[-1] == 3.2


def test_gradual_warmup_tells_neighbours_beyond_float32_apart():
    rates = warm([BEYOND_FLOAT32 - 1, BEYOND_FLOAT32], 2**26)
    assert rates[1] - rates[0] == pytest.approx(3.1 / 2**26, rel=1e-6)


def test_formulas_take_python_numbers():
    assert float(warm(390, 780)) == pytest.approx(1.65)
    hold = constant_warmup(9, 3.2, warmup_steps=10, initial_learning_rate=0.1, xp=np)
    assert float(hold) == 0.1
    assert float(step_decay(7, 1.0, boundaries=(7,), decay_factor=0.5, xp=np)) == 0.5


def test_constant_warmup_jumps_at_its_end():
    steps = np.arange(5)
    rates = constant_warmup(steps, 3.2, warmup_steps=3, initial_learning_rate=0.1, xp=np)
    np.testing.assert_array_equal(rates, [0.1, 0.1, 0.1, 3.2, 3.2])
    none = constant_warmup(steps, 3.2, warmup_steps=0, initial_learning_rate=0.1, xp=np)
    np.testing.assert_array_equal(none, np.full(5, 3.2))


def test_step_decay_acts_at_the_boundary_itself():
    boundaries = (3, 5, BEYOND_FLOAT32)
    steps = np.array([0, 2, 3, 4, 5, BEYOND_FLOAT32 - 1, BEYOND_FLOAT32])
    rates = step_decay(steps, 8.0, boundaries=boundaries, decay_factor=0.5, xp=np)
    np.testing.assert_array_equal(rates, [8, 8, 4, 4, 2, 2, 1])
