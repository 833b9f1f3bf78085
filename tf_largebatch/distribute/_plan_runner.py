"""Traces one member's part of an all-reduce plan into the current graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import tensorflow as tf

from tf_largebatch.core.collective_plan import AllReducePlan, Piece, Step


class Exchange(Protocol):
    """As `_exchange.BroadcastExchange`."""

    def send(self, piece: tf.Tensor, *, peer: int, instance_key: int) -> Any: ...

    def receive(
        self, length: int, dtype: tf.DType, *, peer: int, instance_key: int
    ) -> tf.Tensor: ...


def run_plan(
    plan: AllReducePlan,
    flat: tf.Tensor,
    *,
    member: int,
    exchange: Exchange,
    first_instance_key: int,
    wire_dtype: tf.DType | None = None,
    receive_after: Sequence[Any] = (),
) -> tf.Tensor:
    """The sum of all members' `flat`, `[plan.length]`, bitwise equal on all of them.

    TensorFlow may add several terms in another order than `simulate` does, alike on all members.

    All receives are posted at once, ahead of the data; step i uses key `first_instance_key + i`.

    Args:
        plan: what is sent when.
        flat: this member's values.
        member: its number.
        exchange: hands over pieces.
        first_instance_key: the first of `plan.num_steps` keys that are this all-reduce's alone.
        wire_dtype: the dtype in which pieces travel; sums stay in that of `flat`. What is sent is
            rounded on the sender as well, so that all members end with the same values.
        receive_after: ops or tensors before which no receive is posted.
    """
    wire_dtype = flat.dtype if wire_dtype is None else wire_dtype
    steps = plan.steps_of(member)
    keys = range(first_instance_key, first_instance_key + len(steps))
    with tf.control_dependencies(receive_after):
        received = [
            [
                exchange.receive(
                    piece.end - piece.begin, wire_dtype, peer=piece.peer, instance_key=key
                )
                for piece in step.receives
            ]
            for step, key in zip(steps, keys, strict=True)
        ]
    buffer = Segments(flat, length=plan.length)
    sent: list[Any] = []
    for step, key, arrivals in zip(steps, keys, received, strict=True):
        sent += _send(buffer, step, exchange, key, wire_dtype)
        for piece, arrival in zip(step.receives, arrivals, strict=True):
            if step.reduce:
                own = buffer.take(piece.begin, piece.end, flat.dtype)
                buffer.put(piece.begin, piece.end, own + tf.cast(arrival, flat.dtype))
            else:
                buffer.put(piece.begin, piece.end, arrival)
    # A sum that was sent to some members is rounded there; so all round all of it.
    reduced = tf.cast(buffer.take(0, plan.length, wire_dtype), flat.dtype)
    # Nobody may use the sum here, as where only one replica's is returned; others wait for what is
    # sent and for what is received.
    tf.compat.v1.get_default_graph().control_outputs.extend([*sent, reduced.op])
    return reduced


def _send(
    buffer: Segments, step: Step, exchange: Exchange, key: int, wire_dtype: tf.DType
) -> list[Any]:
    sent = []
    by_range: dict[tuple[int, int], list[Piece]] = {}
    for piece in step.sends:
        by_range.setdefault((piece.begin, piece.end), []).append(piece)
    for (begin, end), pieces in by_range.items():
        values = buffer.take(begin, end, wire_dtype)
        buffer.put(begin, end, values)  # rounded here as well
        sent += [exchange.send(values, peer=piece.peer, instance_key=key) for piece in pieces]
    return sent


class Segments:
    """A flat buffer whose parts can be replaced, though a tensor cannot: consecutive tensors.

    Each is kept in the dtype in which it came, and is cast when it is needed in another.
    """

    def __init__(self, flat: tf.Tensor, *, length: int) -> None:
        # (begin, end, tensor, where in the tensor begin is)
        self._parts: list[tuple[int, int, tf.Tensor, int]] = [(0, length, flat, 0)]

    def take(self, begin: int, end: int, dtype: tf.DType) -> tf.Tensor:
        """The elements `[begin, end)`."""
        slices = [
            tf.cast(
                _sliced(
                    tensor, offset + max(begin, first) - first, min(end, last) - max(begin, first)
                ),
                dtype,
            )
            for first, last, tensor, offset in self._parts
            if first < end and begin < last
        ]
        return slices[0] if len(slices) == 1 else tf.concat(slices, axis=0)

    def put(self, begin: int, end: int, tensor: tf.Tensor) -> None:
        """Replaces the elements `[begin, end)`."""
        parts = [(begin, end, tensor, 0)]
        for first, last, old, offset in self._parts:
            if first < begin:
                parts.append((first, min(last, begin), old, offset))
            if end < last:
                after = max(first, end)
                parts.append((after, last, old, offset + after - first))
        self._parts = sorted(parts, key=lambda part: part[0])


def _sliced(tensor: tf.Tensor, begin: int, count: int) -> tf.Tensor:
    return tensor if tensor.shape[0] == count else tf.slice(tensor, [begin], [count])
