"""Distributed data sets: no collective a step where none is needed, and none that can hang.

TensorFlow lets all workers agree, each step, whether anyone still has a batch, unless a data set
is infinite. Here the workers agree once, when the data set is made: if all of them hold the same
number of steps, that is settled. Only where the number is unknown, or differs, do they go on to
agree each step; and if then some have a batch and some have none, that is an error that says who,
where TensorFlow would feed empty batches to the late ones, whose mean loss is not a number.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.distribute._tf_internals import PerReplica, input_lib

INFINITE: int = tf.data.INFINITE_CARDINALITY
UNKNOWN: int = tf.data.UNKNOWN_CARDINALITY


_open_iterators: weakref.WeakSet[ReplicaBatchesIterator] = weakref.WeakSet()


@atexit.register
def _close_iterators() -> None:
    """Ends the pipelines' threads while Python still runs.

    A pipeline with Python in it (`tf.numpy_function`, `from_generator`) that is freed while the
    interpreter shuts down waits for a thread that will never be given the interpreter again.
    """
    for iterator in list(_open_iterators):
        iterator._iterators = []


class InputBatch(PerReplica):  # type: ignore[misc]
    """A batch as it came from an iterator: rows, which no reduction over replicas applies to."""


class ReplicaBatchesDataset(input_lib.DistributedDataset):  # type: ignore[misc]
    """One worker's part of a data set: one element a step for each local replica, in turn.

    Args:
        strategy: a `LargeBatchStrategy`.
        dataset: this worker's `tf.data.Dataset`.
        steps: its number of steps (elements over local replicas), or a `tf.data` constant.
        agreed: whether all workers are known to hold the same number of steps.
        input_workers, options: as the base class.
    """

    def __init__(
        self,
        *,
        input_workers: Any,
        strategy: Any,
        dataset: tf.data.Dataset,
        steps: int,
        agreed: bool,
        options: Any,
    ) -> None:
        super().__init__(
            input_workers,
            strategy,
            components=[dataset],
            element_spec=input_lib._create_distributed_tensor_spec(strategy, dataset.element_spec),
            enable_get_next_as_optional=not agreed,
            options=options,
        )
        self._cardinality = np.int64(steps)

    def __iter__(self) -> ReplicaBatchesIterator:
        with tf.device(self._input_workers.worker_devices[0]):
            host_iterator = iter(self._cloned_datasets[0])
        iterator = ReplicaBatchesIterator(
            input_workers=self._input_workers,
            iterators=[host_iterator],
            strategy=self._strategy,
            cardinality=self._cardinality,
            enable_get_next_as_optional=self._enable_get_next_as_optional,
            options=self._options,
        )
        iterator._element_spec = self._element_spec
        _open_iterators.add(iterator)
        return iterator

    @property
    def element_spec(self) -> Any:
        return self._element_spec

    def map(self, map_func: Callable[..., Any], **options: Any) -> ReplicaBatchesDataset:
        """As `tf.data.Dataset.map`, on each replica's batch; Keras' `class_weight` uses it."""
        return self._derived(self._cloned_datasets[0].map(map_func, **options))

    def prefetch(self, buffer_size: int) -> ReplicaBatchesDataset:
        """This data set as it is: reading ahead belongs into the worker's own pipeline.

        Keras calls it after `map`. Reading ahead behind the stage that counts the steps delivered
        would make `GlobalShuffleSharder` take steps for used that are not.
        """
        del buffer_size
        return self

    def _derived(self, dataset: tf.data.Dataset) -> ReplicaBatchesDataset:
        derived = ReplicaBatchesDataset(
            input_workers=self._input_workers,
            strategy=self._strategy,
            dataset=dataset,
            steps=int(self._cardinality),
            agreed=not self._enable_get_next_as_optional,
            options=self._options,
        )
        # What others have noted on this one, as where it stands in its epochs, is true of it too.
        for name, value in vars(self).items():
            vars(derived).setdefault(name, value)
        return derived


class _ReplicaBatchesIteratorSpec(input_lib.DistributedIteratorSpec):  # type: ignore[misc]
    """Lets `tf.function` take a `ReplicaBatchesIterator` apart and make one again inside."""

    @property
    def value_type(self) -> type:
        return ReplicaBatchesIterator

    @property
    def _component_specs(self) -> list[Any]:
        return [
            tf.data.IteratorSpec(
                tf.nest.map_structure(
                    lambda spec: input_lib._replace_per_replica_spec(spec, 0), self._element_spec
                )
            )
        ]

    def _from_components(self, components: Any) -> ReplicaBatchesIterator:
        return ReplicaBatchesIterator(
            input_workers=self._input_workers,
            components=components,
            element_spec=self._element_spec,
            strategy=self._strategy,
            cardinality=self._cardinality,
            enable_get_next_as_optional=self._enable_get_next_as_optional,
            options=self._options,
        )


class ReplicaBatchesIterator(input_lib.DistributedIterator):  # type: ignore[misc]
    """The iterator of `ReplicaBatchesDataset`: a plain one on the host, read once a replica.

    TensorFlow's multi-device iterator reads ahead by itself, so that nobody knows which rows were
    used when a run stops; without its buffer it was seen to hang when it is made anew. The data
    set's own prefetch keeps batches ready.
    """

    @property
    def _type_spec(self) -> _ReplicaBatchesIteratorSpec:
        return _ReplicaBatchesIteratorSpec(
            self._input_workers,
            self._element_spec,
            self._strategy,
            self._options,
            self._cardinality,
            self._enable_get_next_as_optional,
        )

    @property
    def element_spec(self) -> Any:
        return self._element_spec

    def get_next(self, name: str | None = None) -> Any:
        """The next step's batches, of this worker's replicas.

        Raises:
            tf.errors.OutOfRangeError: all workers are at the end.
            tf.errors.InvalidArgumentError: some workers are, others are not.
        """
        if tf.distribute.get_replica_context() is not None and tf.distribute.has_strategy():
            raise ConfigurationError(
                "next(iterator) was called inside of strategy.run; call it outside, and hand the "
                "batch in: strategy.run(step, args=(next(iterator),))."
            )
        if not self._enable_get_next_as_optional:
            batch = self._next_batch()
        else:
            optionals = self._local_optionals()
            batch = tf.cond(
                self._all_have_a_batch(optionals),
                lambda: self._batch_of(optionals),
                self._next_batch,  # raises: the data set is at its end
            )
        if tf.executing_eagerly():
            return tf.nest.map_structure(
                lambda leaf: InputBatch(leaf.values) if isinstance(leaf, PerReplica) else leaf,
                batch,
            )
        return batch

    def get_next_as_optional(self) -> tf.experimental.Optional:
        """The same, with an empty optional at the end instead of an error."""
        if self._cardinality == INFINITE:
            return tf.experimental.Optional.from_value(self._next_batch())
        optionals = self._local_optionals()
        if self._enable_get_next_as_optional:
            has_batch = self._all_have_a_batch(optionals)
        else:
            has_batch = optionals[-1].has_value()
        return tf.cond(
            has_batch,
            lambda: tf.experimental.Optional.from_value(self._batch_of(optionals)),
            lambda: tf.experimental.Optional.empty(self._element_spec),
        )

    @property
    def _local_replicas(self) -> int:
        return len(self._input_workers.compute_devices_for_worker(0))

    def _next_batch(self) -> Any:
        with tf.device(self._input_workers.worker_devices[0]):
            batches = [self._iterators[0].get_next() for _ in range(self._local_replicas)]
        return input_lib._create_per_replica(batches, self._strategy)

    def _local_optionals(self) -> list[tf.experimental.Optional]:
        with tf.device(self._input_workers.worker_devices[0]):
            return [self._iterators[0].get_next_as_optional() for _ in range(self._local_replicas)]

    def _batch_of(self, optionals: list[tf.experimental.Optional]) -> Any:
        return input_lib._create_per_replica(
            [optional.get_value() for optional in optionals], self._strategy
        )

    def _all_have_a_batch(self, optionals: list[tf.experimental.Optional]) -> tf.Tensor:
        """Whether every replica of every worker has one; an error if only some have."""
        with tf.device(self._input_workers.worker_devices[0]):
            counts = tf.stack([tf.cast(each.has_value(), tf.int32) for each in optionals])
            by_rank = self._strategy.extended.gather_from_workers(
                tf.reduce_sum(counts)[None], purpose="check for another batch"
            )
            agree = tf.reduce_all(by_rank == 0) | tf.reduce_all(by_rank == len(optionals))
            check = tf.debugging.Assert(
                agree,
                [
                    "Workers' data sets end at different steps; batches that are left for the next "
                    "step, by worker rank:",
                    by_rank,
                    "Give all workers the same number of batches: GlobalShuffleSharder and "
                    "evaluation_dataset do, or repeat() the data set and give steps_per_epoch.",
                ],
                summarize=-1,
            )
            with tf.control_dependencies([] if check is None else [check]):
                return tf.reduce_all(by_rank > 0)


def steps_of(dataset: tf.data.Dataset, *, local_replicas: int) -> int:
    """The number of steps of a worker's data set, or a negative `tf.data` constant."""
    elements = int(dataset.cardinality().numpy())
    if elements < 0:
        return elements
    return elements // local_replicas if elements % local_replicas == 0 else UNKNOWN


def identity_of(dataset: Any) -> Any:
    """What the data set's maker says that it is, numbers and texts by name; None if nothing.

    `GlobalShuffleSharder` and `evaluation_dataset` say it in an attribute.
    """
    return getattr(dataset, "tf_largebatch_identity", None)
