"""The noise scale of linear regression, of which every example's gradient is known."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import tf_largebatch as tlb
from tf_largebatch.callbacks import GradientNoiseScale

ROWS, FEATURES, SMALL, ACCUMULATED = 4096, 5, 8, 16
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(ROWS, FEATURES)).astype(np.float32)
Y = (X @ np.arange(1, 6) + RANDOM.normal(size=ROWS) * 4).astype(np.float32)[:, None]


def recipe_of(**options):
    return tlb.Recipe(
        **{
            "num_examples": ROWS,
            "per_replica_batch_size": SMALL,
            "num_replicas": 1,
            "accumulation_steps": ACCUMULATED,
            "base_learning_rate": 0.1,
            "epochs": 10,
            **options,
        }
    )


def model_of(optimizer, **options):
    model = keras.Sequential(
        [keras.Input((FEATURES,)), keras.layers.Dense(1, kernel_initializer="zeros")]
    )
    model.compile(optimizer, "mse", **options)
    return model


def fitted(callback, *, epochs=1, **options):
    """At a rate of 0, so that the weights stay where the exact noise scale is known."""
    optimizer = tlb.optimizers.MomentumSGD(
        0.0, momentum=0.0, gradient_accumulation_steps=ACCUMULATED
    )
    model = model_of(optimizer, steps_per_execution=ROWS // SMALL, **options)
    history = model.fit(X, Y, SMALL, epochs, verbose=0, callbacks=[callback]).history
    return model, history


def exact_noise_scale():
    """`tr(S) / |G|^2` of the gradients of (x w + b - y)^2 at w = 0, b = 0."""
    residual = -2.0 * Y.astype(np.float64)
    gradients = np.concatenate([residual * X, residual], axis=1)  # [row, weight]
    mean = gradients.mean(axis=0)
    return ((gradients - mean) ** 2).sum(axis=1).mean() / (mean**2).sum()


def test_estimate_equals_the_direct_one():
    callback = GradientNoiseScale(recipe_of(), decay=0.998)
    _, history = fitted(callback, epochs=15)  # 480 updates of 16 batches
    exact = exact_noise_scale()
    assert 2 < exact < 50
    assert callback.noise_scale == pytest.approx(exact, rel=0.1)
    assert history["gradient_noise_scale"][-1] == callback.noise_scale


def test_a_batch_above_it_is_warned_of_and_the_step_is_left_as_it_was():
    callback = GradientNoiseScale(recipe_of())
    with pytest.raises(tlb.ConfigurationError, match="no estimate yet"):
        callback.describe()
    with pytest.warns(UserWarning, match="hardly pay. The global batch is 128"):
        model, _ = fitted(callback)
    assert model.optimizer.gradient_squares is None
    assert len(model.optimizer.variables) == 2 + 2  # counts, rates, accumulators: none of ours


def test_nothing_is_said_without_an_update():
    callback = GradientNoiseScale(recipe_of())
    optimizer = tlb.optimizers.MomentumSGD(0.0, gradient_accumulation_steps=ACCUMULATED)
    with pytest.warns(UserWarning, match="has 4 batches, where .* make 512 of 8"):
        history = model_of(optimizer).fit(X[:32], Y[:32], SMALL, verbose=0, callbacks=[callback])
    assert callback.noise_scale is None
    assert np.isnan(history.history["gradient_noise_scale"][0])


def test_gradients_that_are_not_finite_are_no_good_news():
    callback = GradientNoiseScale(recipe_of())
    optimizer = tlb.optimizers.MomentumSGD(0.0, gradient_accumulation_steps=ACCUMULATED)
    targets = Y.copy()
    targets[5] = np.nan
    with pytest.warns(UserWarning, match="unknown, as gradients were not finite"):
        model_of(optimizer).fit(X, targets, SMALL, verbose=0, callbacks=[callback])
    assert np.isnan(callback.noise_scale)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: GradientNoiseScale(0.1), "must be a tf_largebatch.Recipe"),
        (
            lambda: GradientNoiseScale(recipe_of(accumulation_steps=1)),
            "both have 8 examples here. Train on several replicas, or with accumulation_steps",
        ),
        (lambda: GradientNoiseScale(recipe_of(), decay=1.0), "decay=1.0 is not a float"),
        (
            lambda: model_of("sgd").fit(X, Y, callbacks=[GradientNoiseScale(recipe_of())]),
            "cannot see the gradients of SGD; compile with tf_largebatch.optimizers.MomentumSGD",
        ),
        (
            lambda: fitted(GradientNoiseScale(recipe_of(accumulation_steps=2))),
            "gradient_accumulation_steps=16, but the recipe has num_replicas=1 and accumul",
        ),
    ],
)
def test_refused(make, words):
    with pytest.raises(tlb.ConfigurationError, match=words):
        make()
