"""Traces one member's part of an all-reduce plan as collectives of small groups, for NCCL.

NCCL has no send and receive in TensorFlow, but the steps of halving/doubling and of the
hierarchical plan are collectives among the members that exchange in them:

    each sends the others their parts, and adds up its own      reduce-scatter
    each sends the others the one part that it has              all-gather
    two send each other all they have, and add                  all-reduce
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import tensorflow as tf

from tf_largebatch.core.collective_plan import AllReducePlan, Piece

# Groups are numbered by their members; TensorFlow counts its group keys up from 1.
_FIRST_GROUP_KEY = 2**27


class GroupCollectives(Protocol):
    """As `NcclGroups`: collectives among `group`, members in the order of TensorFlow's ranks."""

    def rank_order(self, members: Sequence[int]) -> list[int]: ...

    def reduce_scatter(self, value: tf.Tensor, group: Sequence[int], key: int) -> tf.Tensor: ...

    def all_gather(self, value: tf.Tensor, group: Sequence[int], key: int) -> tf.Tensor: ...

    def all_reduce(self, value: tf.Tensor, group: Sequence[int], key: int) -> tf.Tensor: ...


class NcclGroups:
    """NCCL among some of the devices, one collective after the other.

    Args:
        devices: of all members, in their order.
        member: this one's number.
        ordering_token: the handle of a variable of this device; collectives that have it start in
            the order in which they were traced, the same on all devices, as NCCL needs.
    """

    def __init__(self, devices: Sequence[str], *, member: int, ordering_token: tf.Tensor) -> None:
        self._devices = list(devices)
        self._member = member
        self._ordering_token = ordering_token

    def rank_order(self, members: Sequence[int]) -> list[int]:
        """TensorFlow ranks the devices of a group by their names, as text."""
        return sorted(members, key=lambda member: self._devices[member])

    def reduce_scatter(self, value: tf.Tensor, group: Sequence[int], key: int) -> tf.Tensor:
        """Of `[g n]`, the sum over the group of this member's `[n]`."""
        return tf.raw_ops.CollectiveReduceScatterV2(
            input=value, merge_op="Add", final_op="Id", **self._common(group, key)
        )

    def all_gather(self, value: tf.Tensor, group: Sequence[int], key: int) -> tf.Tensor:
        """`[g n]` of everybody's `[n]`."""
        return tf.raw_ops.CollectiveGatherV2(input=value, **self._common(group, key))

    def all_reduce(self, value: tf.Tensor, group: Sequence[int], key: int) -> tf.Tensor:
        """The sum of everybody's `[n]`."""
        return tf.raw_ops.CollectiveReduceV2(
            input=value, merge_op="Add", final_op="Id", **self._common(group, key)
        )

    def _common(self, group: Sequence[int], key: int) -> dict[str, Any]:
        return {
            "group_size": len(group),
            "group_key": self._group_key(group),
            "instance_key": key,
            "ordering_token": [self._ordering_token],
            "communication_hint": "nccl",
        }

    def _group_key(self, group: Sequence[int]) -> int:
        # Two members, or all of a worker's, whose numbers follow one another.
        first, second = sorted(group)[:2]
        pair = first * len(self._devices) + second - first
        return _FIRST_GROUP_KEY + 2 * pair + (len(group) == 2)


def run_plan_in_groups(
    plan: AllReducePlan,
    flat: tf.Tensor,
    *,
    member: int,
    groups: GroupCollectives,
    first_instance_key: int,
) -> tf.Tensor:
    """The sum of all members' `flat`.

    Args:
        plan: `halving_doubling` for a power of two of members, or `hierarchical` for a power of two
            of workers, of a length that it cuts into equal pieces.
        flat: this member's values, at most `[plan.length]`; zeros are added to them.
        member: its number.
        groups: the collectives.
        first_instance_key: the first of `plan.num_steps` keys that are this all-reduce's alone.
    """
    length = flat.shape[0]
    begin, segment = 0, tf.pad(flat, [[0, plan.length - length]])
    for key, step in enumerate(plan.steps_of(member), start=first_instance_key):
        if not step.sends:
            continue
        peers = {piece.peer: piece for piece in step.sends}
        group = groups.rank_order([member, *peers])
        own = step.receives[0] if step.reduce else step.sends[0]
        if step.reduce and own == Piece(own.peer, begin, begin + segment.shape[0]):
            segment = groups.all_reduce(segment, group, key)
        elif step.reduce:
            parts = {**peers, member: own}
            cut = [_slice(segment, parts[each], begin) for each in group]
            segment = groups.reduce_scatter(tf.concat(cut, axis=0), group, key)
            segment.set_shape([own.end - own.begin])  # TensorFlow does not infer it
            begin = own.begin
        else:
            gathered = groups.all_gather(segment, group, key)
            gathered.set_shape([len(group) * segment.shape[0]])
            by_member = dict(zip(group, tf.split(gathered, len(group)), strict=True))
            begins = {member: own.begin, **{piece.peer: piece.begin for piece in step.receives}}
            in_order = sorted(group, key=begins.__getitem__)
            segment = tf.concat([by_member[each] for each in in_order], axis=0)
            begin = min(begins.values())
    return segment[:length]


def _slice(segment: tf.Tensor, piece: Piece, begin: int) -> tf.Tensor:
    return tf.slice(segment, [piece.begin - begin], [piece.end - piece.begin])
