"""The simulated step: against the cost model where that is exact, and against single pieces."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest

from tests.core._piece_simulation import done_seconds
from tf_largebatch.core.collective_plan import (
    AllReducePlan,
    binary_blocks,
    halving_doubling,
    hierarchical,
    ring,
)
from tf_largebatch.core.cost_model import (
    LinkCost,
    algorithm_cost,
    binary_blocks_cost,
    halving_doubling_cost,
    inside_host_cost,
    ring_cost,
)
from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.core.scaling_plan import (
    ALGORITHMS,
    BucketLoad,
    Cluster,
    ReplicaWork,
    plan_step,
)
from tf_largebatch.core.simulated_plan import mean_step_seconds, simulate_planned_step
from tf_largebatch.core.step_simulation import SimulatedBucket, simulate_step
from tf_largebatch.core.transfer_rounds import schedule_of

LINK = LinkCost(latency_seconds=1e-3, seconds_per_byte=1e-8, reduce_seconds_per_byte=3e-9)
SIZE = 1e6


def seconds_of(plan: AllReducePlan, *, ranks_per_host: int = 1, inside: LinkCost = LINK) -> float:
    """Of one buffer, with nothing else to do."""
    schedule = schedule_of(plan, ranks_per_host=ranks_per_host)
    return simulate_step(
        [SimulatedBucket(SIZE, 0.0, schedule)],
        between=LINK,
        inside=inside,
        max_buckets_in_flight=1,
        backward_end_seconds=0.0,
    ).step_seconds


@pytest.mark.parametrize("p", [1, 2, 3, 5, 8, 12, 16, 33])
def test_a_ring_takes_what_the_cost_model_says(p: int) -> None:
    expected = ring_cost(p, size_bytes=SIZE).seconds(LINK)
    assert seconds_of(ring(p, length=p)) == pytest.approx(expected)


@pytest.mark.parametrize("p", [1, 2, 4, 8, 16, 64])
def test_powers_of_two_take_what_the_cost_model_says(p: int) -> None:
    for halvings in range(p.bit_length()):
        cost = halving_doubling_cost(p, size_bytes=SIZE, halvings=halvings)
        plan = halving_doubling(p, length=p, halvings=halvings)
        assert seconds_of(plan) == pytest.approx(cost.seconds(LINK))
    expected = binary_blocks_cost(p, size_bytes=SIZE).seconds(LINK)
    assert seconds_of(binary_blocks(p, length=p)) == pytest.approx(expected)


@pytest.mark.parametrize("p", [3, 5, 6, 7, 12, 24, 31])
def test_other_numbers_take_no_more_than_the_cost_model_says(p: int) -> None:
    plans = [(binary_blocks(p, length=64 * p), binary_blocks_cost(p, size_bytes=SIZE))]
    for halvings in range(p.bit_length()):
        plan = halving_doubling(p, length=64 * p, halvings=halvings)
        plans.append((plan, halving_doubling_cost(p, size_bytes=SIZE, halvings=halvings)))
    for plan, cost in plans:
        # Ranks wait for data, not for one another; but no rank can send less than a ring's does.
        least = LINK.seconds_per_byte * 2 * SIZE * (p - 1) / p
        assert least < seconds_of(plan) <= cost.seconds(LINK) * (1 + 1e-12)


def test_folding_all_halvings_reckoned_by_hand() -> None:
    # Three ranks: the third one's buffer in, halves swapped and back, the sum out.
    folded = 2 * (1e-3 + 1e-2) + 3e-3 + 2 * (1e-3 + 5e-3) + 1.5e-3
    assert seconds_of(halving_doubling(3, length=64, halvings=1)) == pytest.approx(folded)


def test_one_host_talks_inside_only() -> None:
    inside = LinkCost(1e-5, 1e-9)
    plan = hierarchical(1, members_per_host=4, length=64, inter="ring")
    expected = inside_host_cost(4, size_bytes=SIZE).seconds(inside)
    assert seconds_of(plan, ranks_per_host=4, inside=inside) == pytest.approx(expected)
    # Of three pieces, two are added while the next comes.
    adding = dataclasses.replace(inside, reduce_seconds_per_byte=1e-10)
    last = expected + 0.25 * SIZE * 1e-10
    assert seconds_of(plan, ranks_per_host=4, inside=adding) == pytest.approx(last)


@pytest.mark.parametrize("inter", ["ring", "halving_doubling"])
def test_members_of_a_host_share_its_card(inter) -> None:
    hosts, members = 4, 3
    plan = hierarchical(hosts, members_per_host=members, length=12 * 64, inter=inter)
    bare = LinkCost(0.0, 1e-8)
    step = simulate_step(
        [SimulatedBucket(SIZE, 0.0, schedule_of(plan, ranks_per_host=members))],
        between=bare,
        inside=LinkCost(0.0, 1e-10),
        max_buckets_in_flight=1,
        backward_end_seconds=0.0,
    )
    # Each member's b / 3 goes through one card: as long as b on a card of its own.
    between = algorithm_cost(inter, hosts, size_bytes=SIZE).bytes_sent * 1e-8
    inside = inside_host_cost(members, size_bytes=SIZE).bytes_sent * 1e-10
    # The first to be through inside need not wait for the last.
    assert between < step.step_seconds <= (between + inside) * (1 + 1e-12)


def swaps(count: int, *, in_flight: int, link: LinkCost, factors=None, **more: float):
    """So many buckets of 10 bytes that two hosts swap in one step, all ready at once."""
    schedule = schedule_of(halving_doubling(2, length=2, halvings=0))
    return simulate_step(
        [SimulatedBucket(10.0, 0.0, schedule, **more) for _ in range(count)],
        between=link,
        max_buckets_in_flight=in_flight,
        backward_end_seconds=0.0,
        host_factors=factors,
    ).bucket_seconds.tolist()


def test_buckets_share_a_card_reckoned_by_hand() -> None:
    link = LinkCost(latency_seconds=4.0, seconds_per_byte=1.0)
    assert swaps(3, in_flight=1, link=link) == pytest.approx([14.0, 28.0, 42.0])
    # The card is busy all the time, and each bucket lands 4 s after it has left.
    assert swaps(3, in_flight=3, link=link) == pytest.approx([14.0, 24.0, 34.0])
    # The third waits for the first, while the second is on the card until 20.
    assert swaps(3, in_flight=2, link=link) == pytest.approx([14.0, 24.0, 34.0])
    # Additions delay their own bucket only.
    adding = LinkCost(4.0, 1.0, 0.5)
    assert swaps(3, in_flight=3, link=adding) == pytest.approx([19.0, 29.0, 39.0])


def test_sums_inside_a_host_go_one_by_one() -> None:
    link = LinkCost(latency_seconds=0.0, seconds_per_byte=0.1)
    # In: 0 to 5, 5 to 10. Between: 5 to 6, 10 to 11. Out: behind the second on its way in.
    done = swaps(2, in_flight=2, link=link, enter_seconds=5.0, leave_seconds=2.0)
    assert done == pytest.approx([12.0, 14.0])


def test_a_slow_host_holds_up_all() -> None:
    schedule = schedule_of(halving_doubling(4, length=4))
    step = simulate_step(
        [SimulatedBucket(0.0, ready, schedule) for ready in (2.0, 3.0)],
        between=LinkCost(0.25, 0.0),
        max_buckets_in_flight=1,
        backward_end_seconds=3.0,
        after_seconds=1.0,
        host_factors=np.array([1.0, 2.0, 1.0, 1.0]),
    )
    # The second host is ready at 4 and 6, when all has come that it needs for the first two steps.
    # What it sends then goes on to the last host and, in the third step, on to the third; and what
    # the first host gets at 0.25 comes back to the second by way of the third at 1.0.
    assert step.bucket_seconds.tolist() == pytest.approx([5.0, 7.0])
    assert step.host_seconds.tolist() == pytest.approx([7.75, 9.0, 7.5, 7.75])
    assert (step.step_seconds, step.compute_seconds) == pytest.approx((9.0, 8.0))
    assert step.exposed_seconds == pytest.approx(1.0)


@pytest.mark.parametrize("hosts", [1, 6, 64])
def test_free_links_leave_the_slowest_hosts_computing(hosts: int) -> None:
    factors = np.linspace(0.8, 1.3, hosts)
    step = simulate_step(
        [
            SimulatedBucket(SIZE, ready, schedule_of(binary_blocks(hosts, length=64 * hosts)))
            for ready in (0.1, 0.2)
        ],
        between=LinkCost(0.0, 0.0),
        max_buckets_in_flight=2,
        backward_end_seconds=0.2,
        host_factors=factors,
    )
    assert step.step_seconds == step.compute_seconds == pytest.approx(0.2 * factors.max())


# Against single pieces: hosts, plan, deviation of hosts' times, in flight, latency, bytes.
GRID = [
    (p, make, deviation, in_flight, latency, size)
    for p in (4, 5, 12)
    for make in (ring, halving_doubling, binary_blocks)
    for deviation in (0.0, 0.03, 0.1)
    for in_flight in (2, 8)
    for latency, size in ((1e-4, 1e6), (2e-3, 1e5), (1e-5, 4e6))
]


def test_against_a_simulation_of_single_pieces() -> None:
    errors = []
    random = np.random.Generator(np.random.Philox(key=[1, 2]))
    for p, make, deviation, in_flight, latency, size in GRID:
        link = LinkCost(latency, 1e-9, 1e-10)
        plan = make(p, length=960 * p)
        factors = 1.0 + deviation * random.uniform(-1.7, 1.7, size=p)
        sizes = size * random.uniform(0.2, 1.2, size=6)
        ready = 0.01 * np.arange(1, 7)
        exact = done_seconds(
            [plan] * 6,
            sizes=sizes.tolist(),
            ready=np.outer(ready, factors).tolist(),
            link=link,
            in_flight=in_flight,
        )
        step = simulate_step(
            [
                SimulatedBucket(each, at, schedule_of(plan))
                for each, at in zip(sizes, ready, strict=True)
            ],
            between=link,
            max_buckets_in_flight=in_flight,
            backward_end_seconds=0.06,
            host_factors=factors,
        )
        error = step.bucket_seconds[-1] / max(exact[-1]) - 1.0
        if deviation == 0.0 and (make is ring or p & (p - 1) == 0):
            assert error == pytest.approx(0.0, abs=1e-9)
        errors.append(error)
    assert max(map(abs, errors)) < 0.1
    assert np.mean(np.abs(errors)) < 0.004


@pytest.mark.parametrize(
    ("make", "cost"),
    [
        (ring, lambda p: ring_cost(p, size_bytes=SIZE)),
        (halving_doubling, lambda p: halving_doubling_cost(p, size_bytes=SIZE)),
    ],
)
def test_four_thousand_hosts(make: Callable[..., AllReducePlan], cost) -> None:
    p = 4096
    assert seconds_of(make(p, length=p)) == pytest.approx(cost(p).seconds(LINK))


# The planner's setup, with even replicas: no draws.
WORK = ReplicaWork(images=32, before_seconds=0.0875, backward_seconds=0.12)
LOADS = [BucketLoad(2e6 + 1e6 * number, (number + 1) / 10) for number in range(10)]


def cluster(hosts: int, *, gbit: float = 50.0, latency: float = 7e-5) -> Cluster:
    return Cluster(
        hosts, 8, inside=LinkCost(1e-5, 1 / 40e9), between=LinkCost(latency, 8e-9 / gbit)
    )


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, None])
@pytest.mark.parametrize("hosts", [1, 2, 32, 256])
def test_the_planned_step_one_bucket_at_a_time(hosts: int, algorithm) -> None:
    for gbit in (1.0, 50.0):
        settings = {"algorithm": algorithm, "max_buckets_in_flight": 1}
        planned = plan_step(WORK, LOADS, cluster(hosts, gbit=gbit), **settings)
        simulated = simulate_planned_step(WORK, LOADS, cluster(hosts, gbit=gbit), **settings)
        assert simulated.step_seconds == pytest.approx(planned.step_seconds)
        assert simulated.compute_seconds == pytest.approx(planned.compute_seconds)


@pytest.mark.parametrize("hosts", [8, 32, 256])
def test_the_planned_step_with_buckets_in_flight(hosts: int) -> None:
    # The planner has a bucket's bytes before its latencies; they take turns. At most some percent.
    for gbit in (2.0, 10.0, 50.0):
        for in_flight in (2, 4, 8):
            given = cluster(hosts, gbit=gbit)
            planned = plan_step(WORK, LOADS, given, max_buckets_in_flight=in_flight)
            simulated = simulate_planned_step(WORK, LOADS, given, max_buckets_in_flight=in_flight)
            assert simulated.step_seconds == pytest.approx(planned.step_seconds, rel=0.03)


def test_the_planned_step_of_uneven_hosts_on_average() -> None:
    uneven = dataclasses.replace(WORK, variation=0.08)
    planned = plan_step(uneven, LOADS, cluster(32))
    simulated = mean_step_seconds(uneven, LOADS, cluster(32), steps=60)
    assert simulated == pytest.approx(planned.step_seconds, rel=0.015)
    first = simulate_planned_step(uneven, LOADS, cluster(32), seed=4, step=1)
    again = simulate_planned_step(uneven, LOADS, cluster(32), seed=4, step=1)
    assert first.step_seconds == again.step_seconds
    other = simulate_planned_step(uneven, LOADS, cluster(32), seed=4, step=2)
    assert first.step_seconds != other.step_seconds


BUCKET = SimulatedBucket(SIZE, 0.0, schedule_of(ring(4, length=4)))


def run(buckets=(BUCKET,), **more):
    settings = {"between": LINK, "max_buckets_in_flight": 1, "backward_end_seconds": 0.0}
    return simulate_step(list(buckets), **{**settings, **more})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: run(()), r"buckets are of \(ranks, hosts\) \[\]"),
        (
            lambda: run((BUCKET, SimulatedBucket(1.0, 0.0, schedule_of(ring(5, length=5))))),
            r"\[\(4, 4\), \(5, 5\)\]",
        ),
        (
            lambda: run(
                [SimulatedBucket(1.0, 0.0, schedule_of(ring(4, length=4), ranks_per_host=2))]
            ),
            "inside=None: 4 ranks on 2 hosts",
        ),
        (lambda: run(max_buckets_in_flight=0), "max_buckets_in_flight=0"),
        (lambda: run(backward_end_seconds=-1.0), "backward_end_seconds=-1.0"),
        (lambda: run(after_seconds=math.nan), "after_seconds=nan"),
        (lambda: run(host_factors=np.ones(3)), r"host_factors of shape \(3,\): must be 4"),
        (lambda: run(host_factors=np.array([1, 1, 0, 1.0])), "above 0"),
        (lambda: SimulatedBucket(-1.0, 0.0, BUCKET.schedule), "size_bytes=-1.0"),
        (lambda: SimulatedBucket(1.0, 0.0, BUCKET.schedule, leave_seconds=-1), "leave_seconds=-1"),
        (lambda: mean_step_seconds(WORK, LOADS, cluster(2), steps=0), "steps=0"),
    ],
)
def test_refused(call, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        call()
