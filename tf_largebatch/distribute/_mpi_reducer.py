"""Traces buckets into graphs, which MPI brings to all workers.

A bucket that is to travel while backward goes on is two ops: one hands its values to
`_mpi_engine.py`, and the other takes what has become of them from a queue, for which TensorFlow
keeps no thread while it waits. Where nothing is to be done meanwhile, it is one op, whose thread
sees to it itself: two threads less are to be woken.

Copies of a value's bytes on the way: one into the block that MPI sums in place; none out of it, but
for tensors that do not fill their last 64 bytes (`_packed_blocks.py`); and those of MPI and of the
network themselves.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tf_largebatch.core.collective_plan import AllReducePlan
from tf_largebatch.core.errors import LargeBatchError
from tf_largebatch.distribute._mpi_cargo import Cargo, Rows, Sums
from tf_largebatch.distribute._mpi_engine import Bucket, TransferEngine
from tf_largebatch.distribute._packed_blocks import BlockPool, PackedLayout
from tf_largebatch.distribute._replica_launcher import ReplicaLauncher
from tf_largebatch.distribute._selection import AlgorithmSelector
from tf_largebatch.distribute._tf_internals import run_independently

Array = npt.NDArray[Any]
_HALVES = (tf.float16, tf.bfloat16)
_LEFT = (
    "a step ended with an error while a bucket of it travelled, and another step has begun: what "
    "other workers have of the one cannot be told from the other. Do not go on after an error in a "
    "step, nor let one call make steps beyond the end of its data: end the program, and resume it"
)


@dataclass(frozen=True)
class _Shipment:
    """One bucket of a graph, each time that it runs."""

    key: int
    description: str
    cargo: Cargo
    replica_id: int


class MpiReducer:
    """Brings buckets of this worker's replicas to all workers.

    Args:
        engine: in which they travel.
        replicas: of this worker, each of which hands in the same buckets.

    Attributes:
        selector: chooses algorithms; a worker's replicas are summed before its bucket travels.
    """

    def __init__(self, engine: TransferEngine, *, replicas: int) -> None:
        self.selector = AlgorithmSelector(
            num_workers=engine.comm.size, replicas_per_worker=1, has_mpi=True
        )
        self._engine = engine
        self._replicas = replicas
        self._pool = BlockPool()
        self._lock = threading.Lock()
        # Of each replica that has come, by key: its block, and where it waits.
        self._handed: dict[int, dict[int, tuple[Array, _Waiting]]] = {}
        with tf.init_scope(), tf.device("CPU:0"):
            self._no_error = tf.constant("")
            # Within a graph, TensorFlow runs ops that write to one variable one after the other,
            # also those of the functions that it calls.
            self._order = [tf.Variable(0, dtype=tf.int64, trainable=False) for _ in range(replicas)]

    def sum(
        self,
        values: Sequence[tf.Tensor],
        *,
        launcher: ReplicaLauncher,
        replica_id: int,
        plan: AllReducePlan | None,
        wire_dtype: tf.DType | None,
        after: Sequence[tf.Tensor],
        is_last: bool,
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """The sums of `values` over all replicas, and a tensor that exists when they do.

        Args:
            values: of one dtype and static shapes. float16 and bfloat16 are summed as float32.
            launcher: that of the replica.
            replica_id: its number on this worker.
            plan: how, for as many elements as `layout_of` has; None leaves it to MPI.
            wire_dtype: in which the pieces of a plan travel; None for that of the values.
            after: what must exist before these values travel.
            is_last: whether there is nothing to be done meanwhile.
        """
        wire = None if wire_dtype is None else np.dtype(wire_dtype.as_numpy_dtype)
        return self._exchange(
            values,
            Sums(layout_of(values), plan, wire),
            launcher=launcher,
            replica_id=replica_id,
            after=after,
            is_last=is_last,
        )

    def gather(self, value: tf.Tensor, *, launcher: ReplicaLauncher, replica_id: int) -> tf.Tensor:
        """`[n, ...]` of each replica, of one static shape everywhere, as `[replicas * n, ...]`."""
        (shape,) = layout_of([value]).shapes
        rows = Rows(
            shape=shape,
            dtype=layout_of([value]).dtype,
            worker=self._engine.comm.rank,
            workers=self._engine.comm.size,
            replicas=self._replicas,
        )
        parts, _ = self._exchange(
            [value], rows, launcher=launcher, replica_id=replica_id, after=(), is_last=False
        )
        return tf.concat(parts, axis=0)

    def _exchange(
        self,
        values: Sequence[tf.Tensor],
        cargo: Cargo,
        *,
        launcher: ReplicaLauncher,
        replica_id: int,
        after: Sequence[tf.Tensor],
        is_last: bool,
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """The tensors of the block that all workers end with, and that block."""
        dtype = values[0].dtype
        if dtype in _HALVES:
            values = [tf.cast(value, tf.float32) for value in values]
        noted = launcher.by_mpi(cargo.describe(), values[0])
        with noted as (key, description), tf.device("CPU:0"):
            shipment = _Shipment(key, description, cargo, replica_id)
            stays = is_last and self._replicas == 1
            make_ops = self._op_that_stays if stays else self._ops_that_come_back
            order = self._order[replica_id]
            with tf.control_dependencies([*values, *after]):
                turn = order.assign_add(1, read_value=False)
            with tf.control_dependencies([turn]):
                block, handed_in = make_ops(values, shipment)
            with tf.control_dependencies([handed_in]):
                order.assign_add(1, read_value=False)
        return [tf.cast(each, dtype) for each in unpacked(block, cargo.layout)], block

    def _op_that_stays(
        self, values: Sequence[tf.Tensor], shipment: _Shipment
    ) -> tuple[tf.Tensor, tf.Operation]:
        """The block that all workers end with, and the op that has handed in this one's."""

        def stay(*arrays: Array) -> Array:
            block = self._loaded(arrays, shipment)
            answer: SimpleQueue[str | None] = SimpleQueue()
            self._submit(block, shipment, deliver=answer.put, linger=True)
            error = answer.get()
            if error is not None:
                raise LargeBatchError(_aborted(error))
            return block

        block = tf.numpy_function(stay, values, values[0].dtype)
        run_independently(block.op)
        return tf.ensure_shape(block, shipment.cargo.layout.block_shape), block.op

    def _ops_that_come_back(
        self, values: Sequence[tf.Tensor], shipment: _Shipment
    ) -> tuple[tf.Tensor, tf.Operation]:
        """As `_op_that_stays`."""
        waiting = _Waiting(values[0].dtype, shipment.cargo.layout.block_shape)

        def go(*arrays: Array) -> None:
            if waiting.was_left():
                self._engine.fail(f"{_LEFT} ({shipment.description})")
            waiting.begin()
            self._meet(self._loaded(arrays, shipment), waiting, shipment)

        handed_in = tf.numpy_function(go, values, [])
        run_independently(handed_in)
        with tf.control_dependencies([handed_in]):
            error, block = waiting.queue.dequeue()
        is_there = tf.raw_ops.Assert(condition=tf.equal(error, ""), data=[error])
        run_independently(is_there)
        with tf.control_dependencies([is_there]):
            return tf.identity(block), handed_in

    def _loaded(self, arrays: Sequence[Array], shipment: _Shipment) -> Array:
        block = self._pool.take(shipment.cargo.layout)
        shipment.cargo.load(arrays, block, replica=shipment.replica_id)
        return block

    def _meet(self, block: Array, waiting: _Waiting, shipment: _Shipment) -> None:
        """A replica has come; the last one hands in the block of all."""
        with self._lock:
            handed = self._handed.setdefault(shipment.key, {})
            handed[shipment.replica_id] = (block, waiting)
            if len(handed) < self._replicas:
                return
            del self._handed[shipment.key]
        blocks, all_waiting = zip(*(handed[each] for each in range(self._replicas)), strict=True)
        shipment.cargo.merge(blocks)
        delivery = _Delivery(blocks[0], all_waiting, self._no_error)
        self._submit(blocks[0], shipment, deliver=delivery, linger=False)

    def _submit(self, block: Array, shipment: _Shipment, *, deliver: Any, linger: bool) -> None:
        engine = self._engine
        start = partial(shipment.cargo.transfer, engine.mpi, engine.comm, block, pool=self._pool)
        engine.submit(Bucket(shipment.description, shipment.key, start, deliver), linger=linger)


