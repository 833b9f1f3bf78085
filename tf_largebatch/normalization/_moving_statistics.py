"""The moving means and variances of a model: which there are, read and written on every replica.

A strategy keeps them once a replica; each replica's layers advance their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tf_largebatch.core.batch_norm import pooled_moments
from tf_largebatch.core.errors import ConfigurationError


def layers_with_moving_statistics(model: keras.Model) -> list[Any]:
    """All layers, however deep, that have a `moving_mean` and a `moving_variance`; each once.

    Raises:
        ConfigurationError: one of them has renorm=True.
    """
    # Keras has no public way to the layers within layers that are no models.
    layers = [
        layer
        for layer in model._flatten_layers()
        if isinstance(getattr(layer, "moving_mean", None), keras.Variable)
        and isinstance(getattr(layer, "moving_variance", None), keras.Variable)
    ]
    for layer in layers:
        if getattr(layer, "renorm", False):
            raise ConfigurationError(
                f"{layer.name} has renorm=True, whose other moving statistics depend on these in a "
                "way that averaging would break. Use renorm=False."
            )
    return layers


def components(variable: Any) -> tuple[tf.Variable, ...]:
    """The TensorFlow variables behind a variable of either, one for each replica of this worker."""
    value = variable.value if isinstance(variable, keras.Variable) else variable
    return tuple(getattr(value, "values", (value,)))


def read_statistics(layers: Sequence[Any]) -> npt.NDArray[np.float64]:
    """`[local replica, 2, channels]`: means and variances, all layers' channels side by side."""
    return np.stack(
        [_joined([layer.moving_mean for layer in layers]),
         _joined([layer.moving_variance for layer in layers])],
        axis=1,
    )  # fmt: skip


def _joined(variables: Sequence[Any]) -> npt.NDArray[np.float64]:
    """`[local replica, channels of all]`"""
    values = [
        [np.asarray(component.numpy(), np.float64) for component in components(variable)]
        for variable in variables
    ]
    return np.stack([np.concatenate(of_replica) for of_replica in zip(*values, strict=True)])


def write_statistics(
    layers: Sequence[Any], mean: npt.NDArray[np.float64], variance: npt.NDArray[np.float64]
) -> None:
    """Gives all replicas of this worker the same statistics, `[channels of all layers]` each."""
    ends = np.cumsum([layer.moving_mean.shape[0] for layer in layers])[:-1]
    for layer, its_mean, its_variance in zip(
        layers, np.split(mean, ends), np.split(variance, ends), strict=True
    ):
        for variable, value in (
            (layer.moving_mean, its_mean),
            (layer.moving_variance, its_variance),
        ):
            for component in components(variable):
                component.assign(tf.cast(value, component.dtype))


def pool_over_workers(
    strategy: tf.distribute.Strategy,
    parts: npt.NDArray[np.float64],
    weights: npt.NDArray[np.float64],
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """`pooled_moments` of the parts of all workers, by at most one collective; equal on all.

    Args:
        strategy: that of the model.
        parts: `[local replica, 2, channels]`, means and variances.
        weights: `[local replica]`.

    Raises:
        ConfigurationError: the strategy has replicas elsewhere, and is no `LargeBatchStrategy`.
    """
    local_replicas, _, channels = parts.shape
    packed = np.concatenate([weights[:, None], parts.reshape(local_replicas, -1)], axis=1)
    if strategy.num_replicas_in_sync > local_replicas:
        packed = _gather_from_workers(strategy, packed)
    statistics = packed[:, 1:].reshape(-1, 2, channels)  # [replica, mean or variance, channel]
    return pooled_moments(statistics[:, 0], statistics[:, 1], packed[:, 0])


def _gather_from_workers(
    strategy: tf.distribute.Strategy, packed: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """`[local replica, n]` of all workers as `[replica, n]`, in rank order, exactly.

    Gathered rather than summed, on the host: a sum would depend on the order of its terms, and may
    be rounded on the wire.
    """
    gather = getattr(strategy.extended, "gather_from_workers", None)
    if gather is None:
        raise ConfigurationError(
            f"{type(strategy).__name__} has replicas on other workers, which batch-norm statistics "
            "can be had from under LargeBatchStrategy only. Train under that."
        )
    gathered = gather(tf.constant(packed), purpose="batch-norm statistics")
    return np.asarray(gathered.numpy())
