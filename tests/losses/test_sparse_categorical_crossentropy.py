"""Smoothed cross-entropy of integer labels, against NumPy and against Keras on one-hot labels."""

from __future__ import annotations

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.losses import SparseCategoricalCrossentropy

RNG = np.random.default_rng(0)
LOGITS = (4.0 * RNG.normal(size=(6, 5))).astype("float32")
LABELS = np.array([0, 4, 2, 2, 1, 3])


def log_softmax(logits: np.ndarray) -> np.ndarray:
    z = logits.astype("float64")
    z = z - z.max(axis=-1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))


def smoothed_rows(labels: np.ndarray, classes: int, smoothing: float) -> np.ndarray:
    return (1.0 - smoothing) * np.eye(classes)[labels] + smoothing / classes


def oracle(labels: np.ndarray, logits: np.ndarray, smoothing: float) -> np.ndarray:
    rows = smoothed_rows(labels, logits.shape[-1], smoothing)
    return -(rows * log_softmax(logits)).sum(axis=-1)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.75])
@pytest.mark.parametrize("from_logits", [True, False])
def test_equals_the_closed_form_and_keras_on_one_hot_rows(smoothing, from_logits):
    predictions = LOGITS if from_logits else np.exp(log_softmax(LOGITS)).astype("float32")
    loss = SparseCategoricalCrossentropy(from_logits, label_smoothing=smoothing, reduction=None)
    values = loss(LABELS, predictions)
    np.testing.assert_allclose(values, oracle(LABELS, LOGITS, smoothing), rtol=2e-5)
    theirs = keras.losses.CategoricalCrossentropy(
        from_logits=from_logits, label_smoothing=smoothing, reduction=None
    )
    np.testing.assert_allclose(values, theirs(np.eye(5)[LABELS], predictions), rtol=2e-5)


def test_without_smoothing_it_is_keras_own():
    for from_logits, predictions in ((True, LOGITS), (False, np.abs(LOGITS))):
        theirs = keras.losses.SparseCategoricalCrossentropy(from_logits=from_logits)
        ours = SparseCategoricalCrossentropy(from_logits)
        assert float(ours(LABELS, predictions)) == float(theirs(LABELS, predictions))


@settings(deadline=None, max_examples=30)
@given(
    logits=st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=9),
    label=st.integers(0, 1),
    smoothing=st.floats(0.0, 0.99),
    shift=st.floats(-100, 100, width=32),
)
def test_any_row(logits, label, smoothing, shift):
    row = np.asarray([logits], "float32")
    loss = SparseCategoricalCrossentropy(True, label_smoothing=smoothing, dtype="float64")
    value = float(loss([label], row))
    assert value == pytest.approx(oracle(np.array([label]), row, smoothing)[0], rel=1e-9, abs=1e-9)
    target = smoothed_rows(np.array(label), len(logits), smoothing)
    entropy = -sum(q * math.log(q) for q in target if q > 0.0)
    assert value >= entropy - 1e-9  # Gibbs: no prediction does better than the target itself
    shifted = float(loss([label], row.astype("float64") + shift))
    assert shifted == pytest.approx(value, rel=1e-6, abs=1e-9)


def test_gradient_is_softmax_minus_smoothed_row():
    loss = SparseCategoricalCrossentropy(from_logits=True, label_smoothing=0.1, reduction="sum")
    logits = tf.constant(LOGITS)
    with tf.GradientTape() as tape:
        tape.watch(logits)
        value = loss(LABELS, logits)
    expected = np.exp(log_softmax(LOGITS)) - smoothed_rows(LABELS, 5, 0.1)
    np.testing.assert_allclose(tape.gradient(value, logits), expected, atol=1e-6)


def test_sample_weights_and_reductions():
    each = oracle(LABELS, LOGITS, 0.1)
    weights = np.array([0.0, 1.0, 2.0, 0.5, 0.0, 3.0])
    expected = {
        "sum_over_batch_size": (each * weights).sum() / 6,
        "mean_with_sample_weight": (each * weights).sum() / weights.sum(),
        "sum": (each * weights).sum(),
    }
    for reduction, value in expected.items():
        loss = SparseCategoricalCrossentropy(
            from_logits=True, label_smoothing=0.1, reduction=reduction
        )
        assert float(loss(LABELS, LOGITS, sample_weight=weights)) == pytest.approx(value, rel=1e-5)


