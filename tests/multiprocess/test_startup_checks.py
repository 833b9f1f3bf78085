"""Workers compare what they are about to train, and on what, before they do; metrics' sums."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness import WorkerResult, case_values, run_workers

WORKERS, REPLICAS = 2, 4


@pytest.fixture(scope="module")
def workers() -> Iterator[list[WorkerResult]]:
    yield run_workers("startup_checks.py", WORKERS, replicas_per_worker=2)


MODELS = "Workers must train the same model in the same way, but differ in\n  "


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("schedule", "optimizer.learning_rate.boundaries: [30, 60] on worker 0; [40, 60]"),
        ("rate", "optimizer.learning_rate: 0.5 on worker 0; 1.5"),
        ("optimizer", "optimizer.nesterov: false on worker 0; true"),
        ("loss", 'loss: "mse" on worker 0; "mae"'),
        ("steps_per_execution", "steps_per_execution: 1 on worker 0; 2"),
    ],
)
def test_models_that_differ(workers: list[WorkerResult], name: str, line: str) -> None:
    for texts in case_values(workers, "case_models"):
        assert texts[name] == f"{MODELS}{line} on worker 1"


def test_a_model_is_compared_after_each_compile(workers: list[WorkerResult]) -> None:
    for texts in case_values(workers, "case_again"):
        assert [bool(text) for text in texts] == [True, True, False, True]


def test_equal_workers_gather_once_and_not_again(workers: list[WorkerResult]) -> None:
    for first, second in case_values(workers, "case_one_gather"):
        models = "comparison of models, optimizers and losses"
        assert first.count(models) == first.count("comparison of data sets") == 1
        assert not [purpose for purpose in first + second if "in words" in purpose]
        assert {purpose.split(" variable ")[0] for purpose in second} == {
            "comparison of data sets",
            "sum of",  # metrics, at the end of an epoch
        }


DATA = "Workers must read the same data in the same order, but differ in"


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("seed", "  seed: 1 on worker 0; 2 on worker 1"),
        ("rows", "  num_rows: 32 on worker 0; 24 on worker 1"),
        ("evaluation", "  num_rows: 32 on worker 0; 31 on worker 1"),
        ("mixed", "  seed: null on worker 0; 1 on worker 1"),
    ],
)
def test_data_sets_that_differ(workers: list[WorkerResult], name: str, line: str) -> None:
    for texts in case_values(workers, "case_data"):
        head, *lines = texts[name].splitlines()
        assert head == DATA
        assert line in lines


@pytest.mark.parametrize("name", ["equal", "equal evaluation", "own"])
def test_equal_data_sets(workers: list[WorkerResult], name: str) -> None:
    assert [texts[name] for texts in case_values(workers, "case_data")] == ["", ""]


def test_metrics_are_sums_over_all_replicas(workers: list[WorkerResult]) -> None:
    for found in case_values(workers, "case_metrics"):
        mean = sum(range(1, REPLICAS + 1)) / REPLICAS
        assert found["results"] == [[mean, mean, REPLICAS * runs] for runs in (1, 2, 3)]
        assert found["mean"] == pytest.approx((REPLICAS - 1) / 2)
        assert found["iou"] == pytest.approx(0.5)  # one of two, of each class
        assert found["after"] == [0.0, 0.0, 5.0]


def test_metrics_are_read_once_after_a_step_and_reset_without_a_word(
    workers: list[WorkerResult],
) -> None:
    for found in case_values(workers, "case_metrics"):
        assert found["reads"] == 2 * 3  # total and count, after each of three steps
        assert found["resets"] == []
        assert len(found["purposes"]) == len(set(found["purposes"])) == 3
