"""Statistics estimated again: those of all rows, and nothing else is changed."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.normalization import GhostBatchNormalization, recalibrate_batch_norm

RANDOM = np.random.default_rng(0)
ROWS = (RANDOM.normal(size=(22, 3)) * [1, 5, 0.1] + [0, 100, -1]).astype("float32")
LABELS = ROWS[:, :1]


def batches(size: int, rows: np.ndarray = ROWS) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((rows, rows[:, :1])).batch(size)


def network(**options: Any) -> keras.Model:
    """Batch norm in front, and another in a model within, behind dropout."""
    inner = keras.Sequential(
        [keras.Input((4,)), keras.layers.BatchNormalization(momentum=0.7, name="inner")]
    )
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.BatchNormalization(name="first", **options),
            keras.layers.Dense(4),
            keras.layers.Dropout(0.5),
            inner,
            keras.layers.Dense(1),
        ]
    )
    model.compile("adam", "mse", metrics=["mae"])
    return model


@pytest.mark.parametrize("size", [22, 11, 5])
@pytest.mark.parametrize("momentum", [0.0, 0.99])
def test_statistics_of_all_rows_whatever_batches_and_momentum(size: int, momentum: float) -> None:
    model = network(momentum=momentum)
    assert recalibrate_batch_norm(model, batches(size)) == -(-22 // size)
    first = model.get_layer("first")
    exact = ROWS.astype(np.float64)
    np.testing.assert_allclose(first.moving_mean.numpy(), exact.mean(0), rtol=1e-5)
    np.testing.assert_allclose(first.moving_variance.numpy(), exact.var(0), rtol=1e-4)


def test_steps_are_the_first_batches() -> None:
    model = network()
    assert recalibrate_batch_norm(model, batches(5).repeat(), 2) == 2
    np.testing.assert_allclose(
        model.get_layer("first").moving_mean.numpy(), ROWS[:10].mean(0), rtol=1e-5
    )
    assert recalibrate_batch_norm(model, batches(11), steps=7) == 2


def test_the_inner_statistics_make_evaluation_that_of_training() -> None:
    """Of one batch without dropout: inference then computes what training did."""
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(4, activation="relu"),
            keras.layers.BatchNormalization(),
        ]
    )
    in_training = np.asarray(model(ROWS, training=True))
    recalibrate_batch_norm(model, tf.data.Dataset.from_tensors(ROWS))
    np.testing.assert_allclose(model(ROWS), in_training, rtol=1e-3, atol=1e-3)


def test_nothing_else_is_changed() -> None:
    model = network()
    model.fit(batches(11), verbose=0)

    def state() -> dict[str, np.ndarray]:
        variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
        return {variable.path: np.array(variable.numpy()) for variable in variables}

    before = state()
    assert any("seed" in path for path in before)
    recalibrate_batch_norm(model, batches(11))
    after = state()
    changed = {path for path in before if not np.array_equal(before[path], after[path])}
    assert {path.split("/")[-2:][0] for path in changed} == {"first", "inner"}
    assert {path.split("/")[-1] for path in changed} == {"moving_mean", "moving_variance"}
    assert model.get_layer("first").momentum == 0.99

    # What fit had traced goes on with the momentum it has.
    mean = model.get_layer("first").moving_mean.numpy()
    model.fit(batches(22), verbose=0)
    np.testing.assert_allclose(
        model.get_layer("first").moving_mean.numpy(),
        0.99 * mean + 0.01 * ROWS.mean(0),
        rtol=1e-5,
    )


def test_a_failure_leaves_all_as_it_was() -> None:
    model = keras.Sequential([keras.Input((3,)), GhostBatchNormalization(4, momentum=0.6)])
    model(ROWS[:8], training=True)
    layer, before = model.layers[-1], model.get_weights()
    with pytest.raises(tf.errors.InvalidArgumentError):
        recalibrate_batch_norm(model, batches(8))  # the last batch has 6 rows
    assert layer.momentum == 0.6
    for weight, old in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, old)
    assert recalibrate_batch_norm(model, batches(8), 2) == 2


def test_statistics_that_are_no_numbers_are_replaced() -> None:
    model = network()
    model.get_layer("first").moving_mean.assign([np.nan, np.inf, 0])
    recalibrate_batch_norm(model, batches(11))
    assert np.isfinite(model.get_layer("first").moving_mean.numpy()).all()


def test_frozen_layers_keep_theirs() -> None:
    model = network()
    model.get_layer("first").trainable = False
    recalibrate_batch_norm(model, batches(11))
    np.testing.assert_array_equal(model.get_layer("first").moving_mean.numpy(), np.zeros(3))


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.norms = [keras.layers.BatchNormalization()]

    def call(self, inputs: Any) -> Any:  # takes no `training`
        return self.norms[0](inputs)


def test_a_subclassed_model_on_plain_rows() -> None:
    model = Subclassed()
    rows = tf.data.Dataset.from_tensor_slices(ROWS).batch(11)
    with pytest.raises(ConfigurationError, match="is not built"):
        recalibrate_batch_norm(model, rows)
    model(ROWS)
    recalibrate_batch_norm(model, rows)
    np.testing.assert_allclose(model.norms[0].moving_mean.numpy(), ROWS.mean(0), rtol=1e-5)


def called_twice(x: Any, norm: Any) -> Any:
    return norm(x) + norm(2 * x)


def in_time_steps(x: Any, norm: Any) -> Any:
    steps = keras.layers.Reshape((3, 1))(x)
    return keras.layers.TimeDistributed(norm)(steps)


class InInferenceMode(keras.layers.Wrapper):
    def call(self, inputs: Any) -> Any:
        return self.layer(inputs, training=False)


def in_inference_mode(x: Any, norm: Any) -> Any:
    return InInferenceMode(norm)(x)


@pytest.mark.parametrize(
    ("call", "shared", "message"),
    [
        (called_twice, keras.layers.BatchNormalization(), "called more than once"),
        (called_twice, keras.layers.BatchNormalization(dtype="float16"), "called more than once"),
        (called_twice, GhostBatchNormalization(11), "called more than once"),
        (in_time_steps, keras.layers.BatchNormalization(), "called more than once"),
        (in_inference_mode, keras.layers.BatchNormalization(), "not called in training mode"),
    ],
)
def test_layers_not_called_once_are_refused(call: Any, shared: Any, message: str) -> None:
    """They would keep the statistics of one call alone, or of none."""
    x = keras.Input((3,))
    once = keras.layers.BatchNormalization(name="once")
    model = keras.Model(x, once(call(x, shared)))
    before = model.get_weights()
    with pytest.raises(ConfigurationError, match=f"^{shared.name} is {message}"):
        recalibrate_batch_norm(model, batches(32))
    for weight, old in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, old)
    shared.trainable = False
    recalibrate_batch_norm(model, batches(32))
    outputs = np.asarray(call(tf.constant(ROWS), shared), np.float64)
    expected = outputs.reshape(-1, outputs.shape[-1]).mean(0)
    np.testing.assert_allclose(once.moving_mean.numpy(), expected, rtol=1e-2)


class Stateful(keras.layers.Layer):
    """A layer whose calls change a metric, and a weight as `SpectralNormalization` does."""

    def build(self, shape: Any) -> None:
        self.seen = keras.metrics.Mean(name="seen")
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, inputs: Any) -> Any:
        self.seen.update_state(inputs)
        self.scale.assign(self.scale * 0.5)
        return inputs * self.scale


def test_metrics_and_weights_changed_in_a_call_are_put_back() -> None:
    inner = keras.Sequential([keras.Input((3,)), Stateful(), keras.layers.BatchNormalization()])
    model = keras.Sequential([keras.Input((3,)), inner])
    model(ROWS)
    layer = inner.layers[0]
    before = [float(layer.seen.result()), float(layer.scale.numpy())]
    assert before[0] != 0
    recalibrate_batch_norm(model, batches(5))
    assert [float(layer.seen.result()), float(layer.scale.numpy())] == before


class WithoutMomentum(keras.layers.Layer):
    def build(self, shape: Any) -> None:
        self.moving_mean = self.add_weight(shape=(3,), trainable=False)
        self.moving_variance = self.add_weight(shape=(3,), trainable=False)

    def call(self, inputs: Any) -> Any:
        return inputs


@pytest.mark.parametrize(
    ("layer", "dataset", "options", "message"),
    [
        (keras.layers.Dense(3), batches(11), {}, "has no batch norm"),
        (keras.layers.BatchNormalization(), batches(11).repeat(), {}, "give steps"),
        (keras.layers.BatchNormalization(), batches(11).take(0), {}, "has no batch"),
        (keras.layers.BatchNormalization(), ROWS, {}, "dataset is a ndarray"),
        (keras.layers.BatchNormalization(), batches(11), {"steps": 0}, "steps=0"),
        (keras.layers.BatchNormalization(renorm=True), batches(11), {}, "renorm=True"),
        (WithoutMomentum(), batches(11), {}, "no float `momentum`"),
    ],
)
def test_what_cannot_be(layer: Any, dataset: Any, options: dict[str, int], message: str) -> None:
    model = keras.Sequential([keras.Input((3,)), layer])
    with pytest.raises(ConfigurationError, match=message):
        recalibrate_batch_norm(model, dataset, **options)