class _Waiting:
    """Where an op of a graph waits for the block of the op that handed it in."""

    def __init__(self, dtype: tf.DType, shape: tuple[int, int]) -> None:
        with tf.init_scope(), tf.device("CPU:0"):
            self.queue = tf.queue.FIFOQueue(-1, [tf.string, dtype], shapes=[[], shape])
        self._is_under_way = False

    def begin(self) -> None:
        self._is_under_way = True

    def was_left(self) -> bool:
        """Whether an earlier run of the graph handed in a block, and did not wait for it."""
        return self._is_under_way or int(self.queue.size()) > 0

    def end(self, text: tf.Tensor, values: tf.Tensor) -> None:
        """Ends the wait, with an error text, or an empty one, and the block."""
        self._is_under_way = False
        tf.raw_ops.QueueEnqueueV2(handle=self.queue.queue_ref, components=[text, values])


class _Delivery:
    """Hands a block, or an error, to the graphs of the replicas that wait, and forgets it."""

    def __init__(self, block: Array, waiting: Sequence[_Waiting], no_error: tf.Tensor) -> None:
        self._block: Array | None = block
        self._waiting = waiting
        self._no_error = no_error

    def __call__(self, error: str | None) -> None:
        block, self._block = self._block, None
        assert block is not None
        # All replicas get one tensor, of which TensorFlow knows that it is shared.
        values = tf.experimental.dlpack.from_dlpack(block.__dlpack__())
        text = self._no_error if error is None else tf.constant(_aborted(error))
        for each in self._waiting:
            each.end(text, values)


def _aborted(error: str) -> str:
    """In one line; begins as what TensorFlow says, which marks an error of all workers."""
    return "Collective ops is aborted by: " + " ".join(error.split())


def unpacked(block: tf.Tensor, layout: PackedLayout) -> list[tf.Tensor]:
    """The tensors of a block: parts of its memory where they fill their rows."""
    tensors = []
    for shape, part in zip(layout.shapes, tf.split(block, layout.rows), strict=True):
        count, flat = math.prod(shape), tf.reshape(part, [-1])
        if flat.shape[0] != count:  # the only ones that are copied again
            flat = flat[:count]
        tensors.append(tf.reshape(flat, shape))
    return tensors


def layout_of(values: Sequence[tf.Tensor]) -> PackedLayout:
    """How `values`, of one dtype and static shapes, lie in a block."""
    dtype = tf.float32 if values[0].dtype in _HALVES else values[0].dtype
    return PackedLayout(
        tuple(tuple(value.shape) for value in values), np.dtype(dtype.as_numpy_dtype)
    )
