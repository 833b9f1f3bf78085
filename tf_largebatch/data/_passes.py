"""Passes over a training data set: the row numbers at its head, the count of epochs at its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tf_largebatch.core.epoch_order import RowNumbers
from tf_largebatch.core.epoch_permutation import row_seeds
from tf_largebatch.core.epoch_rows import EpochRows
from tf_largebatch.data._epoch_cursor import EpochCursor

# Keras reads one step of a data set to build the model, and throws the iterator away. The second
# step is the first that only real training reads.
_STEPS_THAT_BEGIN_AN_EPOCH = 2
_NO_MARK = -1
# Row numbers computed in one call into Python: about 0.2 us each then, and 6 us in calls of 32.
_ROWS_COMPUTED_AT_ONCE = 4096


def pass_numbers(
    epoch_rows: EpochRows,
    cursor: EpochCursor,
    context: tf.distribute.InputContext,
    *,
    batch_size: int,
) -> tf.data.Dataset:
    """The batches of a worker's pass, as numbers: those of its replicas in turn, each step.

    Args:
        cursor: asked for the epoch, and the step in it, when the first batch is read.
        batch_size: rows of a replica's batch.

    Returns:
        Elements `(marks, seeds)`: int64 `[batch_size]`, the epoch at the end of the batch that
        begins it (`deliver_with`), else -1; and int64 `[batch_size, 2]` of `row_seeds`.
    """
    local_replicas = context.num_replicas_in_sync // context.num_input_pipelines
    steps_at_once = max(1, _ROWS_COMPUTED_AT_ONCE // (batch_size * local_replicas))

    def numbers_of_steps(
        epoch: np.int64, first_step: np.int64, step: np.int64
    ) -> tuple[RowNumbers, RowNumbers]:
        marked_step = min(first_step + _STEPS_THAT_BEGIN_AN_EPOCH, epoch_rows.steps_per_epoch) - 1
        end = min(step + steps_at_once, epoch_rows.steps_per_epoch)
        rows = epoch_rows.rows(
            int(epoch),
            int(step),
            int(end),
            shard_index=context.input_pipeline_id,
            shard_count=context.num_input_pipelines,
        )
        rows = rows.reshape(-1, batch_size)  # [step * local replica, row]
        marks = np.full_like(rows, _NO_MARK)
        if step <= marked_step < end:
            marks[(marked_step - step + 1) * local_replicas - 1, -1] = epoch
        return marks, row_seeds(rows, seed=epoch_rows.seed, epoch=int(epoch))

    def pass_from(place: tf.Tensor) -> tf.data.Dataset:
        epoch, first_step = tf.unstack(place)

        def read(step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            marks, seeds = tf.numpy_function(
                numbers_of_steps, [epoch, first_step, step], [tf.int64] * 2
            )
            marks.set_shape([None, batch_size])
            seeds.set_shape([None, batch_size, 2])
            return marks, seeds

        steps = tf.data.Dataset.range(first_step, epoch_rows.steps_per_epoch, steps_at_once)
        return steps.map(read).unbatch()

    def current_place(_: tf.Tensor) -> tf.Tensor:
        place = tf.numpy_function(lambda: np.array(cursor.place, np.int64), [], tf.int64)
        return tf.ensure_shape(place, [2])

    return tf.data.Dataset.range(1).map(current_place).flat_map(pass_from)


def deliver_with(cursor: EpochCursor) -> Callable[[tf.Tensor, Any], Any]:
    """The last stage of the pipeline: tells the cursor of the one marked batch of a pass."""

    def mark_begun(epoch: np.int64) -> np.int64:
        cursor.mark_begun(int(epoch))
        return epoch

    def deliver(marks: tf.Tensor, batch: Any) -> Any:
        mark = marks[-1]
        # No Python for the other batches.
        marked = tf.cond(
            tf.equal(mark, _NO_MARK),
            lambda: mark,
            lambda: tf.numpy_function(mark_begun, [mark], tf.int64),
        )
        with tf.control_dependencies([marked]):
            return tf.nest.map_structure(tf.identity, batch)

    return deliver
