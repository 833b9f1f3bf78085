"""Gives each replica its part of the rows of a global batch."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_largebatch.core.errors import DataError
from tf_largebatch.core.evaluation_layout import place_in_step


def split_rows(
    dataset: tf.data.Dataset, *, worker: int, num_workers: int, local_replicas: int
) -> tf.data.Dataset:
    """This worker's rows of a data set of global batches that all workers hold alike.

    Of a batch of `b` rows, the replica in place `p` of `R` takes rows `p * b // R` up to
    `(p + 1) * b // R`: each row goes to one replica, also of a last, smaller batch. Places follow
    the order in which Keras joins predictions.

    Raises:
        DataError: elements are not batches.
    """
    replicas = num_workers * local_replicas
    places = [
        place_in_step(worker=worker, num_workers=num_workers, local_replica=local)
        for local in range(local_replicas)
    ]
    leaves = tf.nest.flatten(dataset.element_spec)
    if not leaves or any(
        getattr(spec, "shape", None) is not None and spec.shape.rank == 0 for spec in leaves
    ):
        raise DataError(
            f"The data set's elements are not batches: {dataset.element_spec}. Call "
            "dataset.batch(global_batch_size) first, so that rows can be given to replicas."
        )

    def part(batch: Any, place: int | tf.Tensor) -> Any:
        rows = _static_rows(batch)
        if rows is None:
            rows = _rows(batch)
        begin, end = place * rows // replicas, (place + 1) * rows // replicas
        return tf.nest.map_structure(lambda leaf: _slice(leaf, begin, end), batch)

    def packed(batch: tuple[Any, ...]) -> Any:
        # `Dataset.map` hands the parts of a tuple over as arguments, and anything else as one.
        return batch if type(dataset.element_spec) is tuple else batch[0]

    if local_replicas == 1:
        return dataset.map(lambda *batch: part(packed(batch), places[0]))
    steps = int(dataset.cardinality().numpy())

    def replica_batches(*batch: Any) -> tf.data.Dataset:
        parts = [tf.data.Dataset.from_tensors(part(packed(batch), place)) for place in places]
        joined = parts[0]
        for each in parts[1:]:
            joined = joined.concatenate(each)
        return joined

    split = dataset.flat_map(replica_batches)
    return (
        split
        if steps < 0
        else split.apply(tf.data.experimental.assert_cardinality(steps * local_replicas))
    )


def _static_rows(batch: Any) -> int | None:
    leaf = tf.nest.flatten(batch)[0]
    return None if isinstance(leaf, tf.SparseTensor) else leaf.shape[0]


def _rows(batch: Any) -> tf.Tensor:
    leaf = tf.nest.flatten(batch)[0]
    if isinstance(leaf, tf.SparseTensor):
        return leaf.dense_shape[0]
    return leaf.nrows() if isinstance(leaf, tf.RaggedTensor) else tf.shape(leaf, tf.int64)[0]


def _slice(leaf: Any, begin: Any, end: Any) -> Any:
    if leaf is None:
        return None
    if not isinstance(leaf, tf.SparseTensor):
        return leaf[begin:end]
    rest = leaf.dense_shape[1:]
    start = tf.concat([tf.cast([begin], tf.int64), tf.zeros_like(rest)], axis=0)
    size = tf.concat([tf.cast([end - begin], tf.int64), rest], axis=0)
    return tf.sparse.slice(leaf, start, size)
