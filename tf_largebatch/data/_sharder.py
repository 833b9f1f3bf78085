"""One shuffle of the whole data set an epoch, divided among the workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tf_largebatch.core.epoch_order import (
    Remainder,
    RowNumbers,
    check_divides,
    checked_integer,
    epoch_order,
    epoch_steps,
    shard_part,
    steps_in_epoch,
)
from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.data._epoch_cursor import EpochCursor
from tf_largebatch.data._pipeline import (
    apply_map,
    check_source_and_map,
    distribute_steps,
    pipeline_options,
)
from tf_largebatch.data._sources import RandomAccessSource

# Keras reads one step of a data set to build the model, and throws the iterator away. The second
# step is the first that only real training reads.
_STEPS_THAT_BEGIN_AN_EPOCH = 2
_NO_MARK = -1


class GlobalShuffleSharder:
    """A true permutation of all rows each epoch, of which every worker reads its part.

    "One random shuffle of the whole training set per epoch, divided among the k workers" (Goyal
    et al. 2017). The order depends on `(seed, epoch)` alone, a step holds
    `order[step * B : (step + 1) * B]`, and shard `i` of `k` owns the contiguous `i`-th part of
    it: at an equal global batch size `B` a step holds the same rows on any number of workers.

    Args:
        source: rows by number, such as an `ArraySource`.
        global_batch_size: rows of a step over all replicas of all workers.
        seed: 0 to 2**64 - 1, the same on all workers.
        map_fn: applied to whole batches (`map_fn(*batch)` where the source's structure is a
            tuple, else `map_fn(batch)`), traced once, run by a parallel `tf.data` map, order
            kept. It sees one replica's rows, `[rows, ...]`, and must keep their number static.
        remainder: `"drop"` leaves the last `len(source) % B` rows of each epoch's order out
            (others each epoch); `"wrap"` fills the last step with the first rows of the order.

    Raises:
        ConfigurationError: an argument is of the wrong kind or out of range, or no step fits
            into an epoch.
    """

    def __init__(
        self,
        source: RandomAccessSource,
        *,
        global_batch_size: int,
        seed: int,
        map_fn: Callable[..., Any] | None = None,
        remainder: Remainder = "drop",
    ) -> None:
        check_source_and_map(source, map_fn)
        self._source = source
        self._global_batch_size = checked_integer(global_batch_size, "global_batch_size", minimum=1)
        self._seed = checked_integer(seed, "seed", minimum=0, maximum=2**64 - 1)
        self._map_fn = map_fn
        self._remainder = remainder
        self._steps_per_epoch = steps_in_epoch(
            len(source), global_batch_size=self._global_batch_size, remainder=remainder
        )
        # The steps last computed: Keras starts an epoch twice when it builds a model.
        self._latest: tuple[int, RowNumbers] | None = None

    @property
    def global_batch_size(self) -> int:
        """Rows of a step over all replicas."""
        return self._global_batch_size

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch, the same on every worker."""
        return self._steps_per_epoch

    def positions(
        self, *, epoch: int, step: int, shard_index: int = 0, shard_count: int = 1
    ) -> RowNumbers:
        """The row numbers that a shard reads in a step, in order: int64 `[B // shard_count]`.

        `shard_count` may be the number of workers, or of all replicas; replica `r` of worker `w`
        with `L` local replicas is shard `w * L + r` of the replicas.

        Raises:
            ConfigurationError: `step` or `shard_index` out of range, or a `shard_count` that does
                not divide the global batch.
        """
        step = checked_integer(step, "step", minimum=0, maximum=self._steps_per_epoch - 1)
        part = shard_part(self._global_batch_size, shard_index=shard_index, shard_count=shard_count)
        return self._steps(epoch)[step, part].copy()

    def train_dataset(
        self, strategy: tf.distribute.Strategy | None = None, *, initial_epoch: int = 0
    ) -> Any:
        """The data set to give to `model.fit`, with or without `steps_per_epoch`.

        A pass over it is one epoch of `steps_per_epoch` steps, and epochs follow one another by
        themselves, from `initial_epoch` on. The epoch number is state of the returned data set
        (each call of `train_dataset` makes a new one):

        - an iterator reads the first epoch that is not begun when its first step is read;
        - an epoch is begun once its second step has been delivered (or its only one).

        So the single step that Keras reads ahead of `fit` and `evaluate` under a strategy, to
        build the model, and iterators that are made and never read, do not use an epoch up. An
        iterator abandoned later than that leaves the rest of its epoch unread. In an epoch of
        one step, that step of Keras is the whole epoch: every `fit` under a strategy passes over
        one, and begins with the next (an order like any other, the same on all workers).

        All this is exact, thus the same on all workers, since neither `LargeBatchStrategy` nor a
        plain `tf.data.Dataset` reads ahead of its consumer. TensorFlow's own strategies do, and
        are taken with one replica a worker only: what follows the step that was read may be used
        up as well, so that `fit` may pass over its first epoch.

        A data set made without `strategy` may be given to Keras under `LargeBatchStrategy` too:
        the steps hold the same rows, but every worker reads all of a step to use its part.

        `fit(steps_per_epoch=n)` with another `n` than the sharder's: passes stay whole epochs.
        With a smaller `n` each epoch of Keras reads the next `n` steps of the pass, until it
        ends: if `n` does not divide its steps, that last epoch of Keras is short, with Keras'
        warning "ran out of data". With a larger `n` every epoch of Keras ends with the pass,
        with that warning.

        Args:
            strategy: with `None` a `tf.data.Dataset` of batches `[B, ...]`. With a strategy a
                distributed data set: each worker reads its part of a step, a batch of
                `B // num_replicas_in_sync` rows for each of its replicas.
            initial_epoch: the epoch of the first pass, as `fit(initial_epoch=...)`.

        Returns:
            A data set with static batch dimension and known, finite cardinality.

        Raises:
            ConfigurationError: the replicas do not divide the global batch evenly (with the
                nearest sizes that work), `map_fn` changes the number of rows, or one of
                TensorFlow's own strategies has several replicas on this worker.
        """
        initial_epoch = checked_integer(initial_epoch, "initial_epoch", minimum=0)
        cursor = EpochCursor(initial_epoch)
        if strategy is None:
            return self._shard_dataset(cursor, tf.distribute.InputContext())
        check_divides(
            self._global_batch_size,
            parts=strategy.num_replicas_in_sync,
            parts_name="replicas",
        )
        return distribute_steps(
            strategy,
            lambda context: self._shard_dataset(cursor, context),
            steps=self._steps_per_epoch,
        )

    def _steps(self, epoch: int) -> RowNumbers:
        """The rows of all steps of an epoch, `[step, row]`; shared, so not to be changed."""
        latest = self._latest
        if latest is None or latest[0] != epoch:
            order = epoch_order(len(self._source), seed=self._seed, epoch=epoch)
            steps = epoch_steps(
                order, global_batch_size=self._global_batch_size, remainder=self._remainder
            )
            self._latest = latest = (int(epoch), steps)
        return latest[1]

    def _shard_dataset(
        self, cursor: EpochCursor, context: tf.distribute.InputContext
    ) -> tf.data.Dataset:
        """One worker's part: `steps_per_epoch * local replicas` batches, a replica's each."""
        local_replicas = context.num_replicas_in_sync // context.num_input_pipelines
        rows = self._global_batch_size // context.num_replicas_in_sync
        elements = self._steps_per_epoch * local_replicas
        part = shard_part(
            self._global_batch_size,
            shard_index=context.input_pipeline_id,
            shard_count=context.num_input_pipelines,
        )
        marked = min(_STEPS_THAT_BEGIN_AN_EPOCH, self._steps_per_epoch) * local_replicas - 1

        def start_epoch() -> tuple[RowNumbers, RowNumbers]:
            # The only Python of the pass besides the mark: the whole epoch in one call.
            epoch = cursor.first_not_begun
            marks = np.full([elements], _NO_MARK, np.int64)
            marks[marked] = epoch
            return marks, self._steps(epoch)[:, part].reshape(elements, rows)  # [element, row]

        def epoch_elements(_: tf.Tensor) -> tf.data.Dataset:
            marks, numbers = tf.numpy_function(start_epoch, [], [tf.int64, tf.int64])
            marks.set_shape([elements])
            numbers.set_shape([elements, rows])
            return tf.data.Dataset.from_tensor_slices((marks, numbers))

        def read(mark: tf.Tensor, numbers: tf.Tensor) -> tuple[tf.Tensor, Any]:
            return mark, apply_map(self._map_fn, self._source.gather(numbers))

        dataset = (
            tf.data.Dataset.range(1)
            .flat_map(epoch_elements)
            .apply(tf.data.experimental.assert_cardinality(elements))
            .map(read, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
            .prefetch(tf.data.AUTOTUNE)
            .map(_deliver_with(cursor))
            .with_options(pipeline_options())
        )
        _check_rows(dataset.element_spec, rows)
        return dataset


def _deliver_with(cursor: EpochCursor) -> Callable[[tf.Tensor, Any], Any]:
    """The last stage of the pipeline: tells the cursor of the one marked batch of a pass."""

    def mark_begun(epoch: np.int64) -> np.int64:
        cursor.mark_begun(int(epoch))
        return epoch

    def deliver(mark: tf.Tensor, batch: Any) -> Any:
        # No Python for the other batches.
        marked = tf.cond(
            tf.equal(mark, _NO_MARK),
            lambda: mark,
            lambda: tf.numpy_function(mark_begun, [mark], tf.int64),
        )
        with tf.control_dependencies([marked]):
            return tf.nest.map_structure(tf.identity, batch)

    return deliver


def _check_rows(element_spec: Any, rows: int) -> None:
    for spec in tf.nest.flatten(element_spec):
        if spec.shape.rank is None or spec.shape.rank == 0 or spec.shape[0] != rows:
            raise ConfigurationError(
                f"map_fn must keep the batch dimension static and equal to the {rows} rows it is "
                f"given, but returns {spec}; where TensorFlow cannot tell, use tf.ensure_shape."
            )