def test_label_shapes():
    loss = SparseCategoricalCrossentropy(from_logits=True, label_smoothing=0.1, reduction=None)
    each = oracle(LABELS, LOGITS, 0.1)
    np.testing.assert_allclose(loss(LABELS[:, None], LOGITS), each, rtol=1e-5)
    sequences = loss(LABELS.reshape(2, 3).astype("uint8"), LOGITS.reshape(2, 3, 5))
    np.testing.assert_allclose(sequences, each.reshape(2, 3), rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_predictions_are_computed_in_float32(dtype):
    classes = 3000
    half = tf.cast(RNG.normal(size=(4, classes)), dtype)
    labels = np.array([2049, 2051, 0, 2999])  # float16 cannot hold the first two
    loss = SparseCategoricalCrossentropy(from_logits=True, label_smoothing=0.1, reduction=None)
    values = loss(labels, half)
    assert values.dtype == "float32"
    expected = oracle(labels, tf.cast(half, "float64").numpy(), 0.1)
    np.testing.assert_allclose(values, expected, rtol=1e-5)


def test_large_logits_stay_finite():
    loss = SparseCategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
    assert float(loss([0, 0], np.array([[1e4, 0.0], [-1e4, 0.0]]))) == pytest.approx(
        0.5 * (500 + 9500)
    )


def test_certain_probabilities_stay_finite():
    loss = SparseCategoricalCrossentropy(label_smoothing=0.1, reduction=None)
    small = -math.log(keras.config.epsilon())
    np.testing.assert_allclose(
        loss([0, 1], np.array([[1.0, 0.0], [1.0, 0.0]])), [0.05 * small, 0.95 * small], rtol=1e-4
    )


def test_no_one_hot_rows_are_made():
    loss = SparseCategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
    graph = tf.function(loss).get_concrete_function(
        tf.TensorSpec([None], "int64"), tf.TensorSpec([None, 5], "float32")
    )
    kinds = {operation.type for operation in graph.graph.get_operations()}
    assert "SparseSoftmaxCrossEntropyWithLogits" in kinds
    assert "OneHot" not in kinds


def test_half_float_setting_of_keras_does_not_shorten_it():
    keras.config.set_floatx("float16")
    try:
        assert SparseCategoricalCrossentropy().dtype == "float32"
    finally:
        keras.config.set_floatx("float32")


def test_serialises():
    loss = SparseCategoricalCrossentropy(
        True, label_smoothing=0.2, reduction="sum", name="mine", dtype="float64"
    )
    again = keras.losses.deserialize(keras.losses.serialize(loss))
    assert type(again) is SparseCategoricalCrossentropy
    assert again.get_config() == loss.get_config()
    assert float(again(LABELS, LOGITS)) == float(loss(LABELS, LOGITS))


class OwnSteps(keras.Model):
    """Steps that do the same by hand."""

    def call(self, inputs):
        return inputs * self.factor

    def build(self, shape):
        self.factor = self.add_weight(shape=(), initializer="ones")

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"own_loss": loss}

    def test_step(model, data):
        x, y = data
        return {"own_loss": model.compute_loss(x=x, y=y, y_pred=model(x, training=False))}


@pytest.mark.parametrize("how", [{}, {"run_eagerly": True}, {"steps_per_execution": 2}])
@pytest.mark.parametrize("own_steps", [False, True])
def test_training_is_smoothed_and_validation_is_not(how, own_steps):
    name = "own_loss" if own_steps else "loss"
    linear = keras.layers.Activation("linear")
    model = OwnSteps() if own_steps else keras.Sequential([keras.Input((5,)), linear])
    loss = SparseCategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
    model.compile(keras.optimizers.SGD(0.0), loss, **how)
    data = (LOGITS, LABELS)
    history = model.fit(*data, epochs=2, validation_data=data, verbose=0).history
    smoothed, plain = (oracle(LABELS, LOGITS, value).mean() for value in (0.1, 0.0))
    assert abs(smoothed - plain) > 1e-3
    assert history[name] == pytest.approx([smoothed] * 2, rel=1e-5)
    assert history[f"val_{name}"] == pytest.approx([plain] * 2, rel=1e-5)
    logs = model.evaluate(*data, verbose=0, return_dict=True)
    assert logs[name] == pytest.approx(plain, rel=1e-5)
    assert float(loss(LABELS, LOGITS)) == pytest.approx(smoothed, rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"label_smoothing": 1.0}, r"label_smoothing=1.0 is not a number in \[0, 1\)"),
        ({"label_smoothing": -0.1}, "label_smoothing=-0.1"),
        ({"label_smoothing": math.nan}, "label_smoothing=nan"),
        ({"label_smoothing": "0.1"}, "label_smoothing='0.1'"),
        ({"from_logits": 0.1}, "from_logits=0.1 is not a bool"),
        ({"dtype": "float16"}, "dtype='float16' is too short"),
    ],
)
def test_refused(arguments, words):
    with pytest.raises(ConfigurationError, match=words):
        SparseCategoricalCrossentropy(**arguments)
