"""How two members of a group hand each other a piece of a buffer, on CPU."""

from __future__ import annotations

import tensorflow as tf

from tf_largebatch.distribute._tf_internals import broadcast_recv_v2, broadcast_send_v2

# Each ordered pair of members is a group of its own. TensorFlow counts group keys up from 1.
_FIRST_PAIR_KEY = 2**28
# TensorFlow's broadcast takes these; bfloat16 travels as the bits of float16.
EXCHANGED_DTYPES = (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.int64)
_CARRIER = tf.float16


class BroadcastExchange:
    """Pieces travel by TensorFlow's broadcast, in groups of two: a sender and a receiver.

    A receive needs no data, so it can be posted before anything is there to be sent. The
    receiver's request then waits at the sender, and the piece pays the one-way latency only.

    Args:
        member: this one's number in the group.
        group_size: how many members the group has.
        device: this member's.
    """

    def __init__(self, *, member: int, group_size: int, device: str) -> None:
        self._member = member
        self._group_size = group_size
        self._device = device

    def send(self, piece: tf.Tensor, *, peer: int, instance_key: int) -> tf.Operation:
        """Sends `piece` to `peer`, which receives it by the same key.

        TensorFlow runs the returned op only if it is among the graph's outputs.
        """
        key = self._pair_key(self._member, peer)
        with tf.device(self._device):
            if piece.dtype == tf.bfloat16:
                piece = tf.bitcast(piece, _CARRIER)
            return broadcast_send_v2(piece, 2, key, instance_key, "auto", 0).op

    def receive(self, length: int, dtype: tf.DType, *, peer: int, instance_key: int) -> tf.Tensor:
        """The `[length]` elements that `peer` sends by the same key."""
        key = self._pair_key(peer, self._member)
        carried = _CARRIER if dtype == tf.bfloat16 else dtype
        with tf.device(self._device):
            piece = broadcast_recv_v2([length], carried, 2, key, instance_key, "auto", 0)
            return piece if carried == dtype else tf.bitcast(piece, dtype)

    def _pair_key(self, sender: int, receiver: int) -> int:
        return _FIRST_PAIR_KEY + sender * self._group_size + receiver
