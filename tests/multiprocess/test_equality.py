"""However many workers share a global batch, training and evaluation come out the same."""

from __future__ import annotations

import numpy as np
import pytest
from harness import case_values, run_workers

pytestmark = pytest.mark.timeout(900)

# Workers, replicas a worker, all-reduce, cases: all of them where that is cheap.
CLUSTERS = {
    "1": (1, 1, "auto", ()),
    "2": (2, 1, "auto", ()),
    "4": (
        4,
        1,
        "ring",
        ("case_optimizers_and_accumulation", "case_batch_norm", "case_evaluation"),
    ),
    "2x2": (
        2,
        2,
        "halving_doubling",
        ("case_sgd_with_schedule", "case_evaluation"),
    ),
}


@pytest.fixture(scope="module")
def launches():
    return {
        name: run_workers(
            "equality.py",
            workers,
            replicas_per_worker=replicas,
            env={"EQUALITY_ALL_REDUCE": all_reduce},
            cases=cases,
            timeout_seconds=400,
        )
        for name, (workers, replicas, all_reduce, cases) in CLUSTERS.items()
    }


def one(launches, case):
    return case_values(launches["1"], case)[0]


def several(launches, case):
    for name, (workers, _, _, cases) in CLUSTERS.items():
        if workers > 1 and (not cases or case in cases):
            yield from case_values(launches[name], case)


def assert_equal_weights(actual, expected, tolerance=1e-5):
    assert len(actual) == len(expected)
    for weight, reference in zip(actual, expected, strict=True):
        np.testing.assert_allclose(weight, reference, rtol=0, atol=tolerance)


@pytest.mark.parametrize("case", ["case_sgd_with_schedule", "case_learning_rate_warmup_callback"])
def test_weights_after_twenty_steps(launches, case):
    expected = one(launches, case)["weights"]
    for result in several(launches, case):
        assert_equal_weights(result["weights"], expected)


def test_weights_moved(launches):
    """So that the equality above says something."""
    first, second = (
        one(launches, case)["weights"][0]
        for case in ("case_sgd_with_schedule", "case_learning_rate_warmup_callback")
    )
    assert np.abs(first - second).max() > 1e-4


def test_workers_hold_the_same_weights_to_the_bit(launches):
    for name, case in (("2", "sgd_with_schedule"), ("2x2", "sgd_with_schedule")):
        reference, *others = case_values(launches[name], f"case_{case}")
        for other in others:
            assert_equal_weights(other["weights"], reference["weights"], tolerance=0)
    reference, *others = case_values(launches["4"], "case_optimizers_and_accumulation")
    for other in others:
        for name, weights in reference.items():
            assert_equal_weights(other[name], weights, tolerance=0)


def test_histories_are_those_of_one_worker(launches):
    expected = one(launches, "case_sgd_with_schedule")["history"]
    for result in several(launches, "case_sgd_with_schedule"):
        assert set(result["history"]) == set(expected)
        for name, values in expected.items():
            np.testing.assert_allclose(result["history"][name], values, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum_sgd", "lars"])
def test_workers_and_accumulation_equal_one_process(launches, optimizer, accumulated):
    """k workers, n rows each, a accumulated: with weight decay, warmup, decays, clipping."""
    case = "case_optimizers_and_accumulation"
    expected = one(launches, case)[f"{optimizer} 1"]
    for result in [one(launches, case), *several(launches, case)]:
        assert_equal_weights(result[f"{optimizer} {accumulated}"], expected)


@pytest.mark.parametrize(("cluster", "rows"), [("2", 4), ("4", 2)])
def test_batch_norm_of_workers_equals_ghost_batch_norm(launches, cluster, rows):
    in_one = one(launches, "case_batch_norm")
    expected = in_one[f"n = {rows}"]
    accumulated = in_one[f"n = {rows}, accumulated"]
    assert_equal_weights(accumulated["trained"], expected["trained"])
    for result in case_values(launches[cluster], "case_batch_norm"):
        assert_equal_weights(result[f"n = {rows}"]["trained"], expected["trained"])
        np.testing.assert_allclose(
            result[f"n = {rows}"]["moving mean"], expected["moving mean"], rtol=0, atol=1e-5
        )
    other = in_one[f"n = {6 - rows}"]["trained"]  # so that n does make a difference
    assert max(np.abs(a - b).max() for a, b in zip(other, expected["trained"], strict=True)) > 1e-3


@pytest.mark.parametrize("steps", ["5", "3"])
def test_steps_per_execution_changes_nothing(launches, steps):
    expected = one(launches, "case_sgd_with_schedule")["weights"]
    case = "case_steps_per_execution"
    for result in [one(launches, case), *several(launches, case)]:
        assert result[steps]["iterations"] == 20
        assert_equal_weights(result[steps]["weights"], expected)


@pytest.mark.parametrize("rows", [37, 3])
@pytest.mark.parametrize("kind", ["source", "arrays"])
def test_evaluation_is_exact_on_every_rank(launches, kind, rows):
    expected = one(launches, "case_evaluation")[f"{kind} of {rows}"]  # loss, accuracy, AUC
    for result in several(launches, "case_evaluation"):
        np.testing.assert_allclose(result[f"{kind} of {rows}"], expected, rtol=0, atol=1e-6)


def test_evaluation_loss_is_the_closed_form(launches):
    result = one(launches, "case_evaluation")
    assert result["source of 37"][0] == pytest.approx(result["loss oracle"], abs=1e-6)


@pytest.mark.parametrize("rows", [37, 3])
def test_predictions_come_back_in_order(launches, rows):
    expected = one(launches, "case_evaluation")[f"predict {rows}"]
    assert expected.shape == (rows, 1)
    for result in several(launches, "case_evaluation"):
        np.testing.assert_allclose(result[f"predict {rows}"], expected, rtol=0, atol=1e-6)
