"""Exact evaluation: every row once, in order, over any number of replicas."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tf_largebatch.core.epoch_order import RowNumbers, checked_integer
from tf_largebatch.core.epoch_permutation import epoch_seed
from tf_largebatch.core.evaluation_layout import evaluation_edges, place_in_step
from tf_largebatch.data._pipeline import (
    MapFn,
    check_source_and_maps,
    distribute_steps,
    name_data,
    pipeline_options,
    read_batches,
)
from tf_largebatch.data._sharder_state import source_fingerprint
from tf_largebatch.data._sources import RandomAccessSource


def evaluation_dataset(
    source: RandomAccessSource,
    *,
    batch_size: int,
    strategy: tf.distribute.Strategy | None = None,
    row_fn: MapFn | None = None,
    map_fn: MapFn | None = None,
) -> Any:
    """The data set for `validation_data`, `model.evaluate` and `model.predict`.

    Every row is read exactly once, in order; none is padded, dropped or repeated, so that all
    metrics are those of one process, including `metrics=[...]`, which ignore sample weights.

    Without a strategy: batches of `batch_size` rows, the last one of what is left. With one, the
    rows are cut evenly into `steps * replicas` slots (`core.evaluation_layout`), whose sizes
    differ by at most one row and are at most `ceil(batch_size / replicas) + 1`, and a step's
    slots lie in the order in which `model.predict` joins them. Rows fewer than replicas make one
    step, in which some replicas get a batch of 0 rows. `LargeBatchStrategy` is made for batches of
    unequal size; TensorFlow's own strategies are taken with one replica a worker only.

    Args:
        source: rows by number, such as an `ArraySource`.
        batch_size: rows of a step over all replicas. It need not divide anything.
        strategy: a strategy, or `None`.
        row_fn: applied to single rows as in `GlobalShuffleSharder`; a row's seed is always the
            same here.
        map_fn: applied to whole batches as in `GlobalShuffleSharder`; it may be given 0 rows.

    Returns:
        A `tf.data.Dataset`, or with a strategy a distributed one; the batch dimension is not
        static, the cardinality is known and the same on all workers.

    Raises:
        ConfigurationError: an argument is of the wrong kind or out of range, or one of
            TensorFlow's own strategies has several replicas on this worker.
    """
    check_source_and_maps(source, row_fn, map_fn)
    batch_size = checked_integer(batch_size, "batch_size", minimum=1)
    if strategy is None:
        slots = np.arange(0, len(source), batch_size, dtype=np.int64)
        edges = np.stack([slots, np.minimum(slots + batch_size, len(source))], axis=-1)
        return _slots_dataset(source, edges, row_fn, map_fn)
    edges = evaluation_edges(
        len(source), global_batch_size=batch_size, num_replicas=strategy.num_replicas_in_sync
    )
    return distribute_steps(
        strategy,
        lambda context: _worker_dataset(source, edges, context, row_fn, map_fn),
        steps=len(edges),
    )


def _worker_dataset(
    source: RandomAccessSource,
    edges: RowNumbers,
    context: tf.distribute.InputContext,
    row_fn: MapFn | None,
    map_fn: MapFn | None,
) -> tf.data.Dataset:
    """A worker's part."""
    dataset = _slots_dataset(source, _worker_slots(edges, context), row_fn, map_fn)
    if context.num_input_pipelines > 1:
        identity = {
            "num_rows": len(source),
            "source_fingerprint": source_fingerprint(source),
            "steps": len(edges),
        }
        name_data(dataset, identity)
    return dataset


def _worker_slots(edges: RowNumbers, context: tf.distribute.InputContext) -> RowNumbers:
    """A worker's slots, those of its replicas in turn: `[step * local replica, (first, end)]`."""
    workers = context.num_input_pipelines
    places = [
        place_in_step(
            worker=context.input_pipeline_id, num_workers=workers, local_replica=local_replica
        )
        for local_replica in range(context.num_replicas_in_sync // workers)
    ]
    return edges[:, places].reshape(-1, 2)


def _slots_dataset(
    source: RandomAccessSource, edges: RowNumbers, row_fn: MapFn | None, map_fn: MapFn | None
) -> tf.data.Dataset:
    """One batch for each slot `[slot, (first, end)]`."""
    first_half = np.int64(epoch_seed(seed=0, epoch=0))  # of each row's seed

    def slot_numbers(edge: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        rows = tf.range(edge[0], edge[1])
        return rows, tf.stack([tf.fill(tf.shape(rows), first_half), rows], axis=-1)

    def batch_rows(rows: tf.data.Dataset) -> tf.data.Dataset:
        # Slots differ in size, and rebatch goes through the sizes again and again.
        return rows.batch(1).rebatch(edges[:, 1] - edges[:, 0]).take(len(edges))

    batches = read_batches(
        tf.data.Dataset.from_tensor_slices(edges).map(slot_numbers),
        source,
        row_fn=row_fn,
        map_fn=map_fn,
        batch_rows=batch_rows,
    )
    return (
        batches.map(lambda _, batch: batch)
        .apply(tf.data.experimental.assert_cardinality(len(edges)))
        .with_options(pipeline_options())
    )
