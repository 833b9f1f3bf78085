"""Moving statistics estimated again, from data, when training is over."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tf_largebatch.core.batch_norm import pooled_moments
from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.core.scaling import require_count
from tf_largebatch.normalization._moving_statistics import (
    components,
    layers_with_moving_statistics,
    pool_over_workers,
    read_statistics,
    write_statistics,
)


def recalibrate_batch_norm(
    model: keras.Model, dataset: tf.data.Dataset, steps: int | None = None
) -> int:
    """Replaces batch norm's moving statistics by exact ones over `steps` batches.

    Moving averages lag behind the weights, and with few steps and a high momentum they never left
    their start: training looks fine, evaluation is at chance (keras 7177, 3949). This passes over
    data with the weights as they are, in training mode, and pools what each batch of each replica
    was normalised by, with w_b its share of all rows:

        moving_mean     = sum_b w_b mean_b
        moving_variance = sum_b w_b variance_b + sum_b w_b (mean_b - moving_mean)^2

    the mean and variance over all rows of the pass, whatever its batches and the momentum
    ("PreciseBN" in Wu and Johnson 2021, arXiv 2105.07576, section 3; `GhostBatchNormalization`
    counts a batch's groups by the mean of their variances). Under `LargeBatchStrategy` each worker
    takes its own rows, and one collective pools them: all end with equal statistics, bit by bit.

    Rows are what is counted, and batch norm averages over their places (pixels, time steps). So
    this is exact where all rows have equally many places in front of a layer, none of them masked.
    With masks, or batches of different image sizes or lengths, w_b still is a share of rows, not of
    places, and the result is not that over all places. Masks are not seen from here, nor refused.

    Weights, optimizer, metrics, random seeds, momentum and all other state stay, or are put back,
    as they were, also when the pass fails; then the statistics are the old ones too. Layers frozen
    by `trainable = False` keep theirs, as in training. Dropout and the like are active. The first
    batch is run twice, to see that each layer is called once.

    Args:
        model: built; under a strategy, made in its scope.
        dataset: a `tf.data.Dataset`, of `x`, `(x, y)` or `(x, y, sample_weight)` in batches like
            those of training, or one that the strategy has distributed. All workers call this at
            the same point, with equally many batches.
        steps: how many batches; None takes the whole data set. After a hundred or so of training's
            batches statistics hardly move any more.

    Returns:
        The number of batches used: `steps`, or fewer where the data set has no more.

    Raises:
        ConfigurationError: the model is not built, or has no batch norm to calibrate, or one with
            `renorm=True` or without a `momentum`, or one that a forward pass calls more than once
            (in siamese branches, or within `TimeDistributed` or a recurrent cell) or never in
            training mode; the data set is of another type, is endless without `steps`, or has no
            batch; `steps` is no integer of 1 or more.
    """
    layers = _layers_to_calibrate(model)
    strategy = model.distribute_strategy
    batches = _batches(dataset, strategy, steps)
    local_replicas, _, channels = read_statistics(layers).shape
    collected = _PooledBatches(replicas=local_replicas, channels=channels)
    with _moving_statistics_halved(model, layers):
        forward = _forward(model, strategy)
        for batch in batches:
            if not collected.batches:
                _refuse_layers_not_called_once(layers, functools.partial(forward, batch))
            write_statistics(layers, np.zeros(channels), np.zeros(channels))
            rows = strategy.experimental_local_results(forward(batch))
            # Twice 0 / 2 + statistics / 2: powers of two, so nothing is rounded.
            collected.add(2 * read_statistics(layers), [int(count) for count in rows])
    if not collected.batches:
        raise ConfigurationError(
            "The data set has no batch, so there is nothing to estimate statistics from. One that "
            "has been read to its end must be made anew."
        )
    write_statistics(layers, *pool_over_workers(strategy, collected.parts, collected.rows))
    return collected.batches


class _PooledBatches:
    """What all batches so far were normalised by, for each replica of this worker."""

    def __init__(self, *, replicas: int, channels: int) -> None:
        self.batches = 0
        self.rows = np.zeros(replicas)
        self.parts = np.zeros((replicas, 2, channels))  # means and variances

    def add(self, statistics: npt.NDArray[np.float64], rows: Sequence[int]) -> None:
        """`[local replica, 2, channels]` of one more batch, and its rows."""
        self.batches += 1
        for replica, count in enumerate(rows):
            if count:  # else there are no statistics either
                pair = np.stack([self.parts[replica], statistics[replica]])
                self.parts[replica] = pooled_moments(
                    pair[:, 0], pair[:, 1], [self.rows[replica], count]
                )
                self.rows[replica] += count


def _layers_to_calibrate(model: keras.Model) -> list[Any]:
    if not model.built:
        raise ConfigurationError(
            f"Model {model.name} is not built, so it has no statistics. Call it on a batch first, "
            "or train it."
        )
    layers = [layer for layer in layers_with_moving_statistics(model) if layer.trainable]
    if not layers:
        raise ConfigurationError(
            f"Model {model.name} has no batch norm that is not frozen (trainable=False), so "
            "there are no moving statistics to calibrate."
        )
    for layer in layers:
        if not isinstance(getattr(layer, "momentum", None), float):
            raise ConfigurationError(
                f"{layer.name}, a {type(layer).__name__}, has moving statistics but no float "
                "`momentum`, without which those of a batch cannot be told. Freeze it "
                "(trainable=False) to leave it as it is."
            )
    return layers


def _batches(dataset: Any, strategy: tf.distribute.Strategy, steps: int | None) -> Iterator[Any]:
    if not isinstance(dataset, tf.data.Dataset | tf.distribute.DistributedDataset):
        raise ConfigurationError(
            f"dataset is a {type(dataset).__name__}; it must be a tf.data.Dataset of batches, as "
            "tf.data.Dataset.from_tensor_slices(x).batch(32), or one distributed by the strategy."
        )
    if steps is not None:
        steps = require_count("steps", steps)
        if isinstance(dataset, tf.data.Dataset):
            dataset = dataset.take(steps)
    elif _cardinality(dataset) == tf.data.INFINITE_CARDINALITY:
        raise ConfigurationError("The data set has no end: give steps, 100 or so.")
    if strategy.num_replicas_in_sync > 1 and isinstance(dataset, tf.data.Dataset):
        dataset = strategy.experimental_distribute_dataset(dataset)
    for number, batch in enumerate(dataset, start=1):
        yield batch
        if number == steps:  # a distributed data set cannot be cut beforehand
            return


def _cardinality(dataset: Any) -> int:
    """The number of batches, or a `tf.data` constant."""
    cardinality = dataset.cardinality  # of a distributed data set a property
    return int(cardinality() if callable(cardinality) else cardinality)


def _forward(model: keras.Model, strategy: tf.distribute.Strategy) -> Any:
    """A function of a batch: the model in training mode on every replica; returns their rows."""

    def on_replica(batch: Any) -> tf.Tensor:
        inputs, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        model(inputs, training=True)
        return tf.shape(tf.nest.flatten(inputs)[0])[0]

    # Traced here, with the momentum of now.
    @tf.function(autograph=False, reduce_retracing=True)
    def forward(batch: Any) -> Any:
        return strategy.run(on_replica, args=(batch,))

    return forward


def _refuse_layers_not_called_once(layers: Sequence[Any], run: Callable[[], Any]) -> None:
    """Runs a batch from moving means so large that what is left of them tells a layer's calls.

    Each call leaves a half, beside which its own mean does not count. So this sees calls in loops,
    too, that a graph holds once.
    """
    for layer in layers:
        for component in components(layer.moving_mean):
            component.assign(tf.fill(component.shape, tf.cast(_start(layer), component.dtype)))
    run()
    left = [
        np.abs([part.numpy() / _start(layer) for part in components(layer.moving_mean)])
        for layer in layers
    ]
    # First, as in inference mode those starts have spoilt what is behind them.
    for layer, share in zip(layers, left, strict=True):
        if np.all(share == 1):
            raise ConfigurationError(
                f"{layer.name} is not called in training mode by model(inputs, training=True), so "
                "no batch changes its statistics. Freeze it (trainable=False) to leave them as "
                "they are."
            )
    for layer, share in zip(layers, left, strict=True):
        if np.all(share < 0.375):  # between a half and a quarter; what is no number passes
            raise ConfigurationError(
                f"{layer.name} is called more than once in a forward pass, and has one mean and "
                "variance, from which those of its calls cannot be told. Call it once, on the rows "
                "of all calls, or freeze it (trainable=False) to leave its statistics as they are."
            )


def _start(layer: Any) -> float:
    """A power of two, far above any mean and far below the largest number."""
    return 2.0**15 if layer.moving_mean.dtype == "float16" else 2.0**100


@contextlib.contextmanager
def _moving_statistics_halved(model: keras.Model, layers: Sequence[Any]) -> Iterator[None]:
    """Within, each call of a layer makes (old + batch's) / 2 of its moving statistics.

    After, all variables and momenta are as before.
    """
    momenta = [layer.momentum for layer in layers]
    state = [
        (component, component.numpy())
        for variable in _all_variables(model)
        if variable.dtype != "string"
        for component in components(variable)
    ]
    try:
        for layer in layers:
            layer.momentum = 0.5
        yield
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
        for component, value in state:
            component.assign(value)


def _all_variables(model: keras.Model) -> list[Any]:
    """Those that a forward pass might change: metrics within layers, and weights too.

    `keras.layers.SpectralNormalization` assigns its layer's kernel.
    """
    of_metrics = [
        variable
        for layer in model._flatten_layers()
        for metric in layer._metrics
        for variable in metric.variables
    ]
    return [*model.variables, *of_metrics]
