"""Momentum SGD with the rate outside the buffer, against a NumPy oracle and Keras' SGD."""

from __future__ import annotations

import math

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.optimizers import MomentumSGD

RATES = [0.1, 0.2, 0.2, 0.01, 0.3]
RNG = np.random.default_rng(0)
GRADIENTS = RNG.normal(size=(len(RATES), 3, 4)).astype("float32")
START = RNG.normal(size=(3, 4)).astype("float32")


def variable(values: np.ndarray = START, **options) -> keras.Variable:
    return keras.Variable(values, **options)


def oracle(start, gradients, rates, momentum=0.9, nesterov=False, decay=0.0) -> np.ndarray:
    w, v = start.astype("float64"), 0.0
    for gradient, rate in zip(gradients, rates, strict=True):
        g = gradient + decay * w
        v = momentum * v + g
        w = w - rate * (g + momentum * v if nesterov else v)
    return w


def train(optimizer, w, gradients, rates=None) -> np.ndarray:
    for i, gradient in enumerate(gradients):
        if rates is not None:
            optimizer.learning_rate = rates[i]
        optimizer.apply([tf.convert_to_tensor(gradient)], [w])
    return w.numpy()


@pytest.mark.parametrize(
    ("momentum", "nesterov"), [(0.0, False), (0.5, False), (0.9, False), (0.5, True), (0.9, True)]
)
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_changing_rates(momentum, nesterov, decay):
    settings = {"momentum": momentum, "nesterov": nesterov}
    w = train(MomentumSGD(1.0, **settings, weight_decay=decay), variable(), GRADIENTS, RATES)
    expected = oracle(START, GRADIENTS, RATES, **settings, decay=decay)
    np.testing.assert_allclose(w, expected, rtol=1e-5, atol=1e-6)


def test_a_smaller_rate_acts_at_once():
    w = variable(np.zeros(1, "float32"))
    optimizer = MomentumSGD(0.1)
    moves = [-0.1, -0.019]  # -0.1, -0.1 with the rate inside the buffer
    for rate, move in zip([0.1, 0.01], moves, strict=True):
        before = w.numpy()
        optimizer.learning_rate = rate
        optimizer.apply([tf.ones(1)], [w])
        np.testing.assert_allclose(w.numpy() - before, [move], rtol=1e-5)


@pytest.mark.parametrize("nesterov", [False, True])
def test_equals_keras_sgd_at_a_constant_rate(nesterov):
    ours = train(MomentumSGD(0.1, nesterov=nesterov), variable(), GRADIENTS)
    theirs = keras.optimizers.SGD(0.1, momentum=0.9, nesterov=nesterov)
    np.testing.assert_allclose(ours, train(theirs, variable(), GRADIENTS), rtol=1e-5, atol=1e-6)


def test_takes_a_schedule():
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([0, 2, 3], RATES[:2] + RATES[3:])
    w = train(MomentumSGD(schedule), variable(), GRADIENTS)
    np.testing.assert_allclose(w, oracle(START, GRADIENTS, RATES), rtol=1e-5, atol=1e-6)


def test_vectors_and_scalars_are_not_decayed():
    decayed = MomentumSGD(0.1, weight_decay=0.5)
    variables = [variable(np.ones(shape, "float32")) for shape in ((), (3,), (1, 3), (1, 1, 1, 2))]
    decayed.apply([tf.zeros(w.shape) for w in variables], variables)
    expected = [1.0, 1.0, 0.95, 0.95]
    for w, value in zip(variables, expected, strict=True):
        np.testing.assert_allclose(w.numpy(), np.full(w.shape, value), rtol=1e-6)


