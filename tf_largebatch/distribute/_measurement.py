"""Measures, once at start, what an all-reduce costs between the workers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from tf_largebatch.core.algorithm_choice import (
    LARGEST_MEASURED_BYTES,
    AllReduceCosts,
    Candidate,
    plan_cost_of,
)
from tf_largebatch.core.cost_model import LinkCost, PlanCost

_SMALL_BYTES, _LARGE_BYTES = 2**10, LARGEST_MEASURED_BYTES
_WARMUPS, _REPEATS = 1, 5
# A call of TensorFlow's ring that will take longer than this is predicted instead of measured.
_LONGEST_CALL_SECONDS = 0.1


def measure_costs(
    prepare: Callable[[Candidate, int], Callable[[], object]],
    *,
    agree: Callable[[Sequence[float]], Sequence[float]],
    num_workers: int,
    replicas_per_worker: int,
) -> AllReduceCosts:
    """The costs as all workers see them; every worker must call this, and all get equal ones.

    What a call costs by itself is timed without any plan, and a step from a plan of few bytes, all
    of which are latency; a byte from one of many. TensorFlow's own all-reduce is timed at both
    sizes.

    Args:
        prepare: makes, of a candidate and a size in bytes, a function that runs one all-reduce; of
            no bytes, one that does nothing else than such a function does.
        agree: takes this worker's seconds to the largest of all workers'.
        num_workers: of the cluster.
        replicas_per_worker: devices of a worker.
    """

    def seconds_of(candidate: Candidate, size_bytes: int) -> float:
        return agree([_median_seconds(prepare(candidate, size_bytes))])[0]

    def cost_of(candidate: Candidate, size_bytes: float) -> PlanCost:
        return plan_cost_of(candidate, num_workers, replicas_per_worker, size_bytes=size_bytes)

    exponent = num_workers.bit_length() - 1
    latency_bound = Candidate("halving_doubling", 0)
    byte_bound = Candidate("halving_doubling", max(0, exponent - 1))
    overhead = seconds_of(latency_bound, 0)
    small, large = cost_of(latency_bound, _SMALL_BYTES), cost_of(byte_bound, _LARGE_BYTES)
    latency = max(0.0, seconds_of(latency_bound, _SMALL_BYTES) - overhead) / small.steps
    large_seconds = seconds_of(byte_bound, _LARGE_BYTES) - overhead - latency * large.steps
    link = LinkCost(
        latency_seconds=latency, seconds_per_byte=max(0.0, large_seconds) / large.bytes_sent
    )
    ring = cost_of(Candidate("ring"), 1.0)
    own_seconds = overhead + latency * ring.steps
    own_seconds_per_byte = link.seconds_per_byte * ring.bytes_sent
    if own_seconds < _LONGEST_CALL_SECONDS:
        own_seconds = seconds_of(Candidate("tensorflow"), _SMALL_BYTES)
        more_seconds = max(0.0, seconds_of(Candidate("tensorflow"), _LARGE_BYTES) - own_seconds)
        # It sends no more than our ring, and copies less: a larger figure is a disturbed one.
        measured = more_seconds / (_LARGE_BYTES - _SMALL_BYTES)
        own_seconds_per_byte = min(own_seconds_per_byte, measured)
    return AllReduceCosts(
        num_workers=num_workers,
        replicas_per_worker=replicas_per_worker,
        link=link,
        overhead_seconds=overhead,
        tensorflow_seconds=own_seconds,
        tensorflow_seconds_per_byte=own_seconds_per_byte,
    )


def _median_seconds(run: Callable[[], object]) -> float:
    for _ in range(_WARMUPS):
        run()
    seconds = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)
