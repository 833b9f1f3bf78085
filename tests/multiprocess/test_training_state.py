"""A run that was killed and started again is the run that was not; the worst that can happen else.

All clusters are forks of one process that `workers/training_state.py` runs in.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Any

import pytest
from harness import WorkerResult, case_values, run_workers

pytestmark = pytest.mark.timeout(500)

STEPS_AN_EPOCH, EPOCHS = 6, 3
VALUES = ("weights", "history", "epochs", "rate", "csv")


@pytest.fixture(scope="module")
def launch() -> Iterator[list[WorkerResult]]:
    yield run_workers("training_state.py", 1, timeout_seconds=480.0)


def value_of(launch: list[WorkerResult], case: str) -> Any:
    return case_values(launch, case)[0]


@pytest.mark.parametrize(
    ("case", "codes"),
    [
        ("case_killed_at_any_step", [[-9, 1], [1, -9], [-9, -9]]),
        ("case_lars_with_accumulation", [[-9, 1]]),
        ("case_rates_of_callbacks", [[-9, 1]]),
        ("case_terminated", [[143, 143]]),
        ("case_started_again_after_the_end", [[0, 0]]),
    ],
)
def test_a_broken_off_run_ends_as_the_undisturbed_one(
    launch: list[WorkerResult], case: str, codes: list[list[int]]
) -> None:
    undisturbed, disturbed = value_of(launch, case)
    assert disturbed["codes"] == codes
    assert {name: disturbed[name] for name in VALUES} == {
        name: undisturbed[name] for name in VALUES
    }
    assert disturbed["board"] == undisturbed["board"]


def test_a_signal_outside_of_fit_ends_a_worker(launch: list[WorkerResult]) -> None:
    """TensorFlow's server would swallow it."""
    ends = value_of(launch, "case_terminated_before_fit")
    assert [end["returncode"] for end in ends.values()] == [-15, -15]


def test_logs_have_each_epoch_once(launch: list[WorkerResult]) -> None:
    undisturbed, disturbed = value_of(launch, "case_killed_at_any_step")
    for run in (undisturbed, disturbed):
        assert run["epochs"] == list(range(EPOCHS))
        rows = list(csv.DictReader(io.StringIO(run["csv"])))
        assert [row["epoch"] for row in rows] == ["0", "1", "2"]
        losses = run["history"]["loss"]
        assert [float(row["loss"]) for row in rows] == losses
        points = run["board"]["train/epoch_loss"]
        assert [step for step, _ in points] == [0, 1, 2]
        assert [value for _, value in points] == pytest.approx(losses)


def test_all_workers_stop_where_one_asks_to(launch: list[WorkerResult]) -> None:
    """Three batches into the first epoch; the metrics of five batches would be others."""
    runs = value_of(launch, "case_one_worker_asks_to_stop")
    assert [run["epochs"] for run in runs.values()] == [[0], [0]]
    assert runs["3"]["weights"] != runs["6"]["weights"]


def test_a_state_on_one_disk_is_enough(launch: list[WorkerResult]) -> None:
    undisturbed, _ = value_of(launch, "case_killed_at_any_step")
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
    undisturbed, _ = value_of(launch, "case_killed_at_any_step")
    found = value_of(launch, "case_damaged_states")
    assert {result["weights"] for result in found["older"]} == {undisturbed["weights"]}
    for end in found["none"].values():
        assert end["returncode"] == 1
        assert "DataError: None of the 2 states in" in end["log"]


def test_one_worker_takes_up_what_two_have_saved(launch: list[WorkerResult]) -> None:
    """Not bit by bit, but at the same step: the rates and the number of epochs are the same."""
    undisturbed, _ = value_of(launch, "case_killed_at_any_step")
    (result,) = value_of(launch, "case_one_worker_of_two")
    assert result["epochs"] == undisturbed["epochs"]
    assert result["rate"] == undisturbed["rate"]
    assert result["history"]["loss"][0] == undisturbed["history"]["loss"][0]


def test_a_full_disk_loses_nothing_and_ends_all(launch: list[WorkerResult]) -> None:
    undisturbed, _ = value_of(launch, "case_killed_at_any_step")
    found = value_of(launch, "case_full_disk")
    chief, other = found["ends"][0], found["ends"][1]
    assert chief["returncode"] == 1 and "StateWriteError: " in chief["log"]
    assert other["returncode"] == 1
    assert f"worker 0 at {chief['address']}" in other["log"]
    assert found["files"] == ["state_000000000000.tlb"]
    assert {result["weights"] for result in found["resumed"]} == {undisturbed["weights"]}
