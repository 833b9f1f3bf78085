"""Plans as arrays: the same transfers, and no port twice in a round."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import numpy as np
import pytest

from tf_largebatch.core.collective_plan import (
    AllReducePlan,
    binary_blocks,
    halving_doubling,
    hierarchical,
    ring,
)
from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.core.transfer_rounds import Round, schedule_of

Transfer = tuple[int, int, float, bool]


def plans(p: int) -> list[AllReducePlan]:
    length = 64 * p
    return [
        ring(p, length=length),
        binary_blocks(p, length=length),
        halving_doubling(p, length=length),
        halving_doubling(p, length=length, halvings=0),
        hierarchical(p, members_per_host=3, length=3 * length, inter="halving_doubling"),
    ]


def numbers(indices: Any, count: int) -> list[int]:
    return np.arange(count)[indices].tolist()


def transfers(rounds: tuple[Round, ...], ranks: int) -> Counter[Transfer]:
    found: Counter[Transfer] = Counter()
    for each in rounds:
        pairs = zip(numbers(each.senders, ranks), numbers(each.receivers, ranks), strict=True)
        found.update(
            (sender, receiver, share, each.reduce)
            for (sender, receiver), share in zip(pairs, each.shares.tolist(), strict=True)
        )
    return found


@pytest.mark.parametrize("p", [1, 2, 3, 5, 6, 7, 8, 12])
def test_transfers_are_the_plans(p: int) -> None:
    for plan in plans(p):
        members = 3 if plan.algorithm == "hierarchical" else 1
        schedule = schedule_of(plan, ranks_per_host=members)
        assert (schedule.num_ranks, schedule.num_hosts) == (plan.num_workers, p)
        expected: list[Counter[Transfer]] = [Counter() for _ in range(plan.num_steps)]
        for rank in range(plan.num_workers):
            for found, step in zip(expected, plan.steps_of(rank), strict=True):
                found.update(
                    (p_.peer, rank, (p_.end - p_.begin) / plan.length, step.reduce)
                    for p_ in step.receives
                )
        assert [transfers(step, plan.num_workers) for step in schedule.steps] == [
            step for step in expected if step
        ]


@pytest.mark.parametrize("members", [1, 2, 4])
@pytest.mark.parametrize("p", [6, 7, 8])
def test_no_port_stands_twice_in_a_round(p: int, members: int) -> None:
    plan = hierarchical(p, members_per_host=members, length=960 * members, inter="ring")
    for made, size in ((plan, members), (binary_blocks(4 * p, length=960), members)):
        schedule = schedule_of(made, ranks_per_host=size)
        hosts, ranks = schedule.num_hosts, schedule.num_ranks
        for step in schedule.steps:
            for each in step:
                senders, receivers = numbers(each.senders, ranks), numbers(each.receivers, ranks)
                for ends, ports in ((senders, each.out_ports), (receivers, each.in_ports)):
                    assert len(set(ends)) == len(ends)
                    expected = [
                        rank // size if each.is_between_hosts else hosts + rank for rank in ends
                    ]
                    assert numbers(ports, hosts + ranks) == expected
                    assert len(set(expected)) == len(expected)
                crosses = {a // size != b // size for a, b in zip(senders, receivers, strict=True)}
                assert crosses == {each.is_between_hosts}


@pytest.mark.parametrize("p", [2, 3, 8])
def test_the_ring_made_at_once_is_the_one_made_from_steps(p: int) -> None:
    plan = ring(p, length=5 * p)
    at_once = schedule_of(plan)
    from_steps = schedule_of(dataclasses.replace(plan, algorithm="hierarchical"))
    assert len(at_once.steps) == len(from_steps.steps) == 2 * (p - 1)
    for one, other in zip(at_once.steps, from_steps.steps, strict=True):
        assert transfers(one, p) == transfers(other, p)


def test_refused() -> None:
    with pytest.raises(ConfigurationError, match="ranks_per_host=3: must divide the plan's 8"):
        schedule_of(ring(8, length=8), ranks_per_host=3)
    with pytest.raises(ConfigurationError, match="ranks_per_host=0"):
        schedule_of(ring(8, length=8), ranks_per_host=0)
    with pytest.raises(ConfigurationError, match="0 elements has no shares"):
        schedule_of(ring(8, length=0))
