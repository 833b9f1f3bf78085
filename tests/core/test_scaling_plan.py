"""The planned step: closed forms, cases reckoned by hand, what more of anything may do."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_largebatch.core.compute_variation import slowest_factor
from tf_largebatch.core.cost_model import LinkCost, algorithm_cost, hierarchical_cost
from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.core.scaling_plan import (
    ALGORITHMS,
    BucketLoad,
    Cluster,
    Gradient,
    ReplicaWork,
    all_reduce_seconds,
    bucket_loads,
    fastest_algorithm,
    network_bits_per_second,
    plan_step,
)

FREE = LinkCost(0.0, 0.0)
LINK = LinkCost(latency_seconds=1e-4, seconds_per_byte=1e-9, reduce_seconds_per_byte=1e-10)
WORK = ReplicaWork(images=32, before_seconds=0.08, backward_seconds=0.12, after_seconds=0.01)
BUCKETS = [BucketLoad(4e6, 0.25), BucketLoad(8e6, 0.5), BucketLoad(8e6, 0.75), BucketLoad(1e6, 1.0)]


def cluster(hosts: int, *, members: int = 1, link: LinkCost = LINK) -> Cluster:
    return Cluster(hosts, members, inside=LinkCost(1e-5, 1e-11), between=link)


def test_one_replica_has_nothing_to_send() -> None:
    plan = plan_step(WORK, BUCKETS, cluster(1))
    assert plan.step_seconds == pytest.approx(0.21)
    assert plan.all_reduce_seconds == plan.exposed_seconds == 0.0
    assert plan.hidden_share == plan.efficiency == 1.0
    assert plan.images_per_second == pytest.approx(32 / 0.21)
    assert network_bits_per_second(cluster(1), size_bytes=1e8, seconds=0.1) == 0.0


def test_one_host_sums_inside_only() -> None:
    # Two steps of 10 us and of 3/4 of a buffer each, for the last bucket, which backward cannot
    # hide; nothing goes between hosts, however slow that would be.
    slow = cluster(1, members=4, link=LinkCost(10.0, 1.0))
    plan = plan_step(WORK, BUCKETS, slow)
    assert plan.exposed_seconds == pytest.approx(2e-5 + 2 * 0.75e6 * 1e-11)


@pytest.mark.parametrize("hosts", [2, 5, 64, 4096])
def test_free_links_leave_what_the_slowest_replica_computes(hosts: int) -> None:
    free = Cluster(hosts, 8, inside=FREE, between=FREE)
    even = plan_step(WORK, BUCKETS, free)
    assert even.efficiency == pytest.approx(1.0)
    assert even.images_per_second == pytest.approx(8 * hosts * 32 / 0.21)
    uneven = plan_step(dataclasses.replace(WORK, variation=0.1), BUCKETS, free)
    assert uneven.efficiency == pytest.approx(1 / slowest_factor(8 * hosts, variation=0.1))
    assert uneven.exposed_seconds == pytest.approx(0.0)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("hosts", [2, 3, 8, 12, 512])
def test_one_buffer_takes_what_the_cost_model_says(hosts: int, algorithm: str) -> None:
    seconds = all_reduce_seconds(cluster(hosts), size_bytes=3e7, algorithm=algorithm)  # type: ignore[arg-type]
    halvings = range(hosts.bit_length()) if algorithm == "halving_doubling" else [None]
    costs = [
        algorithm_cost(algorithm, hosts, size_bytes=3e7, halvings=each)  # type: ignore[arg-type]
        for each in halvings
    ]
    assert seconds == pytest.approx(min(cost.seconds(LINK) for cost in costs))


def test_members_of_a_host_share_its_link() -> None:
    # L members send a part each, of b / L: through one link that is as long as b.
    inside = Cluster(8, 4, inside=LINK, between=FREE)
    between = Cluster(8, 4, inside=FREE, between=LINK)
    size = 4e6
    seconds = [
        all_reduce_seconds(each, size_bytes=size, algorithm="ring") for each in (inside, between)
    ]
    alike = hierarchical_cost(8, members_per_host=4, size_bytes=size, inter="ring").seconds(LINK)
    bytes_only = dataclasses.replace(LINK, latency_seconds=0.0)
    part = algorithm_cost("ring", 8, size_bytes=size / 4).seconds(bytes_only)
    assert sum(seconds) == pytest.approx(alike + 3 * part)


def test_steps_reckoned_by_hand() -> None:
    # Two hosts: a swap of b bytes in a step, so that 4 MB take 4 s of link and 1 s of latency.
    link = LinkCost(latency_seconds=1.0, seconds_per_byte=1e-6)
    work = ReplicaWork(images=1, before_seconds=2.0, backward_seconds=8.0, after_seconds=0.5)
    buckets = [BucketLoad(4e6, 0.25), BucketLoad(4e6, 0.5), BucketLoad(2e6, 1.0)]

    def step(in_flight: int) -> float:
        return plan_step(
            work,
            buckets,
            cluster(2, link=link),
            algorithm="halving_doubling",
            max_buckets_in_flight=in_flight,
        ).step_seconds

    # Ready at 4, 6 and 10. One at a time: 4 to 9, 9 to 14, 14 to 17.
    assert step(1) == pytest.approx(17.5)
    # Two: the link is busy from 4 to 8, 8 to 12 and 12 to 14, and the last lands at 15.
    assert step(2) == pytest.approx(15.5)
    assert step(8) == pytest.approx(15.5)


def test_what_is_hidden() -> None:
    slow = cluster(8, link=LinkCost(0.0, 1e-8))
    plan = plan_step(WORK, [BucketLoad(1e6, 1.0)], slow, algorithm="ring")
    assert plan.all_reduce_seconds == pytest.approx(1e6 * 1e-8 * 2 * 7 / 8)
    assert plan.hidden_share == pytest.approx(0.0)
    early = plan_step(WORK, [BucketLoad(1e6, 0.1)], slow, algorithm="ring")
    assert early.hidden_share == pytest.approx(1.0)
    assert early.step_seconds == pytest.approx(WORK.seconds)


def test_the_fastest_algorithm_is_none_slower() -> None:
    for hosts in (2, 6, 32, 44, 1000):
        for size in (1e3, 1e5, 1e7, 1e9):
            seconds = {
                name: all_reduce_seconds(cluster(hosts), size_bytes=size, algorithm=name)
                for name in ALGORITHMS
            }
            name = fastest_algorithm(cluster(hosts), size_bytes=size)
            assert seconds[name] == min(seconds.values())
            assert all_reduce_seconds(cluster(hosts), size_bytes=size) == seconds[name]


def test_buckets_are_ready_with_their_last_gradient() -> None:
    gradients = [Gradient(100, 1.0), Gradient(900, 2.0), Gradient(2000, 1.0), Gradient(50, 0.0)]
    # The first bucket closes at an eighth of 1600 bytes; what is larger stands by itself.
    assert bucket_loads(gradients, bucket_bytes=1600) == [
        BucketLoad(100, 0.25),
        BucketLoad(900, 0.75),
        BucketLoad(2000, 1.0),
        BucketLoad(50, 1.0),
    ]
    assert bucket_loads(gradients, bucket_bytes=10_000) == [BucketLoad(3050, 1.0)]
    even = bucket_loads([Gradient(8, 0.0)] * 4, bucket_bytes=8)
    assert [load.ready_share for load in even] == [0.25, 0.5, 0.75, 1.0]


def test_the_papers_sanity_check_of_the_network() -> None:
    # Goyal et al. 2017: about 2 x 100 MB in 125 ms are 12.8 Gbit/s at the peak, for many servers.
    rate = network_bits_per_second(cluster(10**6), size_bytes=100e6, seconds=0.125)
    assert rate == pytest.approx(12.8e9, rel=1e-5)
    assert network_bits_per_second(cluster(2), size_bytes=1e6, seconds=1.0) == pytest.approx(8e6)


positive = st.floats(1e-9, 1e-2)


@settings(deadline=None, max_examples=100)
@given(
    exponent=st.integers(0, 8),
    latency=positive,
    per_byte=st.floats(1e-12, 1e-7),
    in_flight=st.integers(1, 6),
    variation=st.floats(0, 0.25),
    algorithm=st.sampled_from([*ALGORITHMS, None]),
)
def test_more_of_anything_that_costs_is_no_faster(
    exponent: int, latency: float, per_byte: float, in_flight: int, variation: float, algorithm
) -> None:
    link = LinkCost(latency, per_byte)
    work = dataclasses.replace(WORK, variation=variation)

    def seconds(
        hosts: int = 2**exponent, link: LinkCost = link, work=work, in_flight: int = in_flight
    ) -> float:
        return plan_step(
            work,
            BUCKETS,
            cluster(hosts, members=2, link=link),
            algorithm=algorithm,
            max_buckets_in_flight=in_flight,
        ).step_seconds

    base = seconds() * (1 - 1e-12)
    assert seconds(link=LinkCost(2 * latency, per_byte)) >= base
    assert seconds(link=LinkCost(latency, 2 * per_byte)) >= base
    assert seconds(work=dataclasses.replace(work, variation=variation + 0.05)) >= base
    assert seconds(work=dataclasses.replace(work, backward_seconds=0.2)) >= base
    assert seconds(hosts=2 * 2**exponent) >= base
    assert seconds(in_flight=in_flight + 1) * (1 - 1e-12) <= seconds()


@settings(deadline=None, max_examples=100)
@given(hosts=st.integers(1, 3000), in_flight=st.integers(1, 6), variation=st.floats(0, 0.3))
def test_a_step_is_between_its_bounds(hosts: int, in_flight: int, variation: float) -> None:
    work = dataclasses.replace(WORK, variation=variation)
    plan = plan_step(work, BUCKETS, cluster(hosts, members=2), max_buckets_in_flight=in_flight)
    assert plan.compute_seconds == pytest.approx(
        0.21 * slowest_factor(2 * hosts, variation=variation)
    )
    assert plan.step_seconds >= plan.compute_seconds
    serial = plan.compute_seconds + plan.all_reduce_seconds
    assert plan.step_seconds <= serial * (1 + 1e-12)
    assert 0.0 <= plan.hidden_share <= 1.0
    assert plan.efficiency == pytest.approx(0.21 / plan.step_seconds)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cluster(0), "hosts=0"),
        (lambda: cluster(1, members=0), "replicas_per_host=0"),
        (lambda: ReplicaWork(0, 1.0, 1.0), "images=0"),
        (lambda: ReplicaWork(1, -1.0, 1.0), "before_seconds=-1.0"),
        (lambda: ReplicaWork(1, 0.0, math.inf), "backward_seconds=inf"),
        (lambda: ReplicaWork(1, 0.0, 0.0), r"before_seconds \+ backward_seconds \+ after_seconds="),
        (lambda: ReplicaWork(1, 1.0, 1.0, variation=0.5), "variation=0.5"),
        (
            lambda: plan_step(WORK, BUCKETS, cluster(2), max_buckets_in_flight=0),
            "max_buckets_in_flight=0",
        ),
        (
            lambda: plan_step(WORK, BUCKETS, cluster(2), algorithm="tree"),  # type: ignore[arg-type]
            "algorithm='tree'",
        ),
        (lambda: all_reduce_seconds(cluster(2), size_bytes=-1), "size_bytes=-1"),
        (
            lambda: network_bits_per_second(cluster(2), size_bytes=1, seconds=0.0),
            "seconds=0.0",
        ),
    ],
)
def test_refused(call, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        call()
