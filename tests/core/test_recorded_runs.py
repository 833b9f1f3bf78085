"""The simulated step against runs of 4 to 32 processes, as recorded on two cores."""

from __future__ import annotations

import pytest

from tf_largebatch.core.collective_plan import halving_doubling, ring
from tf_largebatch.core.cost_model import LinkCost, best_halvings
from tf_largebatch.core.scaling_plan import BucketLoad, Gradient, bucket_loads
from tf_largebatch.core.step_simulation import SimulatedBucket, simulate_step
from tf_largebatch.core.transfer_rounds import schedule_of

# Medians in milliseconds of p processes on the same 2 cores: single buffers, and buckets on 4
# workers, by the commands in the README's chapter on sums of gradients; 8 workers by
#     python tools/benchmark_overlap.py --workers=8 --all_reduce=halving_doubling \
#         --max_buckets_in_flight=2 --repeats=6
# There is no network but a delay, and all workers share the cores: a call, a step and a MiB of a
# worker are taken to cost in proportion to p. They are fitted to 4 workers without delay alone; all
# else is predicted.
CALL_MS, STEP_MS, MIB_MS = 6.0, 1.5, 7.0  # for 4 workers
FITTED = [  # KiB, ring, halving/doubling
    (1, 15.3, 9.8),
    (32, 15.0, 9.1),
    (256, 17.8, 12.4),
    (1024, 25.9, 20.6),
]
DELAYED = [  # workers, one-way delay in ms, KiB, halving/doubling
    (16, 5, 1, 84.0),
    (16, 5, 256, 110.0),
    (32, 20, 1, 327.0),
    (32, 20, 256, 371.0),
]


def recorded_link(workers: int, delay_ms: float) -> LinkCost:
    scale = 1e-3 * workers / 4
    return LinkCost(STEP_MS * scale + 1e-3 * delay_ms, MIB_MS * scale / 2**20)


def recorded_step(
    loads: list[BucketLoad],
    *,
    workers: int,
    delay_ms: float = 0.0,
    algorithm: str = "halving_doubling",
    in_flight: int = 1,
    before_ms: float = 0.0,
    backward_ms: float = 0.0,
) -> float:
    """Milliseconds of a step of these buckets."""
    link = recorded_link(workers, delay_ms)
    buckets = []
    for load in loads:
        if algorithm == "ring":
            plan = ring(workers, length=workers)
        else:
            halvings = best_halvings(workers, size_bytes=load.size_bytes, link=link)
            plan = halving_doubling(workers, length=workers, halvings=halvings)
        ready = 1e-3 * (before_ms + backward_ms * load.ready_share)
        call = 1e-3 * CALL_MS * workers / 4
        buckets.append(
            SimulatedBucket(load.size_bytes, ready, schedule_of(plan), enter_seconds=call)
        )
    step = simulate_step(
        buckets,
        between=link,
        max_buckets_in_flight=in_flight,
        backward_end_seconds=1e-3 * (before_ms + backward_ms),
    )
    return 1e3 * step.step_seconds


def test_recorded_all_reduces_without_delay_are_fitted() -> None:
    for kib, ring_ms, halving_ms in FITTED:
        loads = [BucketLoad(1024 * kib, 0.0)]
        simulated = recorded_step(loads, workers=4, algorithm="ring")
        assert simulated == pytest.approx(ring_ms, rel=0.09)
        assert recorded_step(loads, workers=4) == pytest.approx(halving_ms, rel=0.09)


@pytest.mark.parametrize(("workers", "delay", "kib", "measured"), DELAYED)
def test_recorded_all_reduces_with_delay_are_predicted(
    workers: int, delay: float, kib: int, measured: float
) -> None:
    simulated = recorded_step([BucketLoad(1024 * kib, 0.0)], workers=workers, delay_ms=delay)
    # Too low: by 13 and 19 % of 16 workers, by 25 and 36 % of 32, which get into each other's way
    # on two cores by more than in proportion.
    assert -0.4 < simulated / measured - 1.0 < 0.0
    assert simulated > (0.8 if workers == 16 else 0.6) * measured


def small_resnet_loads(bucket_bytes: int) -> list[BucketLoad]:
    """ResNetSmall of depth 20 for 10 classes, 32 x 32: (elements, multiply-adds), forward."""
    sizes: list[tuple[int, int]] = []

    def conv(side: int, inputs: int, outputs: int, kernel: int) -> None:
        elements = kernel * kernel * inputs * outputs
        sizes.extend([(elements, elements * side * side), (outputs, 0), (outputs, 0)])

    conv(32, 3, 16, 3)
    channels = 16
    for side, width in ((32, 16), (16, 32), (8, 64)):
        for _ in range(3):
            conv(side, channels, width, 3)
            conv(side, width, width, 3)
            if channels != width:
                conv(side, channels, width, 1)
            channels = width
    sizes.extend([(640, 640), (10, 0)])
    assert sum(elements for elements, _ in sizes) == 272_474
    gradients = [Gradient(4 * elements, float(macs)) for elements, macs in reversed(sizes)]
    return bucket_loads(gradients, bucket_bytes=bucket_bytes)


@pytest.mark.parametrize(
    ("workers", "bucket_bytes", "in_flight", "measured", "off_by"),
    [
        (4, 2**17, 1, 644.0, 0.03),  # 1 %: 13 buckets of two steps of 20 ms
        (8, 2**17, 2, 525.0, 0.12),  # 10 %
        (8, 2**40, 2, 159.0, 0.24),  # -22 %
    ],
)
def test_recorded_buckets_of_gradients_are_predicted(
    workers: int, bucket_bytes: int, in_flight: int, measured: float, off_by: float
) -> None:
    loads = small_resnet_loads(bucket_bytes)
    simulated = recorded_step(loads, workers=workers, delay_ms=20, in_flight=in_flight)
    assert simulated == pytest.approx(measured, rel=off_by)


@pytest.mark.parametrize(
    ("bucket_bytes", "measured", "processor_ms"), [(2**17, 1016.0, 363.0), (2**40, 911.0, 105.0)]
)
def test_recorded_steps_of_eight_workers_are_predicted(
    bucket_bytes: int, measured: float, processor_ms: float
) -> None:
    # Measured alone: computing, 683 ms; the processor time of all workers' all-reduce. The latter
    # is taken from two cores on which backward runs too, so that the network cannot hide it.
    compute = 683.0 + processor_ms / 2
    simulated = recorded_step(
        small_resnet_loads(bucket_bytes),
        workers=8,
        delay_ms=20,
        in_flight=2,
        before_ms=compute / 3,
        backward_ms=compute * 2 / 3,
    )
    assert simulated == pytest.approx(measured, rel=0.08)  # 6 % low, both
    # In one bucket nothing can be hidden.
    if bucket_bytes == 2**40:
        alone = recorded_step(small_resnet_loads(bucket_bytes), workers=8, delay_ms=20)
        assert simulated == pytest.approx(compute + alone)
