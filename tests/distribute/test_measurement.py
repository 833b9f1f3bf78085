"""What is measured at start, on a clock that advances by costs known beforehand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest

from tf_largebatch.core.algorithm_choice import AllReduceCosts, Candidate
from tf_largebatch.distribute import _measurement
from tf_largebatch.distribute._measurement import measure_costs

KIB, MIB = 2**10, 2**20


class FakeCluster:
    """One worker's clock, and all-reduces that take what the cost model says.

    Args:
        steps_and_shares: of halving/doubling with so many halvings, its steps and how many times
            the buffer travels.
        first_call_seconds: what the first call of each takes in addition, as a graph is traced.
        jitter: what is added to each call that is timed, one after the other, over and over.
    """

    def __init__(
        self,
        steps_and_shares: dict[int, tuple[int, float]],
        *,
        overhead: float = 3e-3,
        step: float = 2e-3,
        byte: float = 5e-9,
        tensorflow: tuple[float, float] = (20e-3, 4e-9),
        first_call_seconds: float = 5.0,
        jitter: Sequence[float] = (0.0,),
    ) -> None:
        self.now = 1000.0
        self.prepared: list[tuple[Candidate, int]] = []
        self._steps_and_shares = steps_and_shares
        self._overhead, self._step, self._byte = overhead, step, byte
        self._tensorflow = tensorflow
        self._first_call_seconds = first_call_seconds
        self._jitter = jitter

    def perf_counter(self) -> float:
        return self.now

    def prepare(self, candidate: Candidate, size_bytes: int) -> Callable[[], object]:
        self.prepared.append((candidate, size_bytes))
        calls = 0

        def run() -> None:
            nonlocal calls
            seconds = self._seconds(candidate, size_bytes)
            seconds += self._jitter[calls % len(self._jitter)] if calls else 0.0
            self.now += seconds if calls else seconds + self._first_call_seconds
            calls += 1

        return run

    def _seconds(self, candidate: Candidate, size_bytes: int) -> float:
        if candidate.algorithm == "tensorflow":
            return self._tensorflow[0] + self._tensorflow[1] * size_bytes
        if size_bytes == 0:
            return self._overhead
        assert candidate.algorithm == "halving_doubling" and candidate.halvings is not None
        steps, share = self._steps_and_shares[candidate.halvings]
        return self._overhead + self._step * steps + self._byte * share * size_bytes


def measured(
    monkeypatch: pytest.MonkeyPatch,
    cluster: FakeCluster,
    workers: int,
    replicas: int = 1,
    *,
    agree: Callable[[Sequence[float]], Sequence[float]] = list,
) -> AllReduceCosts:
    monkeypatch.setattr(_measurement.time, "perf_counter", cluster.perf_counter)
    return measure_costs(
        cluster.prepare, agree=agree, num_workers=workers, replicas_per_worker=replicas
    )


def near(value: float, expected: float, *, rel: float) -> bool:
    return math.isclose(value, expected, rel_tol=rel)


@pytest.mark.parametrize(
    ("workers", "replicas", "steps_and_shares"),
    [
        # Swaps: log2 p steps, each with the whole buffer; with h halvings, (h + log2 p) steps and
        # 2 (1 - 2^-h) + (log2 p - h) 2^-h of it. No power of two: two steps and buffers more.
        (2, 1, {0: (1, 1.0)}),
        (4, 1, {0: (2, 2.0), 1: (3, 1.5)}),
        (8, 1, {0: (3, 3.0), 2: (5, 1.75)}),
        (3, 1, {0: (3, 3.0)}),
        (6, 1, {0: (4, 4.0), 1: (5, 3.5)}),
        # Two steps, with half the buffer each, inside a worker of two; the rest on half of it.
        (4, 2, {0: (2 + 2, 1 + 1.0), 1: (2 + 3, 1 + 0.75)}),
    ],
)
def test_the_costs_of_a_cluster_are_found(
    monkeypatch: pytest.MonkeyPatch,
    workers: int,
    replicas: int,
    steps_and_shares: dict[int, tuple[int, float]],
) -> None:
    costs = measured(monkeypatch, FakeCluster(steps_and_shares), workers, replicas)
    assert (costs.num_workers, costs.replicas_per_worker) == (workers, replicas)
    assert near(costs.overhead_seconds, 3e-3, rel=1e-9)
    # What 1 KiB takes counts as latency: 5 ns a byte are at most 5.2 us beside 2 ms.
    assert 2e-3 <= costs.link.latency_seconds * (1 + 1e-9) <= 2.01e-3
    assert near(costs.link.seconds_per_byte, 5e-9, rel=0.01)
    assert costs.link.reduce_seconds_per_byte == 0
    assert near(costs.tensorflow_seconds, 20e-3, rel=1e-3)
    assert near(costs.tensorflow_seconds_per_byte, 4e-9, rel=1e-9)


def test_what_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeCluster({0: (3, 3.0), 2: (5, 1.75)})
    measured(monkeypatch, cluster, 8)
    swaps, halvings = Candidate("halving_doubling", 0), Candidate("halving_doubling", 2)
    own = Candidate("tensorflow")
    assert cluster.prepared == [
        (swaps, 0),
        (swaps, KIB),
        (halvings, MIB),
        (own, KIB),
        (own, MIB),
    ]


def test_slow_calls_of_tensorflows_own_are_predicted_instead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The ring of 8 workers has 14 steps; with 3 ms for a call they take 0.1 s at 6.93 ms each.
    for step, is_measured in ((6.8e-3, True), (7.0e-3, False)):
        cluster = FakeCluster({0: (3, 3.0), 2: (5, 1.75)}, step=step)
        costs = measured(monkeypatch, cluster, 8)
        own = [size for way, size in cluster.prepared if way.algorithm == "tensorflow"]
        assert own == ([KIB, MIB] if is_measured else [])
    assert near(costs.tensorflow_seconds, 3e-3 + 14 * 7e-3, rel=0.001)
    assert near(costs.tensorflow_seconds_per_byte, 1.75 * 5e-9, rel=0.01)


def test_two_late_calls_of_five_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    late = FakeCluster({0: (2, 2.0), 1: (3, 1.5)}, jitter=(0.0, 0.0, 0.5, 0.0, 0.7))
    costs = measured(monkeypatch, late, 4)
    assert near(costs.overhead_seconds, 3e-3, rel=1e-9)
    assert near(costs.link.latency_seconds, 2e-3, rel=0.01)
    assert near(costs.tensorflow_seconds, 20e-3, rel=0.01)


def test_all_workers_agree_on_each_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    steps_and_shares = {0: (2, 2.0), 1: (3, 1.5)}
    told: list[float] = []

    def slower_by_a_half(seconds: Sequence[float]) -> list[float]:
        told.extend(seconds)
        return [1.5 * each for each in seconds]

    costs = measured(monkeypatch, FakeCluster(steps_and_shares), 4, agree=slower_by_a_half)
    assert len(told) == 5, "each is the largest of all workers'"
    assert near(costs.overhead_seconds, 1.5 * 3e-3, rel=1e-9)
    assert near(costs.link.latency_seconds, 1.5 * 2e-3, rel=0.01)
    assert near(costs.link.seconds_per_byte, 1.5 * 5e-9, rel=0.01)
    assert near(costs.tensorflow_seconds, 1.5 * 20e-3, rel=0.01)
    assert near(costs.tensorflow_seconds_per_byte, 1.5 * 4e-9, rel=1e-6)


def test_workers_of_unequal_speed_have_equal_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker has a clock of its own; what a round finds is the most of both."""
    steps_and_shares = {0: (1, 1.0)}
    speeds = {"fast": (1e-3, 0.5e-3), "slow": (4e-3, 2e-3)}  # overhead, step
    rounds: dict[str, list[float]] = {name: [] for name in speeds}

    def cluster(name: str) -> FakeCluster:
        overhead, step = speeds[name]
        return FakeCluster(steps_and_shares, overhead=overhead, step=step)

    for name in speeds:
        measured(
            monkeypatch,
            cluster(name),
            2,
            agree=lambda own, name=name: rounds[name].extend(own) or own,
        )
    largest = [max(pair) for pair in zip(*rounds.values(), strict=True)]
    found = []
    for name in speeds:
        answers = iter(largest)
        found.append(
            measured(
                monkeypatch, cluster(name), 2, agree=lambda own, answers=answers: [next(answers)]
            )
        )
    assert found[0] == found[1]
    assert near(found[0].link.latency_seconds, 2e-3, rel=0.01)


def test_noise_never_makes_a_cost_negative(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each figure is smaller than the one before it.
    figures = iter([9e-3, 8e-3, 7e-3, 6e-3, 5e-3])
    cluster = FakeCluster({0: (2, 2.0), 1: (3, 1.5)})
    costs = measured(monkeypatch, cluster, 4, agree=lambda own: [next(figures)])
    assert costs.link.latency_seconds == 0
    assert costs.link.seconds_per_byte == 0
    assert (costs.tensorflow_seconds, costs.tensorflow_seconds_per_byte) == (6e-3, 0)


def test_of_tensorflows_bytes_no_more_is_believed_than_of_the_rings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = FakeCluster({0: (2, 2.0), 1: (3, 1.5)}, tensorflow=(20e-3, 80e-9))
    costs = measured(monkeypatch, cluster, 4)
    assert near(costs.tensorflow_seconds_per_byte, 1.5 * 5e-9, rel=0.01)
