"""All-reduces and training by MPI on real ranks: right sums, equal bits, TensorFlow's weights.

All ranks are forks of one process that `workers/mpi_all_reduces.py` runs in, one launch of mpiexec
after the other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from harness import WorkerResult, case_values, run_workers

from tests.mpi_processes import why_not

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

End = dict[str, Any]
# Case, ranks, replicas.
CLUSTERS = {
    "2 ranks": ("case_two_ranks", 2, 2),
    "3 ranks": ("case_three_ranks", 3, 3),
    "2 ranks of 2": ("case_two_ranks_of_two", 2, 4),
}
each_cluster = pytest.mark.parametrize("cluster", CLUSTERS)


@pytest.fixture(scope="module")
def launch() -> Iterator[list[WorkerResult]]:
    yield run_workers("mpi_all_reduces.py", 1, timeout_seconds=500.0)


def checks_of(launch: list[WorkerResult], cluster: str) -> list[dict[str, Any]]:
    """By name, what each rank's checks came to."""
    ends = case_values(launch, CLUSTERS[cluster][0])[0]
    assert len(ends) == CLUSTERS[cluster][1]
    found = []
    for _, end in sorted(ends.items()):
        facts = printed(end, "CHECK")
        found.append({fact["name"]: fact for fact in facts})
        assert "check_fit" in found[-1], end["log"][-4000:]  # the last one
    return found


def printed(end: End, word: str) -> list[Any]:
    return [json.loads(text) for text in re.findall(rf"^{word} (.*)$", end["log"], re.MULTILINE)]


def values_of(launch: list[WorkerResult], cluster: str, check: str) -> list[Any]:
    facts = [checks[check] for checks in checks_of(launch, cluster)]
    errors = [fact["error"] for fact in facts if "error" in fact]
    assert not errors, errors[0]
    return [fact["value"] for fact in facts]


@each_cluster
def test_all_ranks_end_well(launch: list[WorkerResult], cluster: str) -> None:
    for end in case_values(launch, CLUSTERS[cluster][0])[0].values():
        assert (end["returncode"], end["mpiexec"]) == (0, 0), end["log"][-4000:]
        assert "tf_largebatch:" not in end["log"], "nobody has to say why it ended"


@each_cluster
@pytest.mark.parametrize(
    "check",
    [
        "check_sums_and_means",
        "check_kept_results",
        "check_updates_in_place",
        "check_graphs_within_graphs",
    ],
)
def test_what_each_rank_checks_by_itself(
    launch: list[WorkerResult], cluster: str, check: str
) -> None:
    ranks, expected = CLUSTERS[cluster][1], None
    assert values_of(launch, cluster, check) == [expected] * ranks


@each_cluster
def test_equal_bits_on_all_ranks(launch: list[WorkerResult], cluster: str) -> None:
    first, *others = values_of(launch, cluster, "check_equal_bits")
    assert len(first) == 6  # three algorithms, and three with narrower pieces
    for other in others:
        assert other == first
    digests = {(algorithm, wire): digest for algorithm, wire, digest in first}
    assert digests["ring", None] != digests["ring", "float16"], "which is rounded"


@each_cluster
def test_a_call_chooses_by_what_it_travels(launch: list[WorkerResult], cluster: str) -> None:
    """What reaches the engine are the buckets that go by MPI."""
    for seen in values_of(launch, cluster, "check_options_of_a_call"):
        for options, count in seen:
            by_tensorflow = "tensorflow" in (options.get("transport"), options.get("algorithm"))
            assert count == (0 if by_tensorflow else 1), options
        assert len(seen) == 7


@each_cluster
def test_several_buckets_within_a_step(launch: list[WorkerResult], cluster: str) -> None:
    """Twelve in each of three runs, however many may be under way."""
    for counts in values_of(launch, cluster, "check_buckets_in_flight"):
        assert counts == [36] * 3


