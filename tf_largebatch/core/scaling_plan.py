"""What a training step takes on a cluster: computing, all-reduce, and what backward hides of it.

The model, for k replicas on p hosts of L each:

    step = compute + exposed
    compute = (before + backward + after) * (1 + variation * expected maximum of k normals)

`before`, `backward` and `after` are what a replica alone takes on average; each step waits for the
slowest. Gradients become ready, and travel, in buckets. Bucket i starts when it is ready and bucket
i - c is done, with c the most in flight; buckets share a host's link in turn:

    start_i = max(ready_i, done_(i-c))
    sent_i = max(start_i + enter_i, sent_(i-1)) + bytes of plan_i * seconds a byte
    done_i = sent_i + steps of plan_i * latency + leave_i

`enter` and `leave` are the sums inside a host (`inside_host_cost`), before and after those between
hosts, which move `2 b (p - 1) / p` bytes a host, however many replicas share its network card. What
ends after backward is exposed. One host has no plan between hosts, one replica nothing at all.

What is modelled of uneven replicas is that they compute in normal times, each step anew; what is
not: the order of latencies and bytes within a bucket's plan (`step_simulation` has it), switches in
common, losses, reading of data, validation and checkpoints, and the processor time that
communication takes from backward where both need the same cores.

Sources: Goyal et al. 2017 (arXiv 1706.02677), section 4; Yamazaki et al. 2019 (arXiv 1903.12650),
section III-C; Thakur, Rabenseifner, Gropp 2005.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

from tf_largebatch.core.buckets import assign_buckets
from tf_largebatch.core.compute_variation import checked_variation, slowest_factor
from tf_largebatch.core.cost_model import (
    FlatAlgorithm,
    LinkCost,
    PlanCost,
    algorithm_cost,
    best_halvings,
    inside_host_cost,
)
from tf_largebatch.core.scaling import require_count, require_number

ALGORITHMS: tuple[FlatAlgorithm, ...] = ("ring", "halving_doubling", "binary_blocks")


@dataclass(frozen=True)
class Cluster:
    """Hosts alike, with replicas alike.

    Args:
        hosts: p, at least 1.
        replicas_per_host: L, at least 1.
        inside: links between replicas of a host.
        between: a host's link to the network, for all its replicas together.

    Raises:
        ConfigurationError: a count is no integer or below 1.
    """

    hosts: int
    replicas_per_host: int
    inside: LinkCost
    between: LinkCost

    def __post_init__(self) -> None:
        require_count("hosts", self.hosts)
        require_count("replicas_per_host", self.replicas_per_host)

    @property
    def replicas(self) -> int:
        return self.hosts * self.replicas_per_host


@dataclass(frozen=True)
class ReplicaWork:
    """What a replica does in a step, on average and without communication.

    Args:
        images: its part of the global batch.
        before_seconds: until backward begins: input, forward.
        backward_seconds: during which gradients become ready.
        after_seconds: once they are summed: the optimizer's update.
        variation: deviation of a replica's computing time from step to step, relative to its mean;
            0 to 0.3.

    Raises:
        ConfigurationError: a number is out of range, or all seconds are 0.
    """

    images: int
    before_seconds: float
    backward_seconds: float
    after_seconds: float = 0.0
    variation: float = 0.0

    def __post_init__(self) -> None:
        require_count("images", self.images)
        for name in ("before_seconds", "backward_seconds", "after_seconds"):
            require_number(name, getattr(self, name), may_equal_minimum=True)
        checked_variation(self.variation)
        require_number("before_seconds + backward_seconds + after_seconds", self.seconds)

    @property
    def seconds(self) -> float:
        """All of it, of a replica alone."""
        return self.before_seconds + self.backward_seconds + self.after_seconds


@dataclass(frozen=True)
class Gradient:
    """A variable's gradient.

    Args:
        size_bytes: as it travels.
        backward_share: of backward's time, which its layer takes before it is ready.
    """

    size_bytes: int
    backward_share: float


@dataclass(frozen=True)
class BucketLoad:
    """Gradients that travel together.

    Args:
        size_bytes: as they travel.
        ready_share: the part of backward after which all of them are ready, 0 to 1.
    """

    size_bytes: float
    ready_share: float


def bucket_loads(gradients: Sequence[Gradient], *, bucket_bytes: int) -> list[BucketLoad]:
    """The buckets of `assign_buckets`, for gradients in the order in which backward makes them.

    Shares of backward are taken relative to their sum; where that is 0, all count alike.
    """
    sizes = [gradient.size_bytes for gradient in gradients]
    shares = [gradient.backward_share for gradient in gradients]
    total = sum(shares)
    if not total:
        shares, total = [1.0] * len(shares), float(len(shares))
    ready, done = [], 0.0
    for share in shares:
        done += share
        ready.append(min(1.0, done / total))
    buckets = assign_buckets(sizes, [None] * len(sizes), bucket_bytes=bucket_bytes)
    return [
        BucketLoad(sum(sizes[place] for place in bucket), max(ready[place] for place in bucket))
        for bucket in buckets
    ]


def between_hosts_cost(
    algorithm: FlatAlgorithm, cluster: Cluster, *, size_bytes: float
) -> PlanCost:
    """The plan between hosts of a buffer of `size_bytes` on each replica.

    Halving/doubling halves as often as is the fastest. The bytes are a host's, all its replicas'
    together.

    Raises:
        ConfigurationError: an unknown algorithm, or a size out of range.
    """
    halvings = None
    if algorithm == "halving_doubling":
        halvings = best_halvings(cluster.hosts, size_bytes=size_bytes, link=cluster.between)
    return algorithm_cost(algorithm, cluster.hosts, size_bytes=size_bytes, halvings=halvings)


def fastest_algorithm(cluster: Cluster, *, size_bytes: float) -> FlatAlgorithm:
    """Of `ALGORITHMS`, that with the least seconds between hosts; of equals, the first."""
    return min(
        ALGORITHMS,
        key=lambda name: between_hosts_cost(name, cluster, size_bytes=size_bytes).seconds(
            cluster.between
        ),
    )


def all_reduce_seconds(
    cluster: Cluster, *, size_bytes: float, algorithm: FlatAlgorithm | None = None
) -> float:
    """One buffer, with nothing else on the links: inside hosts, between them, and back.

    Args:
        cluster: the hosts.
        size_bytes: on each replica.
        algorithm: between hosts; None is the fastest.

    Raises:
        ConfigurationError: an unknown algorithm, or a size out of range.
    """
    return _done_seconds(
        [BucketLoad(size_bytes, 0.0)],
        cluster,
        ready_seconds=[0.0],
        algorithm=algorithm,
        max_buckets_in_flight=1,
    )


@dataclass(frozen=True)
class StepPlan:
    """A step of `plan_step`, in seconds.

    Attributes:
        images: of all replicas.
        alone_seconds: what a replica alone takes.
        compute_seconds: what the slowest replica computes, on average.
        all_reduce_seconds: of all buckets, were they ready at once and nothing else to do.
        step_seconds: the whole step.
    """

    images: int
    alone_seconds: float
    compute_seconds: float
    all_reduce_seconds: float
    step_seconds: float

    @property
    def exposed_seconds(self) -> float:
        """What the step waits for communication."""
        return self.step_seconds - self.compute_seconds

    @property
    def hidden_share(self) -> float:
        """`(compute + all_reduce - step) / all_reduce`; 1 where there is nothing to hide."""
        if not self.all_reduce_seconds:
            return 1.0
        return 1.0 - self.exposed_seconds / self.all_reduce_seconds

    @property
    def images_per_second(self) -> float:
        return self.images / self.step_seconds

    @property
    def efficiency(self) -> float:
        """Images a second of a replica, relative to one that trains alone."""
        return self.alone_seconds / self.step_seconds


def plan_step(
    work: ReplicaWork,
    buckets: Sequence[BucketLoad],
    cluster: Cluster,
    *,
    algorithm: FlatAlgorithm | None = None,
    max_buckets_in_flight: int = 4,
) -> StepPlan:
    """The step by the formulas at the top of this module.

    Args:
        work: of a replica.
        buckets: in the order in which they become ready (`bucket_loads`).
        cluster: the hosts.
        algorithm: between hosts, for all buckets; None is the fastest for each.
        max_buckets_in_flight: c.

    Raises:
        ConfigurationError: an unknown algorithm, or a number out of range.
    """
    in_flight = require_count("max_buckets_in_flight", max_buckets_in_flight)
    factor = slowest_factor(cluster.replicas, variation=work.variation)
    before, backward = work.before_seconds * factor, work.backward_seconds * factor
    ready = [before + backward * bucket.ready_share for bucket in buckets]
    done_seconds = functools.partial(
        _done_seconds, buckets, cluster, algorithm=algorithm, max_buckets_in_flight=in_flight
    )
    summed = done_seconds(ready_seconds=ready)
    return StepPlan(
        images=work.images * cluster.replicas,
        alone_seconds=work.seconds,
        compute_seconds=work.seconds * factor,
        all_reduce_seconds=done_seconds(ready_seconds=[0.0] * len(buckets)),
        step_seconds=max(summed, before + backward) + work.after_seconds * factor,
    )


def network_bits_per_second(cluster: Cluster, *, size_bytes: float, seconds: float) -> float:
    """The rate at which a host's link carries an all-reduce of `size_bytes` in `seconds`.

    `8 * 2 b (p - 1) / p / seconds`, in each direction. With backward's time it is what must be
    there for the all-reduce to keep pace (Goyal et al. 2017, section 4). 0 for one host.
    """
    moved = algorithm_cost("ring", cluster.hosts, size_bytes=size_bytes).bytes_sent
    return 8.0 * moved / require_number("seconds", seconds)


def inside_host_seconds(cluster: Cluster, *, size_bytes: float) -> tuple[float, float]:
    """What the sums inside a host take before those between hosts, and after them."""
    both = inside_host_cost(cluster.replicas_per_host, size_bytes=size_bytes)
    half = PlanCost(both.steps // 2, both.bytes_sent / 2, 0.0).seconds(cluster.inside)
    return half + both.bytes_reduced * cluster.inside.reduce_seconds_per_byte, half


def _done_seconds(
    buckets: Sequence[BucketLoad],
    cluster: Cluster,
    *,
    ready_seconds: Sequence[float],
    algorithm: FlatAlgorithm | None,
    max_buckets_in_flight: int,
) -> float:
    """When the last bucket is done."""
    bytes_only = dataclasses.replace(cluster.between, latency_seconds=0.0)
    sent, done = 0.0, [0.0] * max_buckets_in_flight  # of the buckets before the first
    for bucket, ready in zip(buckets, ready_seconds, strict=True):
        size = bucket.size_bytes
        name = algorithm or fastest_algorithm(cluster, size_bytes=size)
        cost = between_hosts_cost(name, cluster, size_bytes=size)
        enter, leave = inside_host_seconds(cluster, size_bytes=size)
        start = max(ready, done[-max_buckets_in_flight])
        sent = max(start + enter, sent) + cost.seconds(bytes_only)
        done.append(sent + cost.steps * cluster.between.latency_seconds + leave)
    return max(done)
