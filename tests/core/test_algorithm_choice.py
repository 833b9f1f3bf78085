from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from tf_largebatch.core.algorithm_choice import (
    AllReduceCosts,
    Candidate,
    candidates,
    make_plan,
    plan_cost_of,
    predicted_seconds,
    rank_by_seconds,
)
from tf_largebatch.core.collective_plan import simulate
from tf_largebatch.core.cost_model import LinkCost, PlanCost, plan_cost
from tf_largebatch.core.errors import ConfigurationError

WORKERS = (1, 2, 3, 4, 6, 8)
TENSORFLOW, RING, BLOCKS = (
    Candidate("tensorflow"),
    Candidate("ring"),
    Candidate("binary_blocks"),
)


def halving(halvings: int) -> Candidate:
    return Candidate("halving_doubling", halvings)


def costs_of(
    workers: int,
    replicas: int = 1,
    *,
    step: float = 1.0,
    byte: float = 0.5,
    add: float = 0.0,
    overhead: float = 10.0,
    tensorflow: tuple[float, float] = (100.0, 0.25),
) -> AllReduceCosts:
    return AllReduceCosts(
        num_workers=workers,
        replicas_per_worker=replicas,
        link=LinkCost(step, byte, add),
        overhead_seconds=overhead,
        tensorflow_seconds=tensorflow[0],
        tensorflow_seconds_per_byte=tensorflow[1],
    )


@pytest.mark.parametrize(
    ("candidate", "workers", "replicas", "steps", "bytes_sent"),
    [
        # Of 4,800 bytes. 2 (p - 1) steps, 2 b (p - 1) / p bytes.
        (RING, 8, 1, 14, 8400),
        (RING, 6, 1, 10, 8000),
        (RING, 2, 1, 2, 4800),
        (RING, 1, 1, 0, 0),
        # log2 p + h steps: halves, quarters, ... twice, and swaps of what is left.
        (halving(2), 8, 1, 5, 2 * (2400 + 1200) + 1200),
        (halving(1), 8, 1, 4, 2 * 2400 + 2 * 2400),
        (halving(0), 8, 1, 3, 3 * 4800),
        (halving(0), 2, 1, 1, 4800),
        # Six workers: two surplus ones hand in their buffer and get it back; four do the rest.
        (halving(1), 6, 1, 2 + 3, 2 * 4800 + 2 * 2400 + 2400),
        # Blocks of four and two: 1/2, 1/4, and a half from each of the small block; all twice.
        (BLOCKS, 6, 1, 6, 2 * (2400 + 1200 + 2400)),
        # Two replicas: half the buffer to the other one and half back; then a ring on 2,400.
        (RING, 4, 2, 2 + 6, 2 * 2400 + 3600),
        # Three: 1,600 to each of two, and back; then one swap of 1,600 between two workers.
        (halving(0), 2, 3, 2 + 1, 2 * 3200 + 1600),
        (halving(0), 1, 2, 2, 4800),
    ],
)
def test_a_plan_takes_what_its_steps_and_bytes_take(
    candidate: Candidate, workers: int, replicas: int, steps: int, bytes_sent: float
) -> None:
    seconds = predicted_seconds(candidate, costs_of(workers, replicas), size_bytes=4800)
    assert math.isclose(seconds, 10 + 1.0 * steps + 0.5 * bytes_sent, rel_tol=1e-12)
    cost = plan_cost_of(candidate, workers, replicas, size_bytes=4800)
    assert cost.steps == steps
    assert math.isclose(cost.bytes_sent, bytes_sent, rel_tol=1e-12)


def test_additions_cost_too_where_a_link_says_so() -> None:
    costs = costs_of(8, step=0.0, byte=0.0, add=2.0)
    # Each of the ring's first seven steps adds an eighth.
    assert predicted_seconds(RING, costs, size_bytes=800) == 10 + 2 * 700


def test_tensorflows_own_takes_a_straight_line() -> None:
    for replicas in (1, 2):
        assert predicted_seconds(TENSORFLOW, costs_of(4, replicas), size_bytes=800) == 300


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_predictions_count_what_the_plan_does(workers: int, replicas: int) -> None:
    length = 3 * 8 * workers * replicas  # which all parts divide
    for way in candidates("auto", workers, replicas_per_worker=replicas)[1:]:
        plan = make_plan(
            way, num_workers=workers, replicas_per_worker=replicas, length=length, align=1
        )
        assert plan is not None
        counted = plan_cost(plan, item_bytes=4)
        cost = plan_cost_of(way, workers, replicas, size_bytes=4 * length)
        assert counted == PlanCost(cost.steps, *map(round, (cost.bytes_sent, cost.bytes_reduced)))