@each_cluster
def test_buckets_do_not_wait_for_those_before(launch: list[WorkerResult], cluster: str) -> None:
    """But for the one that is max_buckets_in_flight, 1 or 3, before."""
    for counts in values_of(launch, cluster, "check_overlap"):
        assert counts == [1, 3]


@each_cluster
def test_outside_of_replicas(launch: list[WorkerResult], cluster: str) -> None:
    replicas = CLUSTERS[cluster][2]
    for total, rows, variable in values_of(launch, cluster, "check_outside_of_replicas"):
        assert total == [sum(range(replicas))] * 2
        assert rows == [member for member in range(replicas) for _ in range(2)]
        assert variable == [1.0] * 3


@each_cluster
def test_the_report_is_the_same_on_all_ranks(launch: list[WorkerResult], cluster: str) -> None:
    reports = values_of(launch, cluster, "check_report")
    assert all(report == reports[0] for report in reports)
    by_mpi, _, by_tensorflow = reports[0].partition("\nCosts (")
    first, *decisions = by_mpi.splitlines()
    assert first.startswith("Buckets travel by MPI")
    assert "'tensorflow': tensorflow" in by_tensorflow, "single calls went that way"
    assert any(re.search(r"'auto': mpi$", line) for line in decisions)
    assert any(re.search(r"'ring': ring$", line) for line in decisions)
    assert any(re.search(r"'halving_doubling': halving_doubling\[", line) for line in decisions)
    assert not any("predicted" in line for line in decisions), "nothing was measured"


# --- Training


@each_cluster
def test_fit_comes_to_the_weights_of_transport_tensorflow(
    launch: list[WorkerResult], cluster: str
) -> None:
    values = values_of(launch, cluster, "check_fit")
    for (goes_by_mpi, weights), (still_goes_by_mpi, references) in values:
        assert (goes_by_mpi, still_goes_by_mpi) == (True, False)
        for actual, reference in zip(weights, references, strict=True):
            np.testing.assert_allclose(actual, reference, rtol=0, atol=1e-6)
    assert all(value == values[0] for value in values), "to the bit"


def trained(launch: list[WorkerResult]) -> list[list[dict[str, Any]]]:
    """By transport (MPI, TensorFlow) and rank: by name, weights."""
    found: list[list[dict[str, Any]]] = []
    for ends in case_values(launch, "case_training")[0]:
        found.append([])
        for _, end in sorted(ends.items()):
            assert end["returncode"] == 0, end["log"][-4000:]
            (weights,) = printed(end, "TRAINED")
            found[-1].append(weights)
    return found


def test_weights_are_those_of_a_strategy_with_transport_tensorflow(
    launch: list[WorkerResult],
) -> None:
    by_mpi, by_tensorflow = trained(launch)
    optimizers = [f"{name} {count}" for name in ("momentum_sgd", "lars") for count in (1, 2)]
    names = {"sgd", *optimizers, "batch norm, n = 4", "5 steps at a time"}
    assert set(by_mpi[0]) == set(by_tensorflow[0]) == names
    for name, weights in by_tensorflow[0].items():
        for actual, reference in zip(by_mpi[0][name], weights, strict=True):
            np.testing.assert_allclose(actual, reference, rtol=0, atol=1e-6, err_msg=name)


def test_ranks_hold_the_same_weights_to_the_bit(launch: list[WorkerResult]) -> None:
    for first, *others in trained(launch):
        assert others == [first]


def test_weights_moved(launch: list[WorkerResult]) -> None:
    """So that the equality above says something."""
    by_mpi, _ = trained(launch)
    once, accumulated = (np.array(by_mpi[0][f"lars {count}"][0]) for count in (1, 2))
    np.testing.assert_allclose(once, accumulated, rtol=0, atol=1e-5)
    other = np.array(by_mpi[0]["momentum_sgd 1"][0])
    assert np.abs(once - other).max() > 1e-4
