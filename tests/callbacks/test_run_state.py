"""Which variables and settings are a run's."""

from __future__ import annotations

import keras
import pytest

import tf_largebatch as tlb
from tf_largebatch.callbacks._run_state import _facts, _groups, rate_of


def compiled(optimizer: keras.optimizers.Optimizer, **dense: object) -> keras.Model:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, **dense)])
    model.compile(optimizer, "mse")
    optimizer.build(model.trainable_variables)
    return model


def test_optimizers_that_a_model_keeps_beside_that_of_compile() -> None:
    model = compiled(keras.optimizers.SGD(0.1))
    model.of_its_own = keras.optimizers.Adam(0.1)  # as one with a training step of its own does
    with pytest.raises(tlb.ConfigurationError, match=r"another Adam .* Call its build"):
        _groups(model, ())
    model.of_its_own.build(model.trainable_variables)
    found = _groups(model, ())["optimizer"]
    expected = [*model.optimizer.variables, *model.of_its_own.variables]
    assert len(found) == len(expected)
    assert all(one is other for one, other in zip(found, expected, strict=True))


def test_a_rate_that_is_a_number() -> None:
    assert rate_of(compiled(keras.optimizers.SGD(0.25))) == 0.25
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5))
    assert rate_of(compiled(scaled)) == 0.5
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 9)
    assert rate_of(compiled(keras.optimizers.SGD(schedule))) is None


def test_settings_of_layers_count_and_the_present_rate_does_not() -> None:
    first, faster, other = (
        compiled(keras.optimizers.SGD(rate), activation=activation)
        for rate, activation in ((0.1, "relu"), (0.5, "relu"), (0.1, "tanh"))
    )
    assert _facts(first) == _facts(faster)
    assert _facts(first) != _facts(other)