@pytest.mark.parametrize(
    ("workers", "replicas", "expected"),
    [
        (1, 1, [halving(0)]),
        (2, 1, [halving(0)]),
        (3, 1, [halving(0), BLOCKS]),
        (4, 1, [halving(0), halving(1)]),
        (6, 1, [halving(0), halving(1), BLOCKS]),
        (8, 1, [halving(0), halving(1), halving(2)]),
        (16, 1, [halving(0), halving(1), halving(2), halving(3)]),
        (1, 2, [halving(0)]),
        (3, 2, [halving(0)]),
        (6, 4, [halving(0), halving(1)]),
        (8, 2, [halving(0), halving(1), halving(2)]),
    ],
)
def test_candidates(workers: int, replicas: int, expected: list[Candidate]) -> None:
    def ways(option: str) -> list[Candidate]:
        return candidates(option, workers, replicas_per_worker=replicas)

    assert ways("halving_doubling") == expected
    assert ways("ring") == [RING]
    assert ways("tensorflow") == [TENSORFLOW]
    assert ways("auto") == [TENSORFLOW, RING, *expected]


def test_what_a_candidate_is_called() -> None:
    assert [way.describe() for way in (TENSORFLOW, RING, BLOCKS, halving(0))] == [
        "tensorflow",
        "ring",
        "binary_blocks",
        "halving_doubling[halvings=0]",
    ]


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_every_candidate_gives_all_replicas_the_sum(workers: int, replicas: int) -> None:
    members, length = workers * replicas, 101
    inputs = list(np.random.default_rng(members).integers(-(2**40), 2**40, (members, length)))
    for way in candidates("auto", workers, replicas_per_worker=replicas):
        plan = make_plan(
            way, num_workers=workers, replicas_per_worker=replicas, length=length, align=4
        )
        if way == TENSORFLOW:
            assert plan is None
            continue
        assert plan is not None and (plan.num_workers, plan.length) == (members, length)
        assert plan.algorithm == ("hierarchical" if replicas > 1 else way.algorithm)
        for result in simulate(plan, inputs):
            np.testing.assert_array_equal(result, np.sum(inputs, axis=0), err_msg=way.describe())
        edges = {
            edge
            for rank in range(members)
            for step in plan.steps_of(rank)
            for piece in step.sends
            for edge in (piece.begin, piece.end)
        }
        assert all(edge % 4 == 0 or edge == length for edge in edges), way.describe()


def ranked(option: str, costs: AllReduceCosts, size_bytes: float = 2.0**20) -> list[Candidate]:
    ways = candidates(option, costs.num_workers, replicas_per_worker=costs.replicas_per_worker)
    pairs = rank_by_seconds(ways, costs, size_bytes=size_bytes)
    assert [seconds for _, seconds in pairs] == sorted(seconds for _, seconds in pairs)
    return [way for way, _ in pairs]


def test_where_only_steps_cost_the_fewest_steps_come_first() -> None:
    latency_only = {"step": 1.0, "byte": 0.0, "tensorflow": (1000.0, 0.0)}
    # 3, 4, 5 and 14 steps.
    assert ranked("auto", costs_of(8, **latency_only)) == [
        halving(0),
        halving(1),
        halving(2),
        RING,
        TENSORFLOW,
    ]
    # 4, 5, 6 and 10 steps.
    expected = [halving(0), halving(1), BLOCKS, RING, TENSORFLOW]
    assert ranked("auto", costs_of(6, **latency_only)) == expected


def test_where_only_bytes_cost_the_fewest_bytes_come_first() -> None:
    bytes_only = {"step": 0.0, "byte": 1.0, "tensorflow": (0.0, 1000.0)}
    # 7/4 of the buffer twice (the ring was given first), 2 and 3 of it.
    assert ranked("auto", costs_of(8, **bytes_only)) == [
        RING,
        halving(2),
        halving(1),
        halving(0),
        TENSORFLOW,
    ]
    # 5/3, 5/2, 7/2 and 4 of it.
    expected = [RING, BLOCKS, halving(1), halving(0), TENSORFLOW]
    assert ranked("auto", costs_of(6, **bytes_only)) == expected
    assert ranked("halving_doubling", costs_of(6, **bytes_only))[0] == BLOCKS


def test_size_decides_between_few_steps_and_few_bytes() -> None:
    # 3 + 3 b against 5 + 7/4 b: equal at b = 8/5; and 4 + 2 b beats both between 1 and 4.
    costs = costs_of(8, step=1.0, byte=1.0)
    best = [ranked("halving_doubling", costs, size)[0] for size in (0.99, 1.01, 3.99, 4.01)]
    assert best == [halving(0), halving(1), halving(1), halving(2)]


def test_of_equals_the_first_given_comes_first() -> None:
    free = costs_of(6, step=0.0, byte=0.0, overhead=0.0, tensorflow=(0.0, 0.0))
    ways = candidates("auto", 6, replicas_per_worker=1)
    assert ranked("auto", free) == ways
    backwards = [way for way, _ in rank_by_seconds(ways[::-1], free, size_bytes=8)]
    assert backwards == ways[::-1]