def test_decay_equals_an_l2_regulariser_in_the_loss():
    def fit(regulariser_factor: float, decay: float) -> list[np.ndarray]:
        regulariser = keras.regularizers.L2(regulariser_factor) if regulariser_factor else None
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(
                    3,
                    kernel_regularizer=regulariser,
                    kernel_initializer=keras.initializers.GlorotUniform(seed=1),
                ),
            ]
        )
        model.compile(MomentumSGD(0.1, nesterov=True, weight_decay=decay), "mse")
        model.fit(START, np.ones((3, 3)), batch_size=3, epochs=6, verbose=0)
        return model.get_weights()

    for a, b in zip(fit(0.1, 0.0), fit(0.0, 0.2), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_sparse_gradients_equal_dense_ones(momentum, decay):
    rows = [np.array([0, 2, 2]), np.array([1, 1, 1]), np.array([2, 0, 1])]
    values = RNG.normal(size=(3, 3, 4)).astype("float32")
    dense = np.zeros((3, 3, 4), "float32")
    for step in range(3):
        np.add.at(dense[step], rows[step], values[step])
    w = variable()
    optimizer = MomentumSGD(0.1, momentum=momentum, weight_decay=decay)
    update = tf.function(lambda i, v: optimizer.apply([tf.IndexedSlices(v, i, (3, 4))], [w]))
    optimizer.build([w])
    for i, v in zip(rows, values, strict=True):
        update(tf.constant(i), tf.constant(v))
    expected = oracle(START, dense, [0.1] * 3, momentum, decay=decay)
    np.testing.assert_allclose(w.numpy(), expected, rtol=1e-5, atol=1e-6)


def test_accumulation_decays_once_an_update():
    optimizer = MomentumSGD(0.1, weight_decay=0.3, gradient_accumulation_steps=2)
    w = train(optimizer, variable(), GRADIENTS[:4])
    means = GRADIENTS[:4].reshape(2, 2, 3, 4).mean(axis=1)
    np.testing.assert_allclose(w, oracle(START, means, [0.1, 0.1], decay=0.3), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("option", ["clipnorm", "global_clipnorm", "clipvalue"])
def test_decay_follows_clipping(option):
    clipped = {
        "clipvalue": np.clip(GRADIENTS, -0.5, 0.5),
        "clipnorm": GRADIENTS * 0.5 / np.linalg.norm(GRADIENTS, axis=(1, 2), keepdims=True),
    }
    expected = clipped[option.removeprefix("global_")]
    w = train(MomentumSGD(0.1, weight_decay=0.3, **{option: 0.5}), variable(), GRADIENTS)
    np.testing.assert_allclose(
        w, oracle(START, expected, [0.1] * len(RATES), decay=0.3), rtol=1e-5, atol=1e-6
    )


def test_loss_scaling_does_not_scale_the_decay():
    inner = MomentumSGD(0.1, weight_decay=0.3)
    optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0)
    w = train(optimizer, variable(), 8.0 * GRADIENTS)
    expected = oracle(START, GRADIENTS, [0.1] * len(RATES), decay=0.3)
    np.testing.assert_allclose(w, expected, rtol=1e-5, atol=1e-6)


def test_under_a_strategy():
    strategy = tf.distribute.MirroredStrategy(["/cpu:0"])
    with strategy.scope():
        w = variable()
        optimizer = MomentumSGD(0.1, nesterov=True, weight_decay=0.3)
        optimizer.build([w])
    step = tf.function(lambda g: strategy.run(lambda: optimizer.apply([tf.identity(g)], [w])))
    for gradient in GRADIENTS:
        step(tf.constant(gradient))
    expected = oracle(START, GRADIENTS, [0.1] * len(RATES), nesterov=True, decay=0.3)
    np.testing.assert_allclose(w.numpy(), expected, rtol=1e-5, atol=1e-6)


def test_saved_training_goes_on_as_if_never_stopped(tmp_path):
    x, y = START, np.ones((3, 3))

    def fit(model: keras.Model) -> keras.Model:
        model.fit(x, y, batch_size=3, epochs=2, shuffle=False, verbose=0)
        return model

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile(MomentumSGD(0.1, momentum=0.8, nesterov=True, weight_decay=0.3), "mse")
    fit(model).save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is MomentumSGD
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    assert loaded.optimizer.l2_weight_decay == 0.3
    for a, b in zip(fit(model).get_weights(), fit(loaded).get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "regulariser", [keras.regularizers.L2(1e-4), keras.regularizers.L1L2(0.0, 1e-4)]
)
def test_decaying_twice_is_refused(regulariser):
    layer = keras.layers.Dense(3, kernel_regularizer=regulariser, name="twice")
    layer.build((None, 4))
    optimizer = MomentumSGD(0.1, weight_decay=1e-4)
    with pytest.raises(ConfigurationError, match=r"1 variables.*twice/kernel.*L2\(x\)"):
        optimizer.build(layer.trainable_variables)
    MomentumSGD(0.1).build(layer.trainable_variables)


def test_regularisers_that_do_not_meet_the_decay_are_left_alone():
    layer = keras.layers.Dense(
        3,
        kernel_regularizer=keras.regularizers.L1(1e-4),
        bias_regularizer=keras.regularizers.L2(1e-4),
    )
    layer.build((None, 4))
    optimizer = MomentumSGD(0.1, weight_decay=1e-4)
    optimizer.build(layer.trainable_variables)
    assert len(optimizer.momentums) == 2


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_other_dtypes(dtype, nesterov):
    w = keras.Variable(START, dtype=dtype)
    optimizer = MomentumSGD(0.1, nesterov=nesterov, weight_decay=0.3)
    for gradient in GRADIENTS:
        optimizer.apply([tf.cast(gradient, dtype)], [w])
    assert w.dtype == optimizer.momentums[0].dtype == dtype
    expected = oracle(START, GRADIENTS, [0.1] * len(RATES), nesterov=nesterov, decay=0.3)
    spacing = {"float16": 2**-10, "bfloat16": 2**-7, "float64": 1e-6}[dtype]  # at 1
    found = tf.cast(w.value, tf.float64).numpy()
    np.testing.assert_allclose(found, expected, rtol=8 * spacing, atol=8 * spacing)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"momentum": 1.0}, r"momentum=1.0 is not a number in \[0, 1\)"),
        ({"momentum": -0.1}, "momentum=-0.1"),
        ({"momentum": math.nan}, "momentum=nan"),
        ({"weight_decay": -1e-4}, r"weight_decay=-0.0001 is not a number in \[0, inf\)"),
        ({"weight_decay": None}, "weight_decay=None"),
        ({"momentum": 0.0, "nesterov": True}, "no buffer to look ahead with"),
    ],
)
def test_refused(arguments, words):
    with pytest.raises(ConfigurationError, match=words):
        MomentumSGD(0.1, **arguments)
