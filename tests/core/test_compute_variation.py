"""Uneven replicas: the expected slowest, and draws addressed by seed, step and replica."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tf_largebatch.core.compute_variation import (
    compute_factors,
    expected_maximum,
    slowest_factor,
)
from tf_largebatch.core.errors import ConfigurationError

ARC = math.asin(1 / 3) / math.pi


@pytest.mark.parametrize(
    ("count", "closed_form"),
    [
        (1, 0.0),
        (2, 1 / math.sqrt(math.pi)),
        (3, 3 / (2 * math.sqrt(math.pi))),
        (4, 3 / (2 * math.sqrt(math.pi)) * (1 + 2 * ARC)),
        (5, 5 / (4 * math.sqrt(math.pi)) * (1 + 6 * ARC)),
    ],
)
def test_the_expected_maximum_of_few_normals_has_closed_forms(
    count: int, closed_form: float
) -> None:
    assert expected_maximum(count) == pytest.approx(closed_form, abs=1e-6)


def test_the_expected_maximum_of_many_is_near_its_asymptote() -> None:
    # The largest of n is Gumbel about sqrt(2 ln n) - ..., with Euler's constant for its mean;
    # the next term is of the order of 1 / ln n.
    n = 1e6
    root = math.sqrt(2 * math.log(n))
    centre = root - (math.log(math.log(n)) + math.log(4 * math.pi)) / (2 * root)
    assert expected_maximum(int(n)) == pytest.approx(centre + 0.5772 / root, rel=0.01)


def test_the_slowest_of_one_is_no_slower() -> None:
    assert slowest_factor(1, variation=0.3) == pytest.approx(1.0)
    assert slowest_factor(2, variation=0.1) == pytest.approx(1 + 0.1 / math.sqrt(math.pi))


def factors(hosts: int, *, replicas: int = 4, variation: float = 0.1, seed: int = 3, step: int = 5):
    return compute_factors(
        hosts, replicas_per_host=replicas, variation=variation, seed=seed, step=step
    )


def test_a_host_draws_the_same_whatever_the_number_of_hosts() -> None:
    np.testing.assert_array_equal(factors(100)[:7], factors(7))
    # And of a replica, whatever the hosts it is counted to.
    np.testing.assert_array_equal(
        factors(12, replicas=1).reshape(3, 4).max(axis=1), factors(3, replicas=4)
    )


def test_seeds_and_steps_differ() -> None:
    draws = {tuple(factors(4, seed=seed, step=step)) for seed in (0, 1) for step in (0, 1)}
    assert len(draws) == 4


def test_draws_are_normal() -> None:
    single = (factors(50_000, replicas=1) - 1.0) / 0.1
    assert abs(single.mean()) < 5 / math.sqrt(50_000)
    assert single.std() == pytest.approx(1.0, abs=0.02)
    assert np.mean(single > 1.6449) == pytest.approx(0.05, abs=0.005)
    of_eight = factors(20_000, replicas=8)
    assert of_eight.mean() == pytest.approx(slowest_factor(8, variation=0.1), abs=0.002)


def test_without_variation_all_are_one() -> None:
    np.testing.assert_array_equal(factors(9, variation=0.0), np.ones(9))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: expected_maximum(0), "count=0"),
        (lambda: slowest_factor(2, variation=0.31), "variation=0.31: must be at most 0.3"),
        (lambda: slowest_factor(2, variation=-0.1), "variation=-0.1"),
        (lambda: factors(0), "hosts=0"),
        (lambda: factors(1, replicas=0), "replicas_per_host=0"),
        (lambda: factors(1, seed=-1), "seed=-1"),
        (lambda: factors(1, step=-1), "step=-1"),
        (lambda: factors(1, variation=1.0), "variation=1.0"),
    ],
)
def test_refused(call, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        call()
