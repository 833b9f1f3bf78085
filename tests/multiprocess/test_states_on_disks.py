"""States on one disk or another, damaged, of another run, or on a full disk.

All clusters are forks of one process that `workers/training_state.py` runs in.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from harness import WorkerResult, case_values, run_workers

pytestmark = pytest.mark.timeout(500)

CASES = (
    "case_undisturbed",
    "case_directories_differ",
    "case_another_run",
    "case_damaged_states",
    "case_one_worker_of_two",
    "case_full_disk",
)


@pytest.fixture(scope="module")
def launch() -> Iterator[list[WorkerResult]]:
    yield run_workers("training_state.py", 1, cases=CASES, timeout_seconds=480.0)


def value_of(launch: list[WorkerResult], case: str) -> Any:
    return case_values(launch, case)[0]


def test_a_state_on_one_disk_is_enough(launch: list[WorkerResult]) -> None:
    undisturbed = value_of(launch, "case_undisturbed")
    results = value_of(launch, "case_directories_differ")
    assert len(results) == 4
    assert {result["weights"] for result in results} == {undisturbed["weights"]}


def test_a_state_of_another_run_is_refused_by_all(launch: list[WorkerResult]) -> None:
    ends = value_of(launch, "case_another_run")
    for name, shown in (
        ("model", "model: 9 variables in the state, 9 here; number 7: in the state"),
        ("recipe", "learning_rate.boundaries[0]: 6 in the state, 8 here"),
        ("optimizer", "optimizer.class: 'MomentumSGD' in the state, 'LARS' here"),
    ):
        for end in ends[name].values():
            assert end["returncode"] == 1
            assert "is of another run:" in end["log"]
            assert shown in end["log"], end["log"][-3000:]


def test_a_damaged_state_gives_way_to_the_one_before_it(launch: list[WorkerResult]) -> None:
    undisturbed = value_of(launch, "case_undisturbed")
    found = value_of(launch, "case_damaged_states")
    assert {result["weights"] for result in found["older"]} == {undisturbed["weights"]}
    for end in found["none"].values():
        assert end["returncode"] == 1
        assert re.search(r"DataError: None of the [23] states in", end["log"])


def test_one_worker_takes_up_what_two_have_saved(launch: list[WorkerResult]) -> None:
    """Not bit by bit, but at the same step: the rates and the number of epochs are the same."""
    undisturbed = value_of(launch, "case_undisturbed")
    (result,) = value_of(launch, "case_one_worker_of_two")
    assert result["epochs"] == undisturbed["epochs"]
    assert result["rate"] == undisturbed["rate"]
    assert result["history"]["loss"][0] == undisturbed["history"]["loss"][0]


def test_a_full_disk_loses_nothing_and_ends_all(launch: list[WorkerResult]) -> None:
    undisturbed = value_of(launch, "case_undisturbed")
    found = value_of(launch, "case_full_disk")
    chief, other = found["ends"][0], found["ends"][1]
    assert chief["returncode"] == 1 and "StateWriteError: " in chief["log"]
    assert other["returncode"] == 1
    assert f"worker 0 at {chief['address']}" in other["log"]
    assert found["files"] == ["state_000000000000.tlb"]
    assert {result["weights"] for result in found["resumed"]} == {undisturbed["weights"]}
