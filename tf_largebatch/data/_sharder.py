"""One shuffle of the whole data set an epoch, divided among the workers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import tensorflow as tf

from tf_largebatch.core.epoch_order import (
    Remainder,
    RowNumbers,
    check_divides,
    checked_integer,
)
from tf_largebatch.core.epoch_rows import EpochRows
from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.data._epoch_cursor import EpochCursor
from tf_largebatch.data._passes import deliver_with, pass_numbers
from tf_largebatch.data._pipeline import (
    MapFn,
    check_source_and_maps,
    distribute_steps,
    name_data,
    pipeline_options,
    read_batches,
)
from tf_largebatch.data._sharder_state import position_in, state_of
from tf_largebatch.data._sources import RandomAccessSource
from tf_largebatch.data._training_position import TrainingPosition, keep_position


class GlobalShuffleSharder:
    """A true permutation of all rows each epoch, of which every worker reads its part.

    "One random shuffle of the whole training set per epoch, divided among the k workers" (Goyal
    et al. 2017). The order depends on `(seed, epoch)` alone (`core.epoch_permutation`), a step
    holds `order[step * B : (step + 1) * B]`, and shard `i` of `k` owns the contiguous `i`-th part
    of it: at an equal global batch size `B` a step holds the same rows on any number of workers.

    Rows are read when their turn comes; there is no shuffle buffer, and the memory for the order
    grows with the square root of the number of rows.

    Args:
        source: rows by number, such as an `ArraySource`.
        global_batch_size: rows of a step over all replicas of all workers.
        seed: 0 to 2**64 - 1, the same on all workers.
        row_fn: applied to single rows before they are made batches: `row_fn(seed, *row)` where
            the source's structure is a tuple, else `row_fn(seed, row)`; decoding and augmentation,
            such as `RandomResizedCrop()`. Traced once, run by a parallel `tf.data` map, order
            kept. `seed` is int64 `[2]` for `tf.random.stateless_*` and `tf.image.stateless_*`. It
            depends on `(seed, epoch, row)` alone, so that a row becomes the same on any number of
            workers and threads, and after resume; `seed[1]` is the row's number. All rows must
            come out in the same shape.
        map_fn: applied to whole batches (`map_fn(*batch)` or `map_fn(batch)`) in the same way. It
            sees one replica's rows, `[rows, ...]`, and must keep their number static.
        remainder: `"drop"` leaves the last `len(source) % B` rows of each epoch's order out
            (others each epoch); `"wrap"` fills the last step with the first rows of the order.
        accumulation_steps: a, of an optimizer with `gradient_accumulation_steps=a`. A step is one
            batch still, of `recipe.global_batch_size // a` rows, and an epoch is whole updates:
            `steps_per_epoch` is a multiple of a, and `remainder` is of `a * B` rows.

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
        row_fn: MapFn | None = None,
        map_fn: MapFn | None = None,
        remainder: Remainder = "drop",
        accumulation_steps: int = 1,
    ) -> None:
        check_source_and_maps(source, row_fn, map_fn)
        self._source = source
        self._row_fn = row_fn
        self._map_fn = map_fn
        self._epoch_rows = EpochRows(
            len(source),
            global_batch_size=global_batch_size,
            seed=seed,
            remainder=remainder,
            accumulation_steps=accumulation_steps,
        )

    @property
    def global_batch_size(self) -> int:
        """Rows of a step over all replicas."""
        return self._epoch_rows.global_batch_size

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch, the same on every worker."""
        return self._epoch_rows.steps_per_epoch

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
        return self._epoch_rows.rows(
            epoch, step, step + 1, shard_index=shard_index, shard_count=shard_count
        )[0]

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
        cursor = EpochCursor(checked_integer(initial_epoch, "initial_epoch", minimum=0))
        dataset = self._distributed(strategy, cursor, steps=self.steps_per_epoch)
        return keep_position(dataset, TrainingPosition(self, cursor))

    def state(self, *, epoch: int, step: int) -> dict[str, Any]:
        """A position before step `step` of an epoch, as a small dict of numbers and texts for JSON.

        Behind the last step it is the beginning of the next epoch.

        It names what it belongs to: rows and fingerprint of the source, seed, global batch size
        and remainder rule. It does not name the number of workers, as a step holds the same rows
        on any.

        Raises:
            ConfigurationError: `epoch` or `step` out of range.
        """
        step = checked_integer(step, "step", minimum=0, maximum=self.steps_per_epoch)
        epoch = checked_integer(epoch, "epoch", minimum=0)
        if step == self.steps_per_epoch:
            epoch, step = epoch + 1, 0
        return {"epoch": epoch, "step": step, **self.identity}

    def rest_of_epoch(
        self, state: Mapping[str, Any], strategy: tf.distribute.Strategy | None = None
    ) -> Any:
        """The data set of an epoch's steps from a saved position on, which is found at once.

        Every pass over it is the same rest of that epoch. To go on where a run was broken off:

            position = json.loads(text)  # of sharder.state(epoch=3, step=120)
            model.fit(sharder.rest_of_epoch(position, strategy), initial_epoch=3, epochs=4)
            model.fit(sharder.train_dataset(strategy, initial_epoch=4), initial_epoch=4, epochs=90)

        Args:
            state: of `state()` of a sharder with the same source, seed, global batch size and
                remainder rule; the number of workers may differ.
            strategy: as in `train_dataset`.

        Raises:
            ConfigurationError: the state is none, is of another version, or belongs to another
                data set or to other settings; both sides are shown. Also as `train_dataset`.
        """
        epoch, step = position_in(state, self.identity, steps_per_epoch=self.steps_per_epoch)
        cursor = EpochCursor(epoch, first_step=step, advances=False)
        return self._distributed(strategy, cursor, steps=self.steps_per_epoch - step)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What a position belongs to: rows and fingerprint of the source, and the settings."""
        # Kept, as it may take a while: the fingerprint of a folder goes through all paths.
        return state_of(self._source, self._epoch_rows)

    def _distributed(
        self, strategy: tf.distribute.Strategy | None, cursor: EpochCursor, *, steps: int
    ) -> Any:
        if strategy is None:
            return self._shard_dataset(cursor, steps, tf.distribute.InputContext())
        check_divides(
            self.global_batch_size, parts=strategy.num_replicas_in_sync, parts_name="replicas"
        )
        return distribute_steps(
            strategy,
            lambda context: self._shard_dataset(cursor, steps, context),
            steps=steps,
        )

    def _shard_dataset(
        self, cursor: EpochCursor, steps: int, context: tf.distribute.InputContext
    ) -> tf.data.Dataset:
        """One worker's part of a pass: `local replicas` batches a step, a replica's each."""
        local_replicas = context.num_replicas_in_sync // context.num_input_pipelines
        rows = self.global_batch_size // context.num_replicas_in_sync
        batches = read_batches(
            pass_numbers(self._epoch_rows, cursor, context, batch_size=rows),
            self._source,
            row_fn=self._row_fn,
            map_fn=self._map_fn,
            batch_rows=lambda single_rows: single_rows.batch(rows, drop_remainder=True),
        )
        dataset = (
            # A pass whose beginning was sought is shorter, and must not be read to its end.
            batches.apply(tf.data.experimental.assert_cardinality(steps * local_replicas))
            .map(deliver_with(cursor))
            .with_options(pipeline_options())
        )
        _check_rows(dataset.element_spec, rows)
        if context.num_input_pipelines > 1:
            name_data(dataset, self.identity)
        return dataset


def _check_rows(element_spec: Any, rows: int) -> None:
    for spec in tf.nest.flatten(element_spec):
        if spec.shape.rank is None or spec.shape.rank == 0 or spec.shape[0] != rows:
            raise ConfigurationError(
                f"map_fn must keep the batch dimension static and equal to the {rows} rows it is "
                f"given, but returns {spec}; where TensorFlow cannot tell, use tf.ensure_shape."
            )
