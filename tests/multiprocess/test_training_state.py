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
CASES = (
    "case_killed_at_any_step",
    "case_lars_with_accumulation",
    "case_rates_of_callbacks",
    "case_terminated",
    "case_terminated_before_fit",
    "case_started_again_after_the_end",
    "case_one_worker_asks_to_stop",
)
VALUES = ("weights", "history", "epochs", "rate", "csv")


@pytest.fixture(scope="module")
def launch() -> Iterator[list[WorkerResult]]:
    yield run_workers("training_state.py", 1, cases=CASES, timeout_seconds=480.0)


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
