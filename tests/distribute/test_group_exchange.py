"""The NCCL path: what its collectives add up to, and the graph that is traced for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tf_largebatch.core.collective_plan import AllReducePlan, halving_doubling, hierarchical
from tf_largebatch.distribute._group_exchange import NcclGroups, run_plan_in_groups


class GroupsOfThreads:
    """Collectives among threads, by their definitions; members are ranked in reverse."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[Any, tuple[dict[int, Any], threading.Barrier]] = {}
        self.kinds: set[tuple[str, int]] = set()

    def of(self, member: int) -> Any:
        everybody = self

        class OfMember:
            def rank_order(self, members: Sequence[int]) -> list[int]:
                return sorted(members, reverse=True)

            def reduce_scatter(self, value: Any, group: Sequence[int], key: int) -> Any:
                total = sum(everybody.gather("reduce_scatter", member, value, group, key))
                return tf.constant(np.split(total, len(group))[list(group).index(member)])

            def all_gather(self, value: Any, group: Sequence[int], key: int) -> Any:
                return tf.concat(everybody.gather("all_gather", member, value, group, key), 0)

            def all_reduce(self, value: Any, group: Sequence[int], key: int) -> Any:
                return tf.constant(sum(everybody.gather("all_reduce", member, value, group, key)))

        return OfMember()

    def gather(
        self, kind: str, member: int, value: Any, group: Sequence[int], key: int
    ) -> list[Any]:
        """Everybody's value, in the order of the group, once all of it have come."""
        assert member in group and list(group) == sorted(group, reverse=True)
        with self._lock:
            self.kinds.add((kind, len(group)))
            values, barrier = self._calls.setdefault(
                (kind, tuple(group), key), ({}, threading.Barrier(len(group), timeout=20.0))
            )
            values[member] = value.numpy()
        barrier.wait()
        return [values[each] for each in group]


def in_threads(count: int, run: Callable[[int], Any]) -> list[Any]:
    results: dict[int, Any] = {}

    def body(member: int) -> None:
        results[member] = run(member)

    threads = [threading.Thread(target=body, args=(member,)) for member in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    return [results[member] for member in range(count)]


@pytest.mark.parametrize(
    ("plan", "length", "kinds"),
    [
        (halving_doubling(2, length=6, halvings=0), 6, {("all_reduce", 2)}),
        (
            halving_doubling(8, length=16, halvings=2),
            13,
            {("reduce_scatter", 2), ("all_reduce", 2), ("all_gather", 2)},
        ),
        (
            halving_doubling(8, length=24, halvings=3),
            24,
            {("reduce_scatter", 2), ("all_gather", 2)},
        ),
        (
            hierarchical(1, members_per_host=8, length=8, inter="halving_doubling"),
            7,
            {("reduce_scatter", 8), ("all_gather", 8)},
        ),
        (
            hierarchical(4, members_per_host=3, length=24, inter="halving_doubling", halvings=1),
            20,
            {
                ("reduce_scatter", 3),
                ("all_gather", 3),
                ("reduce_scatter", 2),
                ("all_reduce", 2),
                ("all_gather", 2),
            },
        ),
    ],
    ids=["pair", "eight", "eight halved three times", "one host of eight", "four hosts of three"],
)
def test_groups_add_up_to_the_sum(
    plan: AllReducePlan, length: int, kinds: set[tuple[str, int]]
) -> None:
    values = np.random.default_rng(0).integers(0, 100, (plan.num_workers, length)).astype("float32")
    groups = GroupsOfThreads()
    results = in_threads(
        plan.num_workers,
        lambda member: run_plan_in_groups(
            plan,
            tf.constant(values[member]),
            member=member,
            groups=groups.of(member),
            first_instance_key=100,
        ).numpy(),
    )
    for result in results:
        np.testing.assert_array_equal(result, values.sum(axis=0))
    assert groups.kinds == kinds


def traced(member: int) -> list[tf.Operation]:
    """The collectives of one of 2 x 2 GPUs, in the order in which they were made."""
    devices = [
        f"/job:worker/replica:0/task:{task}/device:GPU:{gpu}" for task in (0, 1) for gpu in (0, 1)
    ]
    plan = hierarchical(2, members_per_host=2, length=8, inter="halving_doubling", halvings=0)
    with tf.Graph().as_default() as graph, tf.device(devices[member]):
        token = tf.compat.v1.placeholder(tf.resource, [])
        groups = NcclGroups(devices, member=member, ordering_token=token)
        run_plan_in_groups(plan, tf.zeros([7]), member=member, groups=groups, first_instance_key=50)
        return [op for op in graph.get_operations() if op.type.startswith("Collective")]


def constant(op: tf.Operation, place: int) -> int:
    return int(tf.get_static_value(op.inputs[place]))


@pytest.mark.parametrize("member", range(4))
def test_the_traced_collectives_are_nccls_in_order(member: int) -> None:
    ops = traced(member)
    assert [op.type for op in ops] == [
        "CollectiveReduceScatterV2",  # among the worker's own
        "CollectiveReduceV2",  # with the same GPU of the other worker
        "CollectiveGatherV2",
    ]
    for number, op in enumerate(ops):
        assert op.get_attr("communication_hint") == b"nccl"
        assert constant(op, 1) == 2  # members of the group
        assert constant(op, 3) == 50 + number
        assert op.inputs[4].dtype == tf.resource  # the ordering token
        assert op.device.endswith(f"GPU:{member % 2}")
    assert [op.inputs[0].shape.as_list() for op in ops] == [[8], [4], [4]]


def test_group_keys_are_those_of_the_group_on_all_its_members() -> None:
    keys = [[constant(op, 2) for op in traced(member)] for member in range(4)]
    inside, between = [row[0] for row in keys], [row[1] for row in keys]
    assert inside[0] == inside[1] != inside[2] == inside[3]
    assert between[0] == between[2] != between[1] == between[3]
    assert len({*inside, *between}) == 4
    assert [row[2] for row in keys] == inside


def test_groups_are_ranked_as_tensorflow_ranks_devices() -> None:
    devices = [f"/job:worker/replica:0/task:{task}/device:GPU:0" for task in range(12)]
    groups = NcclGroups(devices, member=2, ordering_token=None)
    assert groups.rank_order([2, 10]) == [10, 2]