@pytest.mark.parametrize(
    ("workers", "replicas", "seconds", "seconds_per_byte"),
    [
        # A ring over all replicas: 2 (p - 1) steps of 0.5 ms, 2 (p - 1) / p bytes of 2 ns.
        (4, 1, 1e-3 + 6 * 5e-4, 3e-9),
        (4, 2, 1e-3 + 14 * 5e-4, 3.5e-9),
        (1, 1, 1e-3, 0.0),
    ],
)
def test_typical_costs(
    workers: int, replicas: int, seconds: float, seconds_per_byte: float
) -> None:
    costs = AllReduceCosts.typical(workers, replicas_per_worker=replicas)
    assert (costs.num_workers, costs.replicas_per_worker) == (workers, replicas)
    assert math.isclose(costs.tensorflow_seconds, seconds, rel_tol=1e-12)
    assert math.isclose(costs.tensorflow_seconds_per_byte, seconds_per_byte, rel_tol=1e-12)
    # 10 Gbit/s are 1.25 GB/s; gRPC gets less out of them.
    assert costs.link == LinkCost(latency_seconds=5e-4, seconds_per_byte=2e-9)
    assert costs.overhead_seconds == 1e-3


def test_costs_survive_json_bit_by_bit() -> None:
    costs = costs_of(6, 2, step=1 / 3, byte=1e-300, add=5e-324, tensorflow=(0.1, 2.0**-1040))
    stored = json.loads(json.dumps(costs.to_dict()))
    assert AllReduceCosts.from_dict(stored) == costs
    assert stored == costs.to_dict(), "from_dict leaves what it is given as it is"


def changed(**fields: Any) -> dict[str, Any]:
    return {**costs_of(4).to_dict(), **fields}


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in costs_of(4).to_dict().items() if key != name}


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({}, "mapping with 'format': 'tf_largebatch all-reduce costs 1', but are of 'dict'"),
        (without("format"), "but are of None"),
        (changed(format="tf_largebatch all-reduce costs 2"), "but are of '.* costs 2'"),
        (without("link"), "incomplete or have too much: 'link'"),
        (without("num_workers"), "incomplete or have too much: .*num_workers"),
        (changed(colour="red"), "incomplete or have too much: .*colour"),
        (changed(link=None), "incomplete or have too much"),
        (changed(link={"latency_seconds": 1.0}), "incomplete or have too much: .*seconds_per_byte"),
        (changed(link={**costs_of(4).to_dict()["link"], "hops": 1}), "too much: .*hops"),
        (changed(num_workers=0), "num_workers=0: must be an integer, 1 or more"),
        (changed(num_workers=4.0), "num_workers=4.0: must be an integer"),
        (changed(replicas_per_worker=True), "replicas_per_worker=True"),
        (changed(overhead_seconds=-1.0), "overhead_seconds=-1.0"),
        (changed(tensorflow_seconds="1"), "tensorflow_seconds='1'"),
        (changed(tensorflow_seconds_per_byte=math.inf), "tensorflow_seconds_per_byte=inf"),
        (
            changed(link={"latency_seconds": math.nan, "seconds_per_byte": 0.0}),
            "latency_seconds=nan",
        ),
    ],
)
def test_foreign_or_broken_costs_are_refused(stored: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        AllReduceCosts.from_dict(stored)


@pytest.mark.parametrize("stored", [None, [], [1, 2], 5, "costs.json"])
def test_what_is_no_mapping_is_refused(stored: Any) -> None:
    with pytest.raises(ConfigurationError, match="format"):
        AllReduceCosts.from_dict(stored)


@pytest.mark.parametrize(
    ("size_bytes", "plan_seconds", "best"),
    [
        (2**20, 0.99, "ring"),  # measured: the faster one
        (2**20 + 1, 0.76, "tensorflow"),  # extrapolated: not by so little
        (2**20 + 1, 0.74, "ring"),
    ],
)
def test_beyond_what_was_measured_little_does_not_count(
    size_bytes: int, plan_seconds: float, best: str
) -> None:
    costs = AllReduceCosts(
        num_workers=4,
        replicas_per_worker=1,
        link=LinkCost(latency_seconds=0.0, seconds_per_byte=0.0),
        overhead_seconds=plan_seconds,
        tensorflow_seconds=1.0,
        tensorflow_seconds_per_byte=0.0,
    )
    ways = [Candidate("tensorflow"), Candidate("ring")]
    ranked = rank_by_seconds(ways, costs, size_bytes=size_bytes)
    assert ranked[0][0].algorithm == best
    assert dict(ranked) == {ways[0]: 1.0, ways[1]: plan_seconds}
