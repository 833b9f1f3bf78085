"""Ghost batch norm: Keras' layer on n rows at a time is the oracle, and NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.normalization import GhostBatchNormalization

RANDOM = np.random.default_rng(0)
N, GROUPS = 4, 3


def values(*shape: int) -> np.ndarray:
    return (RANDOM.normal(size=shape) * 3 + 1).astype("float32")


def differentiated(layer: Any, inputs: Any, upstream: Any) -> list[np.ndarray]:
    """Outputs, then gradients of the inputs and of the weights there are."""
    inputs = tf.constant(inputs)
    weights = [variable.value for variable in layer.trainable_variables]
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        outputs = layer(inputs, training=True)
    gradients = tape.gradient(outputs, [inputs, *weights], output_gradients=upstream)
    return [np.asarray(value, np.float32) for value in (outputs, *gradients)]


def with_weights(layer: Any, shape: tuple[int, ...], weights: list[np.ndarray]) -> Any:
    layer.build(shape)
    layer.set_weights(weights)
    return layer


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((N * GROUPS, 5), {}),
        ((N * GROUPS, 3, 2, 5), {}),
        ((N * GROUPS, 5, 3, 2), {"axis": 1}),
        ((N * GROUPS, 2, 5, 2, 1), {"axis": -3, "momentum": 0.5, "epsilon": 0.1}),
        ((N * GROUPS, 3, 5), {"scale": False}),
        ((N * GROUPS, 3, 5), {"center": False}),
        ((N, 5), {}),
    ],
)
def test_it_is_batch_norm_on_n_rows_each(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    weights = [values(5) for _ in range(4 - len({"scale", "center"} & options.keys()))]
    weights[-1] = np.abs(weights[-1])
    ghost = with_weights(GhostBatchNormalization(N, **options), shape, weights)
    inputs, upstream = values(*shape), values(*shape)
    actual = differentiated(ghost, inputs, upstream)

    workers, parts = [], []
    for start in range(0, shape[0], N):
        rows = slice(start, start + N)
        worker = with_weights(keras.layers.BatchNormalization(**options), shape, weights)
        parts.append(differentiated(worker, inputs[rows], upstream[rows]))
        workers.append(worker)
    outputs, by_inputs, *by_weights = zip(*parts, strict=True)
    expected = [np.concatenate(outputs), np.concatenate(by_inputs)]
    expected += [np.sum(each, axis=0) for each in by_weights]
    for value, wanted in zip(actual, expected, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-4, atol=1e-4)
    for name in ("moving_mean", "moving_variance"):
        of_workers = np.mean([getattr(worker, name).numpy() for worker in workers], axis=0)
        np.testing.assert_allclose(getattr(ghost, name).numpy(), of_workers, rtol=1e-5)


def test_against_numpy() -> None:
    inputs = values(8, 2)
    layer = GhostBatchNormalization(4, momentum=0.75, epsilon=0.5)
    outputs = np.asarray(layer(inputs, training=True))
    groups = inputs.reshape(2, 4, 2)
    mean, variance = groups.mean(1, keepdims=True), groups.var(1, keepdims=True)
    expected = ((groups - mean) / np.sqrt(variance + 0.5)).reshape(8, 2)
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(layer.moving_mean.numpy(), 0.25 * mean[:, 0].mean(0), rtol=1e-5)
    np.testing.assert_allclose(
        layer.moving_variance.numpy(), 0.75 + 0.25 * variance[:, 0].mean(0), rtol=1e-5
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_has_statistics_in_float32(dtype: str) -> None:
    inputs = keras.ops.cast(values(8, 64, 2) * 200, dtype)  # squares overflow float16
    layer = GhostBatchNormalization(4, momentum=0.0, dtype=f"mixed_{dtype}")
    outputs = layer(inputs, training=True)
    assert outputs.dtype == dtype
    assert layer.moving_variance.dtype == layer.gamma.dtype == "float32"
    groups = np.asarray(inputs, np.float64).reshape(2, -1, 2)
    np.testing.assert_allclose(layer.moving_variance.numpy(), groups.var(1).mean(0), rtol=1e-4)
    normalised = np.asarray(outputs, np.float64).reshape(2, -1, 2)
    np.testing.assert_allclose(normalised.var(1), 1, rtol=0.02)


def test_inference_and_frozen_layers_are_those_of_keras() -> None:
    weights = [*(values(5) for _ in range(3)), np.abs(values(5))]
    inputs = values(7, 5)  # a number that n does not divide
    ghost = with_weights(GhostBatchNormalization(4), (None, 5), weights)
    plain = with_weights(keras.layers.BatchNormalization(), (None, 5), weights)
    np.testing.assert_array_equal(ghost(inputs), plain(inputs))
    ghost.trainable = False
    np.testing.assert_array_equal(ghost(inputs, training=True), plain(inputs))
    np.testing.assert_array_equal(ghost.moving_mean.numpy(), weights[2])


def network(layer: Any) -> keras.Model:
    return keras.Sequential([keras.Input((5,)), layer, keras.layers.Dense(1, use_bias=False)])


def test_saved_loaded_and_exchanged_with_keras(tmp_path: Path) -> None:
    model = network(GhostBatchNormalization(4, momentum=0.8, scale=False, name="norm"))
    model.compile("sgd", "mse")
    model.fit(values(16, 5), values(16, 1), batch_size=8, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    (layer,) = [x for x in loaded.layers if isinstance(x, GhostBatchNormalization)]
    assert (layer.virtual_batch_size, layer.momentum, layer.scale) == (4, 0.8, False)

    plain = network(keras.layers.BatchNormalization(scale=False, name="norm"))
    plain.set_weights(model.get_weights())
    inputs = values(6, 5)
    for other in (loaded, plain):
        np.testing.assert_array_equal(other(inputs), model(inputs))


def test_rows_unknown_when_traced() -> None:
    """In one call of several steps; the error comes when the step runs, and says what to do."""
    model = network(GhostBatchNormalization(4))
    model.compile("sgd", "mse", steps_per_execution=2)
    data = tf.data.Dataset.from_tensor_slices((values(32, 5), values(32, 1)))
    model.fit(data.batch(8), verbose=0)
    assert data.batch(8).element_spec[0].shape[0] is None
    with pytest.raises(tf.errors.InvalidArgumentError, match="drop_remainder=True"):
        model.fit(data.batch(6), verbose=0)


@pytest.mark.parametrize(
    ("rows", "advice"), [(3, "Use virtual_batch_size=3"), (10, "8 and 12 would do")]
)
def test_rows_that_n_does_not_divide(rows: int, advice: str) -> None:
    with pytest.raises(ConfigurationError, match=advice):
        GhostBatchNormalization(4)(values(rows, 5), training=True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GhostBatchNormalization(0), "virtual_batch_size=0"),
        (lambda: GhostBatchNormalization(4.0), "virtual_batch_size=4.0"),
        (lambda: GhostBatchNormalization(4, synchronized=True), "synchronized=True"),
        (lambda: GhostBatchNormalization(4, renorm=True), "renorm=True"),
        (lambda: GhostBatchNormalization(4, axis=-2)(values(8, 5)), "that of the rows"),
        (lambda: GhostBatchNormalization(4, axis=7)(values(8, 3, 5)), "axis=7 .*there are 3 axes"),
        (lambda: GhostBatchNormalization(4, axis=-4)(values(8, 3, 5)), "axis=-4 .*there are 3"),
    ],
)
def test_what_cannot_be(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_a_mask_is_refused_in_training_only() -> None:
    layer, mask = GhostBatchNormalization(4), np.ones((8, 3), bool)
    layer(values(8, 3, 5), mask=mask)
    with pytest.raises(ConfigurationError, match="got a mask in training"):
        layer(values(8, 3, 5), mask=mask, training=True)
