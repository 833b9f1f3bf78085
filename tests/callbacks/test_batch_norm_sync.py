"""BatchNormSync in one process: order, warnings, arithmetic of repeated pooling.

What several workers do is in tests/multiprocess/test_batch_norm_of_workers.py.
"""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_largebatch.callbacks import BatchNormSync
from tf_largebatch.core.batch_norm import pooled_moments
from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.normalization import GhostBatchNormalization
from tf_largebatch.normalization._moving_statistics import layers_with_moving_statistics

X = np.random.default_rng(0).normal(size=(16, 3)).astype("float32")
Y = X[:, :1]


def network(*layers: Any) -> keras.Model:
    model = keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def fit(model: keras.Model, *callbacks: Any, **options: Any) -> list[str]:
    """Trains, and returns what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        settings = {"batch_size": 8, "shuffle": False, "verbose": 0, **options}
        model.fit(X, Y, callbacks=[*callbacks], **settings)
    return [str(each.message) for each in caught if "batch-norm layers" in str(each.message)]


def test_one_replica_trains_as_without_it() -> None:
    trained = []
    for callbacks in ([], [BatchNormSync(every_steps=1)]):
        keras.utils.set_random_seed(1)
        model = network(keras.layers.BatchNormalization(momentum=0.5))
        fit(model, *callbacks, epochs=3, validation_data=(X, Y))
        trained.append(model.get_weights())
    for one, other in zip(*trained, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_momentum_too_high_for_the_steps_is_warned_of() -> None:
    """Two steps an epoch; 0.9 ** 20 is 12.2 %, 0.5 ** 20 a millionth; frozen ones never move."""
    inner = keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization(momentum=0.9)])
    frozen = keras.layers.BatchNormalization(momentum=0.99, trainable=False)
    model = network(
        GhostBatchNormalization(4, momentum=0.9),
        inner,
        keras.layers.BatchNormalization(momentum=0.5),
        frozen,
    )
    (message,) = fit(model, BatchNormSync(), epochs=10)
    assert "after 20 steps" in message
    assert "2 batch-norm layers with momentum=0.9 " in message
    assert "12.2%" in message
    assert "momentum=0.5," in message  # 1 - 10 / 20


@pytest.mark.parametrize(("momentum", "warned"), [(0.707, False), (0.709, True)])
def test_the_limit_is_a_thousandth(momentum: float, warned: bool) -> None:
    """0.001 ** (1 / 20) = 0.7079."""
    model = network(keras.layers.BatchNormalization(momentum=momentum))
    assert bool(fit(model, BatchNormSync(), epochs=10)) is warned


def test_only_initial_statistics_are_warned_of() -> None:
    """Those of a model trained before hold something else, also when it is compiled anew."""
    model = network(keras.layers.BatchNormalization(momentum=0.9))
    assert fit(model, BatchNormSync())
    assert not fit(model, BatchNormSync())
    model.compile("sgd", "mse")
    assert not fit(model, BatchNormSync())


def test_steps_are_the_batches_of_this_fit() -> None:
    """Whatever the number of its first epoch, and of the optimizer's updates."""
    model = network(keras.layers.BatchNormalization(momentum=0.709))
    (message,) = fit(model, BatchNormSync(), initial_epoch=100, epochs=101)
    assert "after 2 steps" in message

    norm = keras.layers.BatchNormalization(momentum=0.709, trainable=False)
    model = network(norm)
    model.compile(keras.optimizers.SGD(gradient_accumulation_steps=2), "mse")
    callback = BatchNormSync()
    assert not fit(model, callback, epochs=4)
    norm.trainable = True  # its first steps are to come
    (message,) = fit(model, callback, epochs=10)
    assert "after 20 steps" in message


def test_best_weights_kept_in_front_are_refused() -> None:
    """Without validation `EarlyStopping` reads weights that have not been pooled."""
    model = network(keras.layers.BatchNormalization(momentum=0.1))
    stopping = keras.callbacks.EarlyStopping(monitor="loss", restore_best_weights=True)
    with pytest.raises(ConfigurationError, match="EarlyStopping stands before BatchNormSync"):
        fit(model, stopping, BatchNormSync())
    fit(model, BatchNormSync(), stopping)
    fit(model, keras.callbacks.EarlyStopping(monitor="loss"), BatchNormSync())


