"""Two workers train every form of model and input as one worker does."""

from __future__ import annotations

import numpy as np
import pytest
from harness import case_values, run_workers

pytestmark = pytest.mark.timeout(600)

SAME_AS_ONE_WORKER = [
    "case_without_metrics",
    "case_unbuilt_sequential",
    "case_subclassed_with_add_loss",
    "case_sample_weight",
    "case_class_weight",
    "case_embedding_in_a_loop",
    "case_eagerly",
    "case_arrays_with_seeded_shuffle",
]


@pytest.fixture(scope="module")
def one():
    return run_workers("forms.py", 1, timeout_seconds=240)


@pytest.fixture(scope="module")
def two():
    return run_workers("forms.py", 2, timeout_seconds=400)


def assert_same(actual, expected, tolerance=1e-5):
    assert set(actual["history"]) == set(expected["history"])
    for name, values in expected["history"].items():
        np.testing.assert_allclose(actual["history"][name], values, atol=tolerance, err_msg=name)
    for weight, reference in zip(actual["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(weight, reference, rtol=0, atol=tolerance)


@pytest.mark.parametrize("case", SAME_AS_ONE_WORKER)
def test_same_as_one_worker(one, two, case):
    (expected,) = case_values(one, case)
    for actual in case_values(two, case):
        assert_same(actual, expected)


@pytest.mark.parametrize("case", ["case_two_outputs_and_a_frozen_norm", "case_transformer"])
def test_other_networks_with_all_callbacks(one, two, case):
    """Nothing is tied to classification, ResNets or batch norm; the rate, the weights and the
    noise scale of two workers are those of two accumulated batches."""
    (expected,) = case_values(one, case)
    assert expected["history"]["learning_rate"] == pytest.approx([0.05 + 0.05 * 3 / 4, 0.1, 0.01])
    assert np.all(np.isfinite(expected["history"]["loss"]))
    for actual in case_values(two, case):
        for name in ("gradient_noise_scale", "learning_rate"):
            found = actual["history"].pop(name)
            np.testing.assert_allclose(found, expected["history"][name], rtol=1e-3)
        kept = {name: expected["history"][name] for name in actual["history"]}
        assert_same(actual, {**expected, "history": kept})


def test_bfloat16(one, two):
    """Rounded to 8 bits in each worker's part: equal on both, near to one worker's."""
    (expected,) = case_values(one, "case_bfloat16")
    first, second = case_values(two, "case_bfloat16")
    assert_same(first, second, tolerance=0)
    assert_same(first, expected, tolerance=1e-2)


def test_a_train_step_of_ones_own(one, two):
    """Its loss is scaled by one over the replicas, as Keras does; its logs are their mean."""
    (expected,) = case_values(one, "case_own_train_step")
    for actual in case_values(two, "case_own_train_step"):
        assert actual["history"]["count"] == [3]
        np.testing.assert_allclose(
            actual["history"]["own"][0], expected["history"]["own"][0] / 2, rtol=1e-5
        )
        for weight, reference in zip(actual["weights"], expected["weights"], strict=True):
            np.testing.assert_allclose(weight, reference, rtol=0, atol=1e-6)


def test_custom_loop(one, two):
    (expected,) = case_values(one, "case_custom_loop")
    for actual in case_values(two, "case_custom_loop"):
        np.testing.assert_allclose(actual["sums"], expected["sums"], rtol=1e-5)
        np.testing.assert_allclose(actual["weight"], expected["weight"], atol=1e-6)
        assert actual["mean rank"] == 0.5


def test_clipping_on_each_replica_is_warned_of(one, two):
    assert case_values(one, "case_clipping_is_warned_of") == [[]]
    for messages in case_values(two, "case_clipping_is_warned_of"):
        assert "before they are summed" in messages[0]


def test_steps_leave_no_threads_behind(one, two):
    for growth in case_values(one, "case_threads") + case_values(two, "case_threads"):
        assert growth < 10


def test_jit_compile_is_refused_with_the_reason(two):
    for message in case_values(two, "case_jit_compile"):
        assert "jit_compile=False" in message
        assert "XLA" in message


def test_stock_loss_scaling_is_refused_with_the_remedy(two):
    for message in case_values(two, "case_stock_loss_scaling_is_refused"):
        assert "tf_largebatch.optimizers.LossScaleOptimizer" in message


def test_a_non_finite_gradient_on_one_worker_makes_all_skip(one, two):
    """4 batches, the second of them bad: 3 updates, the scale halved once, everywhere."""
    (expected,) = case_values(one, "case_non_finite_on_one_worker")
    for actual in [expected, *case_values(two, "case_non_finite_on_one_worker")]:
        assert actual["scales"] == [1024.0, 512.0, 512.0, 512.0]
        assert actual["updates"] == 3
        assert all(np.isfinite(weight).all() for weight in actual["weights"])
        for weight, reference in zip(actual["weights"], expected["weights"], strict=True):
            np.testing.assert_allclose(weight, reference, rtol=0, atol=1e-3)  # float16 sums
