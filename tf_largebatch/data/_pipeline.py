"""The parts of a `tf.data` pipeline that training and evaluation share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.data._sources import RandomAccessSource

MapFn = Callable[..., Any]

# Of rows that a `row_fn` takes one by one: enough to make the call into Python that reads them
# cheap, few enough to be on their way while the rows before them are decoded.
_ROWS_READ_AT_ONCE = 16


def check_source_and_maps(source: object, row_fn: object, map_fn: object) -> None:
    """Refuses what is no source, or no function, before TensorFlow fails on it further down."""
    if not isinstance(source, RandomAccessSource):
        raise ConfigurationError(
            f"source must be a RandomAccessSource, but is a {type(source).__name__}; wrap arrays "
            "as tf_largebatch.data.ArraySource((x, y))."
        )
    for name, function in (("row_fn", row_fn), ("map_fn", map_fn)):
        if function is not None and not callable(function):
            raise ConfigurationError(f"{name} must be a function or None, but is {function!r}.")


def read_batches(
    numbers: tf.data.Dataset,
    source: RandomAccessSource,
    *,
    row_fn: MapFn | None,
    map_fn: MapFn | None,
    batch_rows: Callable[[tf.data.Dataset], tf.data.Dataset],
) -> tf.data.Dataset:
    """Row numbers to batches: reads, maps single rows, makes batches, maps those.

    Args:
        numbers: elements `(tags, seeds)` of a batch each: a tag of any kind, `[batch, ...]`, that
            stays with its row, and int64 `[batch, 2]` of `core.epoch_permutation.row_seeds`.
        row_fn: with `None` each element is read at once, and stays one batch.
        batch_rows: makes batches of single rows again, where there is a `row_fn`.

    Returns:
        Elements `(tags, batch)`, in the order of `numbers`.
    """

    def read(tags: tf.Tensor, seeds: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, Any]:
        return tags, seeds, source.gather(seeds[:, 1])

    def map_row(tag: tf.Tensor, seed: tf.Tensor, row: Any) -> tuple[tf.Tensor, Any]:
        return tag, row_fn(seed, *as_arguments(row))

    def map_batch(tags: tf.Tensor, batch: Any) -> tuple[tf.Tensor, Any]:
        return tags, batch if map_fn is None else map_fn(*as_arguments(batch))

    if row_fn is None:
        # Read and mapped by one call.
        batches = _parallel_map(
            numbers, lambda tags, seeds: map_batch(tags, source.gather(seeds[:, 1]))
        )
    else:
        rows = _parallel_map(numbers.rebatch(_ROWS_READ_AT_ONCE), read).unbatch()
        batches = batch_rows(_parallel_map(rows, map_row))
        if map_fn is not None:
            batches = _parallel_map(batches, map_batch)
    return batches.prefetch(tf.data.AUTOTUNE)


def _parallel_map(dataset: tf.data.Dataset, function: Callable[..., Any]) -> tf.data.Dataset:
    """`Dataset.map` on as many threads as pay, order kept."""
    return dataset.map(function, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)


def as_arguments(element: Any) -> tuple[Any, ...]:
    """A tuple is spread, all else is one argument: the rule of `Dataset.map`."""
    return element if type(element) is tuple else (element,)


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


def name_data(dataset: tf.data.Dataset, identity: dict[str, Any]) -> None:
    """Says which data it is, numbers and texts by name, for workers to compare theirs.

    Whoever distributes data sets looks for this attribute; it knows nothing of sharders.
    """
    dataset.tf_largebatch_identity = identity


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
