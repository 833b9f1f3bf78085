"""Moving statistics on two workers with two replicas each: pooled, equal, and those of NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from harness import case_values, run_workers

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def workers():
    return run_workers("batch_norm.py", 2, replicas_per_worker=2, timeout_seconds=240)


def by_replica(values):
    """[replica, variable] from each rank's [local replica, variable]."""
    return [variables for of_rank in values for variables in of_rank]


def are_equal(replicas):
    return all(
        np.array_equal(value, first)
        for variables in replicas
        for value, first in zip(variables, replicas[0], strict=True)
    )


@pytest.fixture(scope="module")
def expected(workers):
    """NumPy's mean and variance of the first layer at the end of two epochs, pooled."""
    data = case_values(workers, "case_data")[0]
    momentum, by_step = data["momentum"], data["batches"].astype(np.float64).swapaxes(0, 1)
    means, variances = np.zeros((4, 3)), np.ones((4, 3))
    pooled = []
    for _ in range(2):
        for batches in by_step:  # [replica, row, channel]
            means = momentum * means + (1 - momentum) * batches.mean(1)
            variances = momentum * variances + (1 - momentum) * batches.var(1)
        # All rows' second moments less the square of their mean: the law of total variance.
        mean = means.mean(0)
        variance = (variances + means**2).mean(0) - mean**2
        pooled.append((mean, variance))
        means, variances = np.tile(mean, (4, 1)), np.tile(variance, (4, 1))
    return pooled


def assert_pooled(replicas, mean, variance):
    assert are_equal(replicas)
    np.testing.assert_allclose(replicas[0][0], mean, rtol=1e-5)
    np.testing.assert_allclose(replicas[0][1], variance, rtol=1e-5)


def test_statistics_are_equal_on_all_replicas_and_those_of_numpy(workers, expected):
    ranks = case_values(workers, "case_epochs_and_files")
    for event, epoch in enumerate([0, 1, 1]):  # the end of training changes nothing
        replicas = by_replica([rank["epochs and end"][event] for rank in ranks])
        assert_pooled(replicas, *expected[epoch])


def test_within_an_epoch_each_replica_has_its_own(workers):
    ranks = case_values(workers, "case_epochs_and_files")
    for events in zip(*(rank["batches"] for rank in ranks), strict=True):
        assert len({tuple(variables[0].tolist()) for variables in by_replica(events)}) == 4


def test_saved_models_are_equal_and_hold_the_pooled_statistics(workers, expected):
    """By a callback at the end of an epoch, without validation, and after `fit`."""
    ranks = case_values(workers, "case_epochs_and_files")
    reference = ranks[0]["saved"][0]
    for weights in (saved for rank in ranks for saved in rank["saved"]):
        assert all(np.array_equal(*pair) for pair in zip(weights, reference, strict=True))
    mean, variance = expected[1]
    np.testing.assert_allclose(reference[2], mean, rtol=1e-5)
    np.testing.assert_allclose(reference[3], variance, rtol=1e-5)
    np.testing.assert_array_equal(ranks[0]["output"], ranks[1]["output"])


def test_validation_sees_pooled_statistics(workers, expected):
    ranks = case_values(workers, "case_validation")
    assert ranks[0]["val_loss"] == ranks[1]["val_loss"]
    assert ranks[0]["by hand"] == ranks[1]["by hand"]
    # Its rows are read by different replicas, and the loss is that of one model all the same.
    assert ranks[0]["val_loss"][1] == pytest.approx(ranks[0]["by hand"], rel=1e-5)
    for epoch, statistics in enumerate(expected):
        assert_pooled(by_replica([rank["at test"][epoch] for rank in ranks]), *statistics)


def test_every_steps(workers):
    """Every 3 of 4 steps an epoch, and at its end; the count goes on into the next."""
    ranks = case_values(workers, "case_every_steps")
    equal = [are_equal(by_replica(event)) for event in zip(*ranks, strict=True)]
    first, second = [False, False, True, False], [False, True, False, False]
    assert equal == [*first, True, *second, True]


def test_several_steps_in_a_call(workers, expected):
    ranks = case_values(workers, "case_several_steps_in_a_call")
    assert_pooled(by_replica([rank[0] for rank in ranks]), *expected[0])


def test_gammas_are_zero_on_all_replicas_and_train_alike(workers):
    ranks = case_values(workers, "case_zero_init_residual")
    for gammas in (np.concatenate(layer) for rank in ranks for layer in rank["start"]):
        assert not gammas.any()
    for layers in zip(*(rank["trained"] for rank in ranks), strict=True):
        replicas = [gamma for of_rank in layers for gamma in of_rank]
        assert replicas[0].any()
        assert all(np.array_equal(gamma, replicas[0]) for gamma in replicas)


def test_recalibration(workers):
    ranks = case_values(workers, "case_recalibration")
    first_three = case_values(workers, "case_data")[0]["batches"][:, :3].reshape(-1, 3)
    for rank in ranks:
        assert rank["used"] == [2, 4, 3]
    for name, rows in (("plain", ranks[0]["rows"]), ("own", first_three)):
        exact = rows.astype(np.float64)
        replicas = by_replica([rank[name] for rank in ranks])
        assert_pooled(replicas, exact.mean(0), exact.var(0))