class TwoWorkers:
    """What the callback asks of a strategy; the other worker's means are larger by 2."""

    num_replicas_in_sync = 2
    shift = np.array([0.0, 2, 2, 2, 0, 0, 0])  # weight, means, variances

    def __init__(self) -> None:
        self.extended, self.gathered = self, 0

    def gather_from_workers(self, packed: tf.Tensor, *, purpose: str) -> tf.Tensor:
        self.gathered += 1
        return tf.concat([packed, packed + tf.constant(self.shift)], axis=0)


def test_a_callback_used_again_pools_what_it_did_not_see_trained() -> None:
    """Keras sets the model for each `fit` and each evaluation of its own, on all workers."""

    def on_two_workers() -> Any:
        model = network(keras.layers.BatchNormalization())
        layers = model._flatten_layers()
        return SimpleNamespace(distribute_strategy=TwoWorkers(), _flatten_layers=lambda: layers)

    callback = BatchNormSync()

    def mean_in_evaluation(model: Any) -> list[float]:
        keras.callbacks.CallbackList([callback], model=model).on_test_begin()
        (norm,) = layers_with_moving_statistics(model)
        return norm.moving_mean.numpy().tolist()

    first, other = on_two_workers(), on_two_workers()
    assert mean_in_evaluation(first) == [1, 1, 1]
    callback.on_test_begin()  # no batch since
    assert first.distribute_strategy.gathered == 1
    (norm,) = layers_with_moving_statistics(first)
    norm.moving_mean.assign([5, 6, 7])  # by a training without the callback
    assert mean_in_evaluation(first) == [6, 7, 8]
    assert mean_in_evaluation(other) == [1, 1, 1]


@pytest.mark.parametrize("options", [{"save_freq": 2}, {}])
def test_a_saver_in_front_is_refused(options: dict[str, Any], tmp_path: Any) -> None:
    saver = keras.callbacks.ModelCheckpoint(tmp_path / "a.keras", **options)
    model = network(keras.layers.BatchNormalization(momentum=0.1))
    with pytest.raises(ConfigurationError, match="ModelCheckpoint stands before BatchNormSync"):
        fit(model, saver, BatchNormSync())
    fit(model, BatchNormSync(), saver)


def test_a_saver_wrapped_by_another_callback_is_refused_too(tmp_path: Any) -> None:
    class Wrapper(keras.callbacks.Callback):
        callback = keras.callbacks.BackupAndRestore(tmp_path)

    with pytest.raises(ConfigurationError, match="BackupAndRestore stands before"):
        fit(network(), Wrapper(), BatchNormSync())


def test_renorm_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="renorm=True"):
        fit(network(keras.layers.BatchNormalization(renorm=True)), BatchNormSync())


@pytest.mark.parametrize("every_steps", [0, 1.5])
def test_every_steps_must_be_a_count(every_steps: Any) -> None:
    with pytest.raises(ConfigurationError, match="every_steps="):
        BatchNormSync(every_steps=every_steps)


@pytest.mark.parametrize("steps", [1, 10, 100])
def test_repeated_pooling_does_not_count_a_shift_twice(steps: int) -> None:
    """The estimate itself: workers at -2, 2 with variance 1, pooled every so many steps, often.

    By induction the term between workers is (1 - a)^2 * 4 + a * (what it was) with a = m^steps,
    which tends to (1 - a) * 4, from below.
    """
    momentum, shift, a = 0.9, 4.0, 0.9**steps
    means, variances = np.zeros(2), np.ones(2)
    between = []
    for _ in range(300):
        for _ in range(steps):
            means = momentum * means + (1 - momentum) * np.array([-2.0, 2.0])
            variances = momentum * variances + (1 - momentum) * 1.0
        mean, variance = pooled_moments(means, variances)
        between.append(float(variance) - 1.0)
        means, variances = np.full(2, mean), np.full(2, variance)
    assert np.all(np.diff(between) > -1e-12)
    assert between[-1] == pytest.approx((1 - a) * shift, rel=1e-6)
