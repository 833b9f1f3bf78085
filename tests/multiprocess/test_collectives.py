"""All-reduce on real workers: right sums, the same bits everywhere, run after run.

All clusters are forks of one process that `workers/collectives.py` runs in, one case after the
other; each case has a cluster of 4 workers, of 3, and of 2 with two replicas each.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from harness import WorkerResult, case_values, run_workers

pytestmark = pytest.mark.timeout(600)

CLUSTERS = {"4 workers": 0, "3 workers": 1, "2 workers of 2": 2}
each_cluster = pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS)
End = dict[str, Any]


@pytest.fixture(scope="module")
def launch() -> Iterator[list[WorkerResult]]:
    yield run_workers("collectives.py", 1, timeout_seconds=580.0)


def ends_of(launch: list[WorkerResult], case: str, cluster: int) -> list[End]:
    """How the workers ended, all of them well."""
    ends = list(case_values(launch, case)[0][cluster].values())
    for end in ends:
        assert end["returncode"] == 0, end["log"][-4000:]
    return ends


def printed(end: End, word: str) -> list[Any]:
    return [json.loads(text) for text in re.findall(rf"^{word} (.*)$", end["log"], re.MULTILINE)]


@each_cluster
def test_sums_and_means_of_all_dtypes_in_graphs_and_eagerly(
    launch: list[WorkerResult], cluster: int
) -> None:
    for end in ends_of(launch, "case_sums_and_means", cluster):
        assert "DONE" in end["log"]


@each_cluster
def test_equal_bits_on_all_workers(launch: list[WorkerResult], cluster: int) -> None:
    chief, *others = [printed(end, "DIGEST") for end in ends_of(launch, "case_equal_bits", cluster)]
    assert len(chief) == 8  # each algorithm, and two of them with two dtypes on the wire
    for other in others:
        assert other == chief


@each_cluster
def test_overflow_on_the_wire_is_seen_and_loops_keep_their_keys(
    launch: list[WorkerResult], cluster: int
) -> None:
    reports = [
        printed(end, "REPORT") for end in ends_of(launch, "case_overflow_and_loops", cluster)
    ]
    assert all(report == reports[0] for report in reports)  # same figures, same decisions
    assert "measured at start" in reports[0][0]


@each_cluster
def test_weights_after_training_do_not_depend_on_the_algorithm(
    launch: list[WorkerResult], cluster: int
) -> None:
    by_rank = [printed(end, "WEIGHTS") for end in ends_of(launch, "case_training", cluster)]
    for weights in by_rank:
        assert weights == by_rank[0]
    (exact, *_) = by_rank[0]
    for other in by_rank[0]:
        assert other == pytest.approx(exact, abs=1e-5)


def test_start_of_variables(launch: list[WorkerResult]) -> None:
    """Equal after the scope, by each worker's own values or by the chief's."""
    equal, differing, refused, other_models = case_values(launch, "case_variables")[0]
    for ends in (equal, differing):
        assert all(end["returncode"] == 0 for end in ends.values()), ends
        chief, *others = [printed(end, "VARIABLES") for end in ends.values()]
        assert chief and all(other == chief for other in others)
    sent = {rank: printed(end, "BROADCASTS") for rank, end in equal.items()}
    assert set(map(str, sent.values())) == {"[0]"}  # nothing was sent where all were equal
    for rank, end in refused.items():
        assert end["returncode"] == 1
        error = end["log"].split("MismatchError: ")[-1]
        assert "parallel_initialization=True" in error and "dense/kernel float32(2, 4)" in error
        assert f"worker 1 at {end['address']}" in error or rank == 0
    for end in other_models.values():
        error = end["log"].split("MismatchError: ")[-1]
        assert "worker 0" in error and "worker 1" in error
        assert "float32(4, 3)" in error and "float32(4, 2)" in error
