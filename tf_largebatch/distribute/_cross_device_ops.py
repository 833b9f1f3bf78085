"""TensorFlow's collective ops with instance keys fixed at trace time and results in rank order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.distribute._journal import CollectiveJournal, PlansByGraph
from tf_largebatch.distribute._tf_internals import (
    CollectiveAllReduce,
    CollectiveReplicaLauncher,
    ReduceOp,
    in_xla_context,
)


class ReplicaLauncher(CollectiveReplicaLauncher):
    """Launches the collectives of one replica.

    Args:
        journal: notes what is traced and reached.
        global_devices: the names of all devices of the group, in rank order.
        is_first: whether this is the first replica of the worker: one of them is enough to note
            where the worker stands.
        Others: as the base class.
    """

    def __init__(
        self,
        *args: Any,
        journal: CollectiveJournal,
        global_devices: Sequence[str],
        is_first: bool,
    ) -> None:
        super().__init__(*args)
        self._journal = journal
        self._plans = PlansByGraph(journal)
        self._is_first = is_first
        self._traced_key: int | None = None
        # TensorFlow orders the members of a group by device name, as text, so that task 10 comes
        # before task 2, and gathers in that order.
        by_name = sorted(global_devices)
        self._place_of_rank = [by_name.index(device) for device in global_devices]

    def all_reduce(self, input_tensor: Any, control_input: Any = None, options: Any = None) -> Any:
        if self._group_size == 1:
            return tf.identity(input_tensor)
        with self._noted("all_reduce", input_tensor):
            return super().all_reduce(input_tensor, control_input, options)

    def batch_all_reduce(self, input_tensor_packs: Any, options: Any = None) -> list[Any]:
        """All-reduces each pack as one flat tensor a dtype (the base class mixes dtypes)."""
        if tf.executing_eagerly() or not all(
            tensor.shape.is_fully_defined() for pack in input_tensor_packs for tensor in pack
        ):
            return list(super().batch_all_reduce(input_tensor_packs, options))
        outputs: list[Any] = []
        for pack in input_tensor_packs:
            reduced: dict[int, Any] = {}
            for dtype in dict.fromkeys(tensor.dtype for tensor in pack):
                places = [place for place, tensor in enumerate(pack) if tensor.dtype == dtype]
                results = self._all_reduce_flat([pack[place] for place in places], options)
                reduced.update(zip(places, results, strict=True))
            outputs += [reduced[place] for place in range(len(pack))]
        return outputs

    def _all_reduce_flat(self, tensors: list[Any], options: Any) -> list[Any]:
        if len(tensors) == 1:
            return [self.all_reduce(tensors[0], None, options)]
        with tf.device(self._device):
            flat = tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], axis=0)
            reduced = self.all_reduce(flat, None, options)
            parts = tf.split(reduced, [tensor.shape.num_elements() for tensor in tensors])
            return [
                tf.reshape(part, tensor.shape) for part, tensor in zip(parts, tensors, strict=True)
            ]

    def all_reduce_indexed_slices(self, input_slices: Any, options: Any = None) -> Any:
        """Gathers the rows of all replicas.

        The base class first agrees on the number of rows and gathers in a branch, which no loop
        can hold. With a static number of rows, as in training, nothing is to be agreed on.
        """
        shape = input_slices.values.shape
        if tf.executing_eagerly() or not shape.is_fully_defined():
            return super().all_reduce_indexed_slices(input_slices, options)
        options = self._options.merge(options)
        return tf.IndexedSlices(
            values=self._all_gather(input_slices.values, options),
            indices=self._all_gather(tf.ensure_shape(input_slices.indices, shape[:1]), options),
            dense_shape=input_slices.dense_shape,
        )

    def gather_equal_shapes(self, value: Any) -> Any:
        """`[n, ...]` of each replica, of one static shape everywhere, to `[replicas * n, ...]`."""
        return self._all_gather(value, None)

    def _all_gather(self, input_tensor: Any, options: Any) -> Any:
        with self._noted("all_gather", input_tensor):
            gathered = super()._all_gather(input_tensor, options)
        if self._place_of_rank == list(range(self._group_size)):
            return gathered
        with tf.device(self._device):
            shape = tf.shape(input_tensor)
            by_name = tf.reshape(gathered, tf.concat([[self._group_size], shape], axis=0))
            by_rank = tf.gather(by_name, self._place_of_rank)  # [rank, n, ...]
            flat = tf.reshape(by_rank, tf.concat([[self._group_size * shape[0]], shape[1:]], 0))
        return tf.ensure_shape(flat, gathered.shape)

    @contextlib.contextmanager
    def _noted(self, kind: str, tensor: Any) -> Iterator[None]:
        """Notes one collective, and chooses its key if it is traced with a static shape.

        A key is tied to a shape. Where the shape may differ from call to call, as in `predict`
        with a partial last batch, the base class takes a fresh key each call.
        """
        tensor = tf.convert_to_tensor(tensor)
        record = f"{kind} {tensor.dtype.name}{tensor.shape} over {self._group_size}"
        if tf.executing_eagerly():
            if self._is_first:
                self._journal.arrive(record)
            yield
            return
        if in_xla_context():
            raise ConfigurationError(
                "jit_compile=True puts a collective into a computation compiled by XLA, which "
                "cannot run TensorFlow's cross-worker collectives on this device. Compile the "
                "model with jit_compile=False (or leave 'auto')."
            )
        plan, is_new = self._plans.add(record)
        if tensor.shape.is_fully_defined():
            self._traced_key = self._journal.key_of(plan)
        arrived = [self._journal.arrive_in_graph(plan)] if is_new and self._is_first else []
        with tf.control_dependencies(arrived):
            yield

    def _next_instance_key(self) -> Any:
        key, self._traced_key = self._traced_key, None
        return super()._next_instance_key() if key is None else key


class LargeBatchAllReduce(CollectiveAllReduce):
    """Cross-device ops over `ReplicaLauncher`; arguments as those two."""

    def __init__(
        self,
        *,
        devices: Sequence[str],
        group_size: int,
        options: Any,
        collective_keys: Any,
        journal: CollectiveJournal,
        global_devices: Sequence[str],
    ) -> None:
        super().__init__(devices, group_size, options, collective_keys)
        self._launchers = [
            ReplicaLauncher(
                collective_keys.get_group_key(self._devices),
                group_size,
                collective_keys,
                device,
                options,
                journal=journal,
                global_devices=global_devices,
                is_first=index == 0,
            )
            for index, device in enumerate(self._devices)
        ]

    def _all_reduce(self, reduce_op: Any, value: Any, replica_id: int, options: Any) -> Any:
        """Reduces a structure of one replica's values: the dense ones together, then the sparse."""
        launcher = self._launchers[replica_id]
        leaves = tf.nest.flatten(value)
        # Backward makes the last layer's gradients first.
        dense = [leaf for leaf in leaves if not isinstance(leaf, tf.IndexedSlices)][::-1]
        reduced = iter(launcher.batch_all_reduce([dense], options)[::-1] if dense else ())
        results = [
            launcher.all_reduce_indexed_slices(leaf, options)
            if isinstance(leaf, tf.IndexedSlices)
            else next(reduced)
            for leaf in leaves
        ]
        if reduce_op == ReduceOp.MEAN:
            with tf.device(self._devices[replica_id]):
                results = [_divided(result, self._group_size) for result in results]
        return tf.nest.pack_sequence_as(value, results)

    def gather_equal_shapes(self, value: Any) -> Any:
        """`ReplicaLauncher.gather_equal_shapes` of the first replica; for one device a worker."""
        return self._launchers[0].gather_equal_shapes(value)


def _divided(value: Any, count: int) -> Any:
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(value.values / count, value.indices, value.dense_shape)
    return value / count
