"""Reduces and gathers values over all replicas: buckets, each by the algorithm chosen for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_largebatch.core.buckets import assign_buckets
from tf_largebatch.core.collective_plan import AllReducePlan
from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.distribute._exchange import EXCHANGED_DTYPES
from tf_largebatch.distribute._journal import CollectiveJournal
from tf_largebatch.distribute._mpi_reducer import MpiReducer, layout_of
from tf_largebatch.distribute._options import AllReduceOptions
from tf_largebatch.distribute._replica_launcher import ReplicaLauncher
from tf_largebatch.distribute._selection import AlgorithmSelector
from tf_largebatch.distribute._tf_internals import CollectiveAllReduce, ReduceOp

# Smaller buckets travel as they are: their bytes cost next to nothing, and metrics, batch-norm
# sums and the like keep their precision.
_SMALLEST_ROUNDED_BYTES = 4 * 2**10


class LargeBatchAllReduce(CollectiveAllReduce):
    """Cross-device ops of a strategy.

    Args:
        devices: this worker's.
        group_size: the number of all workers' devices.
        options: the strategy's.
        collective_keys: TensorFlow's.
        journal: notes what is traced and reached.
        global_devices: the names of all devices, in rank order.
        first_member: the number of this worker's first device among them.
        selector: chooses algorithms; None means TensorFlow's own, always.
        mpi: sums by MPI; None where there is none.
    """

    def __init__(
        self,
        *,
        devices: Sequence[str],
        group_size: int,
        options: AllReduceOptions,
        collective_keys: Any,
        journal: CollectiveJournal,
        global_devices: Sequence[str],
        first_member: int,
        selector: AlgorithmSelector | None,
        mpi: MpiReducer | None = None,
    ) -> None:
        super().__init__(devices, group_size, options, collective_keys)
        self._selector = selector
        self._mpi = mpi
        self._eager_functions: dict[Any, Callable[..., Any]] = {}
        self._launchers = [
            ReplicaLauncher(
                collective_keys.get_group_key(self._devices),
                group_size,
                collective_keys,
                device,
                options,
                journal=journal,
                global_devices=global_devices,
                member=first_member + index,
                is_first=index == 0,
            )
            for index, device in enumerate(self._devices)
        ]

    def _all_reduce(self, reduce_op: Any, value: Any, replica_id: int, options: Any) -> Any:
        """Reduces a structure of one replica's values: the dense ones in buckets, then the rest."""
        options = self._options.merge(options)
        leaves = tf.nest.flatten(value)
        # Backward makes the last layer's gradients first.
        dense = [leaf for leaf in leaves if not isinstance(leaf, tf.IndexedSlices)][::-1]
        reduced = iter(self._reduce_dense(dense, replica_id, options)[::-1])
        results = [
            self._reduce_slices(leaf, replica_id, options)
            if isinstance(leaf, tf.IndexedSlices)
            else next(reduced)
            for leaf in leaves
        ]
        if reduce_op == ReduceOp.MEAN:
            with tf.device(self._devices[replica_id]):
                results = [_divided(result, self._group_size) for result in results]
        return tf.nest.pack_sequence_as(value, results)

    def _reduce_slices(
        self, slices: tf.IndexedSlices, replica_id: int, options: AllReduceOptions
    ) -> tf.IndexedSlices:
        """The rows of all replicas."""
        if self._group_size == 1:
            return tf.IndexedSlices(
                tf.identity(slices.values), tf.identity(slices.indices), slices.dense_shape
            )
        launcher = self._launchers[replica_id]
        in_graph = slices.values.shape.is_fully_defined() and not tf.executing_eagerly()
        if not in_graph or not self._goes_by_mpi(slices.values.dtype, options):
            return launcher.all_reduce_indexed_slices(slices, options)
        indices = tf.ensure_shape(slices.indices, slices.values.shape[:1])
        values, indices = (
            self._mpi.gather(each, launcher=launcher, replica_id=replica_id)
            for each in (slices.values, indices)
        )
        return tf.IndexedSlices(values, indices, slices.dense_shape)

    def _reduce_dense(
        self, tensors: list[Any], replica_id: int, options: AllReduceOptions
    ) -> list[Any]:
        tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
        if self._group_size == 1:
            return [tf.identity(tensor) for tensor in tensors]
        if not all(tensor.shape.is_fully_defined() for tensor in tensors):
            packs = [[tensor] for tensor in tensors]
            return list(self._launchers[replica_id].batch_all_reduce(packs, options))
        if tf.executing_eagerly():
            return list(self._eager_function(replica_id, options)(tensors))
        return self._reduce_in_buckets(tensors, replica_id, options)

    def _eager_function(self, replica_id: int, options: AllReduceOptions) -> Callable[..., Any]:
        """The graph that reduces a replica's eager values, all at once."""
        key = (replica_id, *options.fields())
        if key not in self._eager_functions:
            self._eager_functions[key] = tf.function(
                lambda tensors: self._reduce_in_buckets(tensors, replica_id, options),
                autograph=False,
            )
        return self._eager_functions[key]

    def _reduce_in_buckets(
        self, tensors: list[tf.Tensor], replica_id: int, options: AllReduceOptions
    ) -> list[tf.Tensor]:
        """The sums of `tensors`, which are given in the order in which they come to exist.

        A bucket starts when its values exist and the bucket `max_buckets_in_flight` before it is
        done, on all workers in the same order (Goyal et al. 2017, section 4.1).
        """
        buckets = assign_buckets(
            [tensor.shape.num_elements() * tensor.dtype.size for tensor in tensors],
            [tensor.dtype for tensor in tensors],
            bucket_bytes=options.bucket_bytes,
        )
        at_once = min(len(buckets), options.max_buckets_in_flight)
        results: dict[int, tf.Tensor] = {}
        done: list[tf.Tensor] = []
        first_values: list[tf.Tensor] = []  # the first one of the bucket before
        for bucket in buckets:
            values = [tensors[place] for place in bucket]
            before = [done[-at_once]] if len(done) >= at_once else []
            if self._goes_by_mpi(values[0].dtype, options):
                sums, summed = self._reduce_by_mpi(
                    values, replica_id, options, at_once, before, is_last=bucket is buckets[-1]
                )
                results.update(zip(bucket, sums, strict=True))
                done.append(summed)
                continue
            # A bucket ahead of what they receive, so that nobody waits for a request to arrive.
            posted_after = [done[-at_once - 1]] if len(done) > at_once else []
            with tf.device(self._devices[replica_id]):
                flat = tf.concat([tf.reshape(value, [-1]) for value in values], axis=0)
                with tf.control_dependencies(before):
                    flat = tf.identity(flat)
                reduced = self._reduce_bucket(
                    flat,
                    replica_id,
                    options,
                    number=len(done),
                    at_once=at_once,
                    receive_after=posted_after + first_values,
                )
                parts = tf.split(reduced, [value.shape.num_elements() for value in values])
                results.update(
                    (place, tf.reshape(part, value.shape))
                    for place, part, value in zip(bucket, parts, values, strict=True)
                )
            done.append(reduced)
            first_values = values[:1]
        return [results[place] for place in range(len(tensors))]

    def _goes_by_mpi(self, dtype: tf.DType, options: AllReduceOptions) -> bool:
        transport = options.transport or self._options.transport
        if transport != "mpi" or self._selector is None or options.algorithm == "tensorflow":
            return False
        if self._mpi is None:
            raise ConfigurationError(
                "AllReduceOptions(transport='mpi') is for a LargeBatchStrategy(transport='mpi') "
                "of several workers; this one has no MPI."
            )
        return dtype in EXCHANGED_DTYPES

    def _reduce_by_mpi(
        self,
        values: list[tf.Tensor],
        replica_id: int,
        options: AllReduceOptions,
        at_once: int,
        before: Sequence[tf.Tensor],
        *,
        is_last: bool,
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        assert self._mpi is not None
        layout = layout_of(values)
        if layout.size == 0:
            return [tf.identity(value) for value in values], values[0]
        wire_dtype = _wire_dtype(values[0].dtype, layout.size * layout.dtype.itemsize, options)
        plan = self._mpi.selector.plan(
            options.algorithm,
            length=layout.size,
            item_bytes=layout.dtype.itemsize if wire_dtype is None else wire_dtype.size,
            at_once=at_once,
            sums_wider_than_wire=wire_dtype is not None,
        )
        return self._mpi.sum(
            values,
            launcher=self._launchers[replica_id],
            replica_id=replica_id,
            plan=plan,
            wire_dtype=wire_dtype,
            after=before,
            is_last=is_last,
        )

    def _reduce_bucket(
        self,
        flat: tf.Tensor,
        replica_id: int,
        options: AllReduceOptions,
        *,
        number: int,
        at_once: int,
        receive_after: Sequence[tf.Tensor],
    ) -> tf.Tensor:
        launcher = self._launchers[replica_id]
        wire_dtype = _wire_dtype(flat.dtype, flat.shape[0] * flat.dtype.size, options)
        if wire_dtype is not None and launcher.has_nccl:
            raise ConfigurationError(
                f"wire_dtype={wire_dtype.name!r} is for CPU clusters: NCCL would also add in it. "
                "Leave it out on GPUs."
            )
        if flat.shape[0] == 0:
            return flat
        plan = None
        if self._selector is not None and flat.dtype in EXCHANGED_DTYPES:
            plan = self._selector.plan(
                options.algorithm,
                length=flat.shape[0],
                item_bytes=(wire_dtype or flat.dtype).size,
                at_once=at_once,
                sums_wider_than_wire=wire_dtype is not None,
            )
        if plan is None:
            return launcher.all_reduce_bucket(flat, options, number=number)
        return launcher.all_reduce_by_plan(
            plan, flat, wire_dtype=wire_dtype, receive_after=receive_after
        )

    def trial(self, plan: AllReducePlan | None, *, length: int) -> Callable[[], Any]:
        """A function that reduces `[length]` float32 once, on all of this worker's replicas.

        Args:
            plan: how; None means TensorFlow's own all-reduce.
            length: elements.
        """

        def reduce_on(launcher: ReplicaLauncher) -> tf.Tensor:
            flat = tf.zeros([length])
            if self._mpi is not None and length > 0:
                return self._mpi.sum(
                    [flat],
                    launcher=launcher,
                    replica_id=self._launchers.index(launcher),
                    plan=plan,
                    wire_dtype=None,
                    after=(),
                    is_last=True,
                )[1]
            if plan is None:
                return launcher.all_reduce(flat, None, self._options)
            if length == 0:
                return flat
            return launcher.all_reduce_by_plan(plan, flat, wire_dtype=None, receive_after=())

        @tf.function(autograph=False)
        def reduce() -> list[tf.Tensor]:
            return [reduce_on(launcher) for launcher in self._launchers]

        return reduce

    def gather_equal_shapes(self, value: Any, *, purpose: str, detail: str = "") -> Any:
        """`ReplicaLauncher.gather_equal_shapes` of the first replica; for one device a worker."""
        return self._launchers[0].gather_equal_shapes(value, purpose=purpose, detail=detail)


def _wire_dtype(dtype: tf.DType, size_bytes: int, options: AllReduceOptions) -> tf.DType | None:
    """The dtype in which a bucket travels, where it is another than its own."""
    is_wider = options.wire_dtype is not None and dtype in (tf.float32, tf.float64)
    return options.wire_dtype if is_wider and size_bytes >= _SMALLEST_ROUNDED_BYTES else None


def _divided(value: Any, count: int) -> Any:
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(value.values / count, value.indices, value.dense_shape)
    return value / count
