"""A planned step, run by the simulator: the same arguments as `scaling_plan.plan_step`."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from tf_largebatch.core.collective_plan import AllReducePlan, binary_blocks, halving_doubling, ring
from tf_largebatch.core.compute_variation import compute_factors
from tf_largebatch.core.cost_model import FlatAlgorithm, best_halvings
from tf_largebatch.core.scaling import require_count
from tf_largebatch.core.scaling_plan import (
    BucketLoad,
    Cluster,
    ReplicaWork,
    fastest_algorithm,
    inside_host_seconds,
)
from tf_largebatch.core.step_simulation import SimulatedBucket, SimulatedStep, simulate_step
from tf_largebatch.core.transfer_rounds import Schedule, schedule_of

_MOST_SCHEDULES = 16  # of 4,096 hosts some megabytes each


def simulate_planned_step(
    work: ReplicaWork,
    buckets: Sequence[BucketLoad],
    cluster: Cluster,
    *,
    algorithm: FlatAlgorithm | None = None,
    max_buckets_in_flight: int = 4,
    seed: int = 0,
    step: int = 0,
) -> SimulatedStep:
    """One step of `simulate_step`, with replicas' times drawn for (seed, step).

    Plans are between hosts, each of which sums its replicas' gradients before and spreads the
    result after, as in `plan_step`.

    Args:
        work: of a replica.
        buckets: one or more, in the order in which they become ready.
        cluster: the hosts.
        algorithm: between hosts; None is, for each bucket, the fastest by the cost model.
        max_buckets_in_flight: a bucket waits for the one this many before it.
        seed, step: of the draws.

    Raises:
        ConfigurationError: an unknown algorithm, no bucket, or a number out of range.
    """
    return simulate_step(
        [_simulated(bucket, work, cluster, algorithm) for bucket in buckets],
        between=cluster.between,
        max_buckets_in_flight=max_buckets_in_flight,
        backward_end_seconds=work.before_seconds + work.backward_seconds,
        after_seconds=work.after_seconds,
        host_factors=compute_factors(
            cluster.hosts,
            replicas_per_host=cluster.replicas_per_host,
            variation=work.variation,
            seed=seed,
            step=step,
        ),
    )


def mean_step_seconds(
    work: ReplicaWork,
    buckets: Sequence[BucketLoad],
    cluster: Cluster,
    *,
    algorithm: FlatAlgorithm | None = None,
    max_buckets_in_flight: int = 4,
    seed: int = 0,
    steps: int = 3,
) -> float:
    """The mean of the first `steps` steps; arguments and errors of `simulate_planned_step`."""
    total = sum(
        simulate_planned_step(
            work,
            buckets,
            cluster,
            algorithm=algorithm,
            max_buckets_in_flight=max_buckets_in_flight,
            seed=seed,
            step=step,
        ).step_seconds
        for step in range(require_count("steps", steps))
    )
    return total / steps


def _simulated(
    bucket: BucketLoad, work: ReplicaWork, cluster: Cluster, algorithm: FlatAlgorithm | None
) -> SimulatedBucket:
    size = bucket.size_bytes
    name = algorithm or fastest_algorithm(cluster, size_bytes=size)
    halvings = None
    if name == "halving_doubling":
        halvings = best_halvings(cluster.hosts, size_bytes=size, link=cluster.between)
    enter, leave = inside_host_seconds(cluster, size_bytes=size)
    return SimulatedBucket(
        size_bytes=size,
        ready_seconds=work.before_seconds + work.backward_seconds * bucket.ready_share,
        schedule=_schedule(name, cluster.hosts, halvings),
        enter_seconds=enter,
        leave_seconds=leave,
    )


@functools.lru_cache(_MOST_SCHEDULES)
def _schedule(algorithm: FlatAlgorithm, hosts: int, halvings: int | None) -> Schedule:
    # Divides into the pieces of all plans: parts are hosts or a power of two up to their number.
    length = hosts * 2 ** hosts.bit_length()
    plan: AllReducePlan
    if algorithm == "ring":
        plan = ring(hosts, length=length)
    elif algorithm == "binary_blocks":
        plan = binary_blocks(hosts, length=length)
    else:
        plan = halving_doubling(hosts, length=length, halvings=halvings)
    return schedule_of(plan)
