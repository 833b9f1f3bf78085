"""What the simulator says of a setup: bucket size, buckets in flight, algorithm, and how far off.

Steps are simulated with computing times drawn anew for each (`--seed`); the same draws for all that
is compared. Buffers by themselves are simulated on hosts that are all ready.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from _plan_rows import Setup

from tf_largebatch.core.cost_model import FlatAlgorithm
from tf_largebatch.core.scaling_plan import (
    ALGORITHMS,
    BucketLoad,
    Cluster,
    ReplicaWork,
    plan_step,
)
from tf_largebatch.core.simulated_plan import mean_step_seconds, simulate_planned_step

_STEPS = 3
_AS_GOOD = 0.001
_KIB, _MIB = 2**10, 2**20
_BUCKET_BYTES = (256 * _KIB, _MIB, 2 * _MIB, 4 * _MIB, 8 * _MIB, 16 * _MIB, 32 * _MIB, 2**40)
_IN_FLIGHT = (1, 2, 4, 8, 16)
_BUFFER_BYTES = tuple(_KIB * 4**power for power in range(10))  # to 256 MiB
_NO_WORK = ReplicaWork(images=1, before_seconds=1e-12, backward_seconds=0.0)


def answers_of(setup: Setup, hosts: int, *, seed: int) -> dict[str, Any]:
    """All that is asked of the simulator; times in milliseconds.

    Of what is within a thousandth of the fastest, the largest bucket and the fewest in flight are
    the best.
    """
    cluster = setup.cluster(hosts)
    in_flight = setup.max_buckets_in_flight
    sizes = [
        _step(setup, cluster, size, in_flight, setup.algorithm, seed)
        | {"bucket_bytes": size if size < 2**40 else None}
        for size in _BUCKET_BYTES
    ]
    best_size = _best(sizes, "bucket_bytes")
    flights = [
        _step(setup, cluster, best_size or 2**40, count, setup.algorithm, seed)
        | {"max_buckets_in_flight": count}
        for count in _IN_FLIGHT
    ]
    algorithms = [
        _step(setup, cluster, setup.bucket_bytes, in_flight, name, seed) | {"algorithm": name}
        for name in ALGORITHMS
    ]
    buffers = buffer_rows(cluster)
    return {
        "hosts": hosts,
        "seed": seed,
        "steps": _STEPS,
        "bucket_bytes": sizes,
        "best_bucket_bytes": best_size,
        "max_buckets_in_flight": flights,
        "best_max_buckets_in_flight": _best(flights[::-1], "max_buckets_in_flight"),
        "algorithms": algorithms,
        "buffers": buffers,
        "ring_is_faster_from_bytes": first_size_for_ring(buffers),
    }


def _step(
    setup: Setup,
    cluster: Cluster,
    bucket_bytes: int,
    in_flight: int,
    algorithm: FlatAlgorithm | None,
    seed: int,
) -> dict[str, float]:
    buckets = setup.buckets(bucket_bytes)
    simulated = mean_step_seconds(
        setup.work,
        buckets,
        cluster,
        algorithm=algorithm,
        max_buckets_in_flight=in_flight,
        seed=seed,
        steps=_STEPS,
    )
    planned = plan_step(
        setup.work, buckets, cluster, algorithm=algorithm, max_buckets_in_flight=in_flight
    )
    return {
        "buckets": len(buckets),
        "simulated_ms": 1e3 * simulated,
        "planned_ms": 1e3 * planned.step_seconds,
    }


def _best(rows: Sequence[dict[str, Any]], name: str) -> Any:
    """The last row's `name` of those that are within a thousandth of the fastest."""
    limit = (1.0 + _AS_GOOD) * min(row["simulated_ms"] for row in rows)
    return next(row[name] for row in reversed(rows) if row["simulated_ms"] <= limit)


def buffer_rows(cluster: Cluster) -> list[dict[str, Any]]:
    """One buffer between hosts, for each size and algorithm."""
    bare = Cluster(cluster.hosts, 1, cluster.inside, cluster.between)
    rows = []
    for size in _BUFFER_BYTES:
        times = {
            name: 1e3
            * simulate_planned_step(
                _NO_WORK,
                [BucketLoad(size, 0.0)],
                bare,
                algorithm=name,
                max_buckets_in_flight=1,
            ).step_seconds
            for name in ALGORITHMS
        }
        rows.append({"size_bytes": size, "simulated_ms": times})
    return rows


def first_size_for_ring(rows: Sequence[dict[str, Any]]) -> int | None:
    """The smallest size from which on the ring is faster than both others; None if it never is."""
    first = None
    for row in reversed(rows):
        ring, *others = (row["simulated_ms"][name] for name in ALGORITHMS)
        if ring >= min(others):
            break
        first = row["size_bytes"]
    return first
