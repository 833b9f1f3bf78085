"""What is compared of a model: plain data, equal for equal programs, that shows each difference."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import tf_largebatch as tlb
from tf_largebatch.distribute._comparison import differences
from tf_largebatch.distribute._model_facts import model_facts, plain


def small_model(**compiled: Any) -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.Sequential([keras.layers.Dense(2), keras.layers.BatchNormalization()]),
            keras.layers.Dense(1),
        ]
    )
    model.compile(**{"optimizer": "sgd", "loss": "mse", **compiled})
    return model


def lines_of(first: keras.Model, second: keras.Model) -> list[str]:
    rows = [(0, model_facts(first)), (1, model_facts(second))]
    return [line.strip() for line in differences(rows, head="H").splitlines()[1:]]


def test_equal_models_have_equal_facts_though_keras_counts_their_names_up() -> None:
    first, second = (small_model(optimizer=keras.optimizers.Adam(name=name)) for name in "ab")
    assert first.layers[-1].name != second.layers[-1].name
    assert lines_of(first, second) == []
    assert json.loads(json.dumps(model_facts(first))) == model_facts(first)


def schedule(boundary: int) -> keras.optimizers.schedules.LearningRateSchedule:
    return keras.optimizers.schedules.PiecewiseConstantDecay([boundary], [0.5, 0.25])


def frozen(model: keras.Model) -> keras.Model:
    model.layers[-1].trainable = False
    return model


def with_rate(model: keras.Model, rate: float) -> keras.Model:
    model.optimizer.learning_rate = rate
    return model


@pytest.mark.parametrize(
    ("first", "second", "lines"),
    [
        (
            lambda: small_model(optimizer=keras.optimizers.SGD(schedule(30))),
            lambda: small_model(optimizer=keras.optimizers.SGD(schedule(40))),
            ["optimizer.learning_rate.boundaries: [30] on worker 0; [40] on worker 1"],
        ),
        (
            lambda: small_model(optimizer=keras.optimizers.SGD(0.5, momentum=0.5)),
            lambda: small_model(optimizer=keras.optimizers.SGD(0.5, nesterov=True)),
            [
                "optimizer.momentum: 0.5 on worker 0; 0.0 on worker 1",
                "optimizer.nesterov: false on worker 0; true on worker 1",
            ],
        ),
        (
            lambda: with_rate(small_model(), 0.5),
            lambda: with_rate(small_model(), 0.25),
            ["optimizer.learning_rate: 0.5 on worker 0; 0.25 on worker 1"],
        ),
        (
            lambda: small_model(loss=keras.losses.Huber(delta=1.0)),
            lambda: small_model(loss=keras.losses.Huber(delta=2.0)),
            ["loss.delta: 1.0 on worker 0; 2.0 on worker 1"],
        ),
        (
            lambda: small_model(steps_per_execution=1),
            lambda: small_model(steps_per_execution=5),
            ["steps_per_execution: 1 on worker 0; 5 on worker 1"],
        ),
        (
            lambda: small_model(),
            lambda: frozen(small_model()),
            [
                'variables.6: "float32(2, 1) trainable" on worker 0; "float32(2, 1)" on worker 1',
                'variables.7: "float32(1,) trainable" on worker 0; "float32(1,)" on worker 1',
            ],
        ),
    ],
    ids=["schedule", "optimizer", "rate", "loss", "steps", "trainable"],
)
def test_each_difference_is_shown_by_its_leaf(
    first: Callable[[], keras.Model], second: Callable[[], keras.Model], lines: list[str]
) -> None:
    assert lines_of(first(), second()) == lines


def test_layers_and_dtype_policies() -> None:
    def model(kind: type, rate: float, policy: str, seed: int) -> keras.Model:
        layers = [keras.layers.Dense(1, dtype=policy), kind(rate, seed=seed)]
        return keras.Sequential([keras.Input((3,)), *layers])

    dropout, noise = keras.layers.Dropout, keras.layers.GaussianDropout
    first = model(dropout, 0.1, "float32", 1)
    assert lines_of(first, model(dropout, 0.1, "float32", 2)) == []
    assert lines_of(first, model(dropout, 0.7, "mixed_bfloat16", 1)) == [
        'layers.1.dtype_policy: "float32" on worker 0; "mixed_bfloat16" on worker 1',
        "layers.2.rate: 0.1 on worker 0; 0.7 on worker 1",
    ]
    assert 'layers.2.class: "Dropout" on worker 0; "GaussianDropout" on worker 1' in lines_of(
        first, model(noise, 0.1, "float32", 1)
    )


def test_this_packages_recipe_is_compared() -> None:
    def model(warmup_epochs: int) -> keras.Model:
        recipe = tlb.Recipe(
            num_examples=1000,
            per_replica_batch_size=10,
            num_replicas=2,
            base_learning_rate=0.5,
            epochs=9,
            warmup_epochs=warmup_epochs,
        )
        return small_model(optimizer=tlb.optimizers.LARS(recipe.learning_rate_schedule()))

    (line,) = lines_of(model(1), model(2))
    assert line.startswith("optimizer.learning_rate.")
    assert line.endswith("warmup_steps: 50 on worker 0; 100 on worker 1")


class Broken(keras.optimizers.SGD):
    def get_config(self) -> dict[str, Any]:
        raise NotImplementedError


def my_loss(targets: Any, outputs: Any) -> Any:
    return keras.ops.mean(targets - outputs)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Broken(), "Broken"),
        (my_loss, "my_loss"),
        (object(), "object"),
        (np.float32(0.5), 0.5),
        (("a", 1, None), ["a", 1, None]),
        ({1: {"x": my_loss}}, {"1": {"x": "my_loss"}}),
        (keras.Model, "Model"),
    ],
)
def test_what_has_no_json_is_its_name(value: Any, expected: Any) -> None:
    assert plain(value) == expected


def test_a_model_that_was_never_compiled() -> None:
    facts = model_facts(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]))
    assert facts["optimizer"] is None and facts["loss"] is None
