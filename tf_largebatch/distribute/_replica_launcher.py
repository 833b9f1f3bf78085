"""TensorFlow's collective ops with instance keys fixed at trace time and results in rank order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_largebatch.core.collective_plan import AllReducePlan
from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.distribute._exchange import BroadcastExchange
from tf_largebatch.distribute._group_exchange import NcclGroups, run_plan_in_groups
from tf_largebatch.distribute._journal import CollectiveJournal, PlansByGraph
from tf_largebatch.distribute._plan_runner import run_plan
from tf_largebatch.distribute._tf_internals import CollectiveReplicaLauncher, in_xla_context


class ReplicaLauncher(CollectiveReplicaLauncher):
    """Launches the collectives of one replica.

    Args:
        journal: notes what is traced and reached.
        global_devices: the names of all devices of the group, in rank order.
        member: this replica's number among all of the group.
        is_first: whether this is the first replica of the worker: one of them is enough to note
            where the worker stands.
        Others: as the base class.
    """

    def __init__(
        self,
        *args: Any,
        journal: CollectiveJournal,
        global_devices: Sequence[str],
        member: int,
        is_first: bool,
    ) -> None:
        super().__init__(*args)
        self._journal = journal
        self._plans = PlansByGraph(journal)
        self._member = member
        self._is_first = is_first
        self._exchange = BroadcastExchange(
            member=member, group_size=len(global_devices), device=self._device
        )
        self._groups = NcclGroups(
            global_devices, member=member, ordering_token=self._ordering_token.handle
        )
        # TensorFlow runs the collectives of a token one after the other, as NCCL needs. Others may
        # travel side by side, each with the token of its place among them.
        self._tokens = [self._ordering_token]
        self._place = 0
        if not self.has_nccl:
            with tf.init_scope(), tf.device(self._device):
                more = range(1, self._options.max_buckets_in_flight)
                self._tokens += [tf.Variable(0.0, trainable=False) for _ in more]
        self._chosen_key: int | None = None
        # TensorFlow orders the members of a group by device name, as text, so that task 10 comes
        # before task 2, and gathers in that order.
        by_name = sorted(global_devices)
        self._place_of_rank = [by_name.index(device) for device in global_devices]

    @property
    def has_nccl(self) -> bool:
        """Whether this replica's collectives are NCCL's."""
        return tf.DeviceSpec.from_string(self._device).device_type == "GPU"

    def all_reduce(self, input_tensor: Any, control_input: Any = None, options: Any = None) -> Any:
        if self._group_size == 1:
            return tf.identity(input_tensor)
        with self._noted("all_reduce", input_tensor):
            return super().all_reduce(input_tensor, control_input, options)

    def all_reduce_bucket(self, flat: tf.Tensor, options: Any, *, number: int) -> tf.Tensor:
        """TensorFlow's own all-reduce, for bucket `number` of a step; waits for no other bucket."""
        self._place = number % len(self._tokens)
        try:
            return self.all_reduce(flat, None, options)
        finally:
            self._place = 0

    def _get_ordering_token(self) -> Any:
        return self._tokens[self._place].handle

    def all_reduce_by_plan(
        self,
        plan: AllReducePlan,
        flat: tf.Tensor,
        *,
        wire_dtype: tf.DType | None,
        receive_after: Sequence[Any],
    ) -> tf.Tensor:
        """`flat`, `[plan.length]`, summed over all replicas; in a graph."""
        kind = f"{plan.algorithm} in {plan.num_steps} steps"
        kind += "" if wire_dtype is None else f" as {wire_dtype.name}"
        with self._noted(kind, flat, keys=plan.num_steps):
            flat = tf.identity(flat)
        assert self._chosen_key is not None
        first_key, self._chosen_key = self._chosen_key, None
        with tf.device(self._device):
            if self.has_nccl:
                return run_plan_in_groups(
                    plan,
                    flat,
                    member=self._member,
                    groups=self._groups,
                    first_instance_key=first_key,
                )
            return run_plan(
                plan,
                flat,
                member=self._member,
                exchange=self._exchange,
                first_instance_key=first_key,
                wire_dtype=wire_dtype,
                receive_after=receive_after,
            )

    @contextlib.contextmanager
    def by_mpi(self, kind: str, value: tf.Tensor) -> Iterator[tuple[int, str]]:
        """Notes an all-reduce that MPI does, in a graph; its key, and what all ranks call it."""
        with self._noted(kind, value):
            key, self._chosen_key = self._chosen_key, None
            assert key is not None
            yield key, f"{kind} {value.dtype.name}{value.shape}"

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

    def gather_equal_shapes(self, value: Any, *, purpose: str, detail: str = "") -> Any:
        """`[n, ...]` of each replica, of one static shape everywhere, to `[replicas * n, ...]`."""
        return self._all_gather(value, None, purpose=purpose, detail=detail)

    def _all_gather(
        self, input_tensor: Any, options: Any, *, purpose: str = "all_gather", detail: str = ""
    ) -> Any:
        with self._noted(purpose, input_tensor, detail=detail):
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
    def _noted(self, kind: str, tensor: Any, *, keys: int = 1, detail: str = "") -> Iterator[None]:
        """Notes one collective, and chooses its keys if its shape is static.

        A key is tied to a shape. Where the shape may differ from call to call of a graph, as in
        `predict` with a partial last batch, the base class takes a fresh key each call.
        """
        tensor = tf.convert_to_tensor(tensor)
        record = f"{kind} {tensor.dtype.name}{tensor.shape} over {self._group_size}"
        if tf.executing_eagerly():
            if self._is_first:
                self._journal.arrive(record, detail)
            self._chosen_key = self._journal.eager_key(record)
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
            self._chosen_key = self._journal.key_of(plan, count=keys)
        note = is_new and self._is_first
        arrived = [self._journal.arrive_in_graph(plan, tensor)] if note else []
        with tf.control_dependencies(arrived):
            yield

    def _next_instance_key(self) -> Any:
        key, self._chosen_key = self._chosen_key, None
        if key is None:
            return super()._next_instance_key()
        if not tf.executing_eagerly():
            return key
        with tf.device("CPU:0"):  # where a collective on any device takes it from
            return tf.constant(key, tf.int32)
