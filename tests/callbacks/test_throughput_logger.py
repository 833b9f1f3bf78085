"""What the logger adds to an epoch's logs."""

from __future__ import annotations

import time

import keras
import numpy as np
import pytest

import tf_largebatch as tlb

X = np.ones((64, 2), np.float32)
Y = X[:, :1]


def recipe_of(**options):
    settings = {
        "num_examples": 64,
        "per_replica_batch_size": 4,
        "num_replicas": 1,
        "accumulation_steps": 2,
        "base_learning_rate": 0.1,
        "base_batch_size": 4,
        "epochs": 3,
        "warmup_epochs": 2,
        "decay_epochs": (),
    }
    return tlb.Recipe(**{**settings, **options})


def fitted(optimizer, *callbacks, **options):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse", **options)
    validation = (X, Y)
    return model.fit(
        X, Y, 4, epochs=3, validation_data=validation, verbose=0, callbacks=list(callbacks)
    ).history


@pytest.mark.parametrize("steps_per_execution", [1, 5])
def test_rate_of_the_last_update_of_a_schedule(steps_per_execution):
    recipe = recipe_of()
    optimizer = tlb.optimizers.MomentumSGD(
        recipe.learning_rate_schedule(), gradient_accumulation_steps=2
    )
    history = fitted(
        optimizer,
        tlb.callbacks.ThroughputLogger(recipe),
        steps_per_execution=steps_per_execution,
    )
    # 8 updates an epoch: 7/16 and 15/16 of the way from 0.1 to 0.2.
    assert history["learning_rate"] == pytest.approx([0.1 + 0.1 * 7 / 16, 0.1 + 0.1 * 15 / 16, 0.2])


def test_rates_that_are_not_the_recipes():
    logger = tlb.callbacks.ThroughputLogger(recipe_of(accumulation_steps=1))
    assert fitted(keras.optimizers.SGD(0.03), logger)["learning_rate"] == pytest.approx([0.03] * 3)


def test_a_rate_that_is_logged_already_stays():
    recipe = recipe_of(accumulation_steps=1)
    warmup = tlb.callbacks.LearningRateWarmup(recipe)
    history = fitted(keras.optimizers.SGD(0.5), warmup, tlb.callbacks.ThroughputLogger(recipe))
    assert history["learning_rate"] == pytest.approx([0.1] * 3)


def test_speed_is_that_of_training_alone():
    class Slow(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            time.sleep(0.01)

        def on_test_batch_end(self, batch, logs=None):
            time.sleep(0.5)

    logger = tlb.callbacks.ThroughputLogger(recipe_of(accumulation_steps=1))
    speeds = fitted(keras.optimizers.SGD(0.1), Slow(), logger)["images_per_second"]
    assert max(speeds) <= 4 / 0.01
    # Two batches of validation take a second and more, in which 64 would be less than 64 a second.
    assert max(speeds) > 64


def test_refused():
    with pytest.raises(tlb.ConfigurationError, match=r"must be a tf_largebatch\.Recipe"):
        tlb.callbacks.ThroughputLogger(0.1)
