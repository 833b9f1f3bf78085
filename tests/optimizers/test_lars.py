"""LARS against a NumPy oracle: ratios, norms out of float32's reach, what goes on around it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.optimizers._oracle import trained
from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.optimizers import LARS, LossScaleOptimizer

RATES = [1.0, 2.0, 2.0, 0.1, 3.0]
RNG = np.random.default_rng(0)
SHAPES = [(3, 4), (4,), (2, 2, 3, 5), ()]
STARTS = [RNG.normal(size=shape).astype("float32") for shape in SHAPES]
GRADIENTS = [[RNG.normal(size=s).astype("float32") for s in SHAPES] for _ in RATES]
TRUST = 0.05  # large, so that the ratio shows


def train(
    optimizer: Any, starts: Sequence[Any], gradients: Any, rates: Sequence[float] | None = None
) -> list[Any]:
    variables = [keras.Variable(start) for start in starts]
    for i, now in enumerate(gradients):
        if rates is not None:
            optimizer.learning_rate = rates[i]
        optimizer.apply([None if g is None else tf.convert_to_tensor(g) for g in now], variables)
    return [variable.numpy() for variable in variables]


def assert_equal(found: Sequence[Any], expected: Sequence[Any]) -> None:
    for ours, oracle in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, oracle, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(("decay", "epsilon"), [(0.0, 0.0), (0.3, 0.0), (0.3, 2.0)])
def test_changing_rates(nesterov, decay, epsilon):
    optimizer = LARS(
        1.0, nesterov=nesterov, weight_decay=decay, trust_coefficient=TRUST, epsilon=epsilon
    )
    found = train(optimizer, STARTS, GRADIENTS, RATES)
    settings = {"nesterov": nesterov, "decay": decay, "trust": TRUST, "epsilon": epsilon}
    assert_equal(found, trained(STARTS, GRADIENTS, RATES, **settings))


def test_without_momentum():
    optimizer = LARS(1.0, momentum=0.0, trust_coefficient=TRUST, weight_decay=0.3)
    found = train(optimizer, STARTS, GRADIENTS, RATES)
    assert optimizer.momentums == []
    assert_equal(found, trained(STARTS, GRADIENTS, RATES, momentum=0.0, decay=0.3, trust=TRUST))


def test_one_step_in_closed_form():
    # |w| = 5, |g| = 2: ratio 0.001 * 5 / (2 + 0.1 * 5) = 0.002; a vector moves by rate * g.
    w, b = train(
        LARS(10.0, weight_decay=0.1),
        [np.array([[3.0, 4.0]], "float32"), np.array([3.0, 4.0], "float32")],
        [[np.array([[0.0, 2.0]], "float32"), np.array([0.0, 2.0], "float32")]],
    )
    np.testing.assert_allclose(w, [[3 - 10 * 0.002 * 0.3, 4 - 10 * 0.002 * 2.4]], rtol=1e-6)
    np.testing.assert_allclose(b, [3.0, -16.0], rtol=1e-6)


def test_a_smaller_rate_acts_at_once():
    # Norms 1 and 1, trust 1, no decay: the gradient stays 1, as in the witness of momentum SGD.
    w = keras.Variable(np.ones((1, 1), "float32"))
    optimizer = LARS(0.1, trust_coefficient=1.0, weight_decay=0.0)
    moves = []
    for rate in (0.1, 0.01):
        before = w.numpy()
        optimizer.learning_rate = rate
        optimizer.apply([tf.constant(before)], [w])  # |g| = |w|: the step is |w|
        moves.append(float((w.numpy() - before)[0, 0]))
    np.testing.assert_allclose(moves, [-0.1, -0.01 * (0.9 * 1.0 + 0.9)], rtol=1e-5)


EXTREMES = [
    (0.0, 1.0),
    (1.0, 0.0),
    (0.0, 0.0),
    (1e-30, 1.0),
    (1.0, 1e-30),
    (1e-30, 1e-30),
    (1e30, 1.0),
    (1.0, 1e30),
    (1e30, 1e30),
    (1e-13, 1e-13),
    (1e19, 1e19),
]


@pytest.mark.parametrize("extremes", [*([pair] for pair in EXTREMES), EXTREMES])
def test_norms_whose_squares_float32_does_not_hold(extremes):
    signs = np.sign(STARTS[0])
    starts = [np.float32(weight) * signs for weight, _ in extremes] + STARTS
    gradients = [np.float32(gradient) * signs for _, gradient in extremes] + GRADIENTS[0]
    variables = [keras.Variable(start) for start in starts]
    optimizer = LARS(1.0, weight_decay=0.3, trust_coefficient=TRUST)
    optimizer.build(variables)
    update = tf.function(optimizer.apply) if len(extremes) > 1 else optimizer.apply
    update([tf.constant(g) for g in gradients])
    expected = trained(starts, [gradients], [1.0], decay=0.3, trust=TRUST)
    for ours, oracle in zip(variables, expected, strict=True):
        # Where zeros are moved by 1e-30 there is nothing else to compare with.
        np.testing.assert_allclose(ours.numpy(), oracle, rtol=1e-5, atol=1e-36)


def test_a_ratio_beyond_float32_stays_finite():
    (w,) = train(
        LARS(1.0, weight_decay=0.0),
        [np.full((2, 2), 1e30, "float32")],
        [[np.full((2, 2), 1e-30, "float32")]],
    )
    assert np.all(np.isfinite(w))


def test_vectors_alone_have_the_global_rate():
    (b,) = train(LARS(0.5), [np.ones(3, "float32")], [[np.ones(3, "float32")]])
    np.testing.assert_allclose(b, np.full(3, 0.5), rtol=1e-6)


def test_a_broken_gradient_shows():
    broken = np.ones((3, 4), "float32")
    broken[0, 0] = math.inf
    (w,) = train(LARS(1.0), STARTS[:1], [[broken]])
    assert not np.all(np.isfinite(w))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_other_dtypes(dtype, nesterov):
    # 300 elements of 20: the sum of squares is beyond float16.
    start, g = np.full((15, 20), 20.0), np.full((15, 20), 4.0)
    w = keras.Variable(start, dtype=dtype)
    other = keras.Variable(STARTS[0])
    optimizer = LARS(1.0, nesterov=nesterov, weight_decay=0.3, trust_coefficient=TRUST)
    for _ in range(2):
        optimizer.apply([tf.cast(g, dtype), tf.constant(GRADIENTS[0][0])], [w, other])
    settings = {"nesterov": nesterov, "decay": 0.3, "trust": TRUST}
    expected = trained([start, STARTS[0]], [[g, GRADIENTS[0][0]]] * 2, [1.0, 1.0], **settings)
    spacing = {"float16": 2**-10, "bfloat16": 2**-7, "float64": 1e-6}[dtype]  # at 1
    found = tf.cast(w.value, tf.float64).numpy()
    np.testing.assert_allclose(found, expected[0], rtol=2 * spacing)
    np.testing.assert_allclose(other.numpy(), expected[1], rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_a_variable_without_gradient_stays():
    found = train(LARS(1.0, trust_coefficient=TRUST), STARTS[:3], [[GRADIENTS[0][0], None, None]])
    expected = trained(STARTS[:1], [GRADIENTS[0][:1]], [1.0], decay=1e-4, trust=TRUST)
    assert_equal(found, [*expected, *STARTS[1:3]])


@pytest.mark.parametrize("nesterov", [False, True])
def test_sparse_gradients_equal_dense_ones(nesterov):
    rows = [np.array([0, 2, 2]), np.array([1, 1, 1]), np.array([2, 0, 1])]
    values = RNG.normal(size=(3, 3, 4)).astype("float32")
    dense = np.zeros((3, 3, 4), "float32")
    for step in range(3):
        np.add.at(dense[step], rows[step], values[step])
    w = keras.Variable(STARTS[0])
    optimizer = LARS(0.1, trust_coefficient=TRUST, weight_decay=0.3, nesterov=nesterov)
    optimizer.build([w])
    update = tf.function(lambda i, v: optimizer.apply([tf.IndexedSlices(v, i, (3, 4))], [w]))
    for i, v in zip(rows, values, strict=True):
        update(tf.constant(i), tf.constant(v))
    settings = {"decay": 0.3, "trust": TRUST, "nesterov": nesterov}
    assert_equal([w.numpy()], trained(STARTS[:1], [[g] for g in dense], [0.1] * 3, **settings))


def test_accumulation_takes_norms_of_the_mean():
    optimizer = LARS(1.0, trust_coefficient=TRUST, weight_decay=0.3, gradient_accumulation_steps=2)
    found = train(optimizer, STARTS, GRADIENTS[:4])
    means = [[(a + b) / 2 for a, b in zip(*GRADIENTS[i : i + 2], strict=True)] for i in (0, 2)]
    assert_equal(found, trained(STARTS, means, [1.0, 1.0], decay=0.3, trust=TRUST))


@pytest.mark.parametrize("clip", [{"clipnorm": 0.5}, {"global_clipnorm": 0.5}, {"clipvalue": 0.5}])
def test_norms_are_those_of_the_clipped_gradient(clip):
    (option,) = clip
    total = [math.sqrt(sum(np.sum(g**2) for g in now)) for now in GRADIENTS]
    clipped = [
        [
            {
                "clipnorm": g * min(1.0, 0.5 / np.linalg.norm(g)),
                "global_clipnorm": g * min(1.0, 0.5 / norm),
                "clipvalue": np.clip(g, -0.5, 0.5),
            }[option]
            for g in now
        ]
        for now, norm in zip(GRADIENTS, total, strict=True)
    ]
    # Epsilon, as without it a clipped norm would fall out of the formula.
    optimizer = LARS(1.0, trust_coefficient=TRUST, weight_decay=0.3, epsilon=0.1, **clip)
    found = train(optimizer, STARTS, GRADIENTS, RATES)
    settings = {"decay": 0.3, "trust": TRUST, "epsilon": 0.1}
    assert_equal(found, trained(STARTS, clipped, RATES, **settings))


def test_loss_scaling_changes_neither_norms_nor_decay():
    inner = LARS(1.0, trust_coefficient=TRUST, weight_decay=0.3, epsilon=0.1)
    scaled = [[8.0 * g for g in now] for now in GRADIENTS]
    scaled.insert(2, [np.full_like(g, math.inf) for g in GRADIENTS[0]])  # skipped; scale 4
    scaled[3:] = [[g / 2 for g in now] for now in scaled[3:]]
    found = train(LossScaleOptimizer(inner, initial_scale=8.0), STARTS, scaled)
    settings = {"decay": 0.3, "trust": TRUST, "epsilon": 0.1}
    assert_equal(found, trained(STARTS, GRADIENTS, [1.0] * 5, **settings))


@pytest.mark.parametrize("jit_compile", [False, True])
def test_fit_in_mixed_precision_with_a_frozen_layer(jit_compile):
    with keras.device("cpu"):
        frozen = keras.layers.Dense(4, dtype="mixed_float16", trainable=False)
        dense = keras.layers.Dense(1, dtype="mixed_float16")
        model = keras.Sequential([keras.Input((4,)), frozen, dense])
    inner = LARS(0.1, trust_coefficient=TRUST, use_ema=True, ema_momentum=0.5)
    model.compile(LossScaleOptimizer(inner), "mse", jit_compile=jit_compile)
    before = model.get_weights()
    losses = model.fit(STARTS[0], np.ones((3, 1)), epochs=8, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    assert len(inner.momentums) == 2
    after = model.get_weights()
    for i in (0, 1):
        np.testing.assert_array_equal(before[i], after[i])
    assert np.max(np.abs(before[2] - after[2])) > 0


def embedded_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((2,)),
            keras.layers.Embedding(4, 3),
            keras.layers.Flatten(),
            keras.layers.Dense(3),
        ]
    )


X, Y = np.array([[0, 1], [2, 3], [1, 1]]), np.ones((3, 3))


def fit(model: keras.Model) -> list[Any]:
    model.fit(X, Y, batch_size=3, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


def test_saved_training_goes_on_as_if_never_stopped(tmp_path):
    model = embedded_model()
    optimizer = LARS(0.1, nesterov=True, trust_coefficient=TRUST, epsilon=0.1)
    optimizer.exclude(model, layer_types=keras.layers.Embedding)
    model.compile(optimizer, "mse")
    fit(model)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is LARS
    (excluded,) = loaded.optimizer.get_config()["exclusions"]["variables"]
    assert (excluded["place"][0], excluded["shape"]) == (0, [4, 3])
    for a, b in zip(fit(model), fit(loaded), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_checkpoint_goes_on_as_if_never_stopped(tmp_path):
    def new() -> keras.Model:
        model = embedded_model()
        optimizer = LARS(0.1, trust_coefficient=TRUST)
        optimizer.exclude(model, layer_types=keras.layers.Embedding)
        model.compile(optimizer, "mse")
        optimizer.build(model.trainable_variables)
        return model

    first, second = new(), new()
    fit(first)
    path = tf.train.Checkpoint(model=first, optimizer=first.optimizer).save(tmp_path / "c")
    restored = tf.train.Checkpoint(model=second, optimizer=second.optimizer).restore(path)
    restored.assert_existing_objects_matched()
    for a, b in zip(fit(first), fit(second), strict=True):
        np.testing.assert_array_equal(a, b)


def test_config_round_trip():
    optimizer = LARS(
        0.5, momentum=0.8, weight_decay=0.2, trust_coefficient=0.02, nesterov=True, epsilon=0.3
    )
    config = keras.optimizers.serialize(optimizer)
    again = keras.optimizers.deserialize(config)
    assert again.get_config() == optimizer.get_config()
    assert (again.trust_coefficient, again.epsilon, again.l2_weight_decay) == (0.02, 0.3, 0.2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"trust_coefficient": 0.0}, r"trust_coefficient=0.0 is not a number in \(0, inf\)"),
        ({"trust_coefficient": "1"}, "trust_coefficient='1'"),
        ({"epsilon": -1e-9}, r"epsilon=-1e-09 is not a number in \[0, inf\)"),
        ({"epsilon": math.inf}, "epsilon=inf"),
        ({"weight_decay": math.nan}, "weight_decay=nan"),
        ({"momentum": 1.0}, "momentum=1.0"),
        ({"momentum": 0, "nesterov": True}, "no buffer to look ahead with"),
    ],
)
def test_refused(arguments, words):
    with pytest.raises(ConfigurationError, match=words):
        LARS(0.1, **arguments)
