"""The parts of a `tf.data` pipeline that training and evaluation share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.data._sources import RandomAccessSource


def check_source_and_map(source: object, map_fn: object) -> None:
    """Refuses what is no source, or no function, before TensorFlow fails on it further down."""
    if not isinstance(source, RandomAccessSource):
        raise ConfigurationError(
            f"source must be a RandomAccessSource, but is a {type(source).__name__}; wrap arrays "
            "as tf_largebatch.data.ArraySource((x, y))."
        )
    if map_fn is not None and not callable(map_fn):
        raise ConfigurationError(f"map_fn must be a function or None, but is {map_fn!r}.")


def apply_map(map_fn: Callable[..., Any] | None, batch: Any) -> Any:
    """`map_fn(*batch)` for a tuple, `map_fn(batch)` for all else: the rule of `Dataset.map`."""
    if map_fn is None:
        return batch
    return map_fn(*batch) if type(batch) is tuple else map_fn(batch)


def pipeline_options() -> tf.data.Options:
    """The options of every pipeline of this package, each set for a reason."""
    options = tf.data.Options()
    # Parallel maps must hand batches on in order: the order is the result.
    options.deterministic = True
    # Maps and prefetches size themselves. Threads are left to TensorFlow's shared pool: a private
    # pool for each pipeline would put more threads on the cores than there are, with several
    # workers on a host.
    options.autotune.enabled = True
    # The last stage counts the steps delivered. Nothing that reads ahead may be put behind it,
    # and it must not run in parallel.
    options.experimental_optimization.inject_prefetch = False
    options.experimental_optimization.map_parallelization = False
    return options


def distribute_steps(
    strategy: tf.distribute.Strategy,
    dataset_fn: Callable[[tf.distribute.InputContext], tf.data.Dataset],
    *,
    steps: int,
) -> Any:
    """Makes each worker's part by `dataset_fn`: one element a step for each replica, in turn.

    Args:
        strategy: under the default one, `tf.distribute.get_strategy()`, the data set stays a
            plain `tf.data.Dataset`.
        dataset_fn: makes a worker's `steps * local replicas` elements.
        steps: what the data set has to report as its cardinality.

    Raises:
        ConfigurationError: the strategy has several replicas on this worker and counts elements.
    """
    distributed = strategy.distribute_datasets_from_function(dataset_fn)
    if isinstance(distributed, tf.data.Dataset) or int(distributed.cardinality) == steps:
        return distributed
    # TensorFlow counts elements, which Keras would take for steps, and run out of data in the
    # middle of its epoch.
    raise ConfigurationError(
        f"{type(strategy).__name__} has several replicas on this worker, and reports "
        f"{int(distributed.cardinality)} batches as the number of steps, which is {steps}. Use "
        "tf_largebatch.LargeBatchStrategy, also on a single host, or one replica a worker."
    )
