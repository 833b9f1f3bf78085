"""`fit`, `evaluate` and `predict` over two replicas of one process: `_two_replicas_script.py`."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from tests.data._helpers import numbered_rows
from tests.processes import json_from_replicas
from tf_largebatch.data import GlobalShuffleSharder

SEED, ROWS, REPLICAS = 5, 23, 2


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    return json_from_replicas("tests.data._two_replicas_script", replicas=REPLICAS)


def steps_of(batch: int, epoch: int) -> list[list[int]]:
    sharder = GlobalShuffleSharder(numbered_rows(ROWS), global_batch_size=batch, seed=SEED)
    return [
        sharder.positions(epoch=epoch, step=step).tolist()
        for step in range(sharder.steps_per_epoch)
    ]


def as_steps(batches: list[list[int]]) -> list[list[int]]:
    """The rows of each step; replicas run at the same time, so without their order."""
    return [
        sorted(row for batch in batches[first : first + REPLICAS] for row in batch)
        for first in range(0, len(batches), REPLICAS)
    ]


def mean_squared_error(rows: Any, odd_weight: float = 1.0) -> float:
    """Of the recording model, which predicts `i` for row `i`, whose label is `i % 2`."""
    rows = np.asarray(rows).ravel()
    weights = np.where(rows % 2 == 1, odd_weight, 1.0)
    return float(np.mean(weights * (rows - rows % 2) ** 2))


@pytest.mark.parametrize(
    ("case", "batch", "epochs"),
    [
        ("unbuilt", 4, [0, 1, 2]),
        ("given_steps", 4, [0, 1]),  # with class weights, for which Keras adds a prefetch
        ("strategy_not_given", 4, [0, 1]),
        ("two_steps_an_epoch", 10, [0, 1]),  # two steps an execution
        ("steps_per_execution", 4, [0, 1]),  # two steps an execution, five an epoch
        # The step that Keras reads ahead of `fit` is the whole epoch.
        ("one_step_an_epoch", 22, [1, 2]),
    ],
)
def test_fit_reads_epoch_after_epoch(
    seen: dict[str, Any], case: str, batch: int, epochs: list[int]
) -> None:
    result = seen[case]
    expected = [steps_of(batch, epoch) for epoch in epochs]
    assert as_steps(result["batches"]) == [sorted(rows) for epoch in expected for rows in epoch]
    assert {len(rows) for rows in result["batches"]} == {batch // REPLICAS}
    assert result["iterations"] == len(epochs) * len(expected[0])
    assert result["cardinality"] == len(expected[0])
    assert result["ran_out_of_data"] == 0
    odd_weight = 3.0 if case == "given_steps" else 1.0
    assert result["loss"] == pytest.approx(
        [mean_squared_error(rows, odd_weight) for rows in expected], rel=1e-6
    )


@pytest.mark.parametrize("case", ["unbuilt", "strategy_not_given"])
def test_validation_is_exact(seen: dict[str, Any], case: str) -> None:
    losses = seen[case]["val_loss"]
    assert losses == pytest.approx([mean_squared_error(range(37))] * len(losses), rel=1e-6)


@pytest.mark.parametrize(("read", "epoch"), [(0, 0), (1, 0), (2, 1)])
def test_an_epoch_is_begun_by_its_second_step_exactly(
    seen: dict[str, Any], read: int, epoch: int
) -> None:
    found = seen["next_pass"][read]
    assert found["rows"] == steps_of(4, epoch)[0]  # the replicas' contiguous parts, in order
    assert found["shapes"] == [[2, 1], [2, 1]]


@pytest.mark.parametrize("rows", [37, 1])  # 1: the other replica's only batch has no rows
def test_evaluate_and_predict_are_exact(seen: dict[str, Any], rows: int) -> None:
    result = seen["evaluation"][str(rows)]
    numbers = np.arange(rows)
    labels = numbers % 2
    probabilities = 1 / (1 + np.exp(-np.sin(numbers)))
    expected = {
        "loss": -np.mean(np.log(np.where(labels == 1, probabilities, 1 - probabilities))),
        "binary_accuracy": np.mean((probabilities > 0.5) == labels),
        "auc": float(keras.metrics.AUC()(labels, probabilities)),
    }
    assert result.pop("predicted") == pytest.approx(probabilities.tolist(), abs=1e-6)
    assert result == pytest.approx(expected, abs=1e-6)


def test_a_strategy_that_counts_elements_is_refused(seen: dict[str, Any]) -> None:
    training, evaluation = seen["refused"]
    for message in (training, evaluation):
        assert "MirroredStrategy has several replicas on this worker" in message
        assert "reports 10 batches as the number of steps, which is 5" in message
        assert "LargeBatchStrategy" in message
