"""The optimizer benchmark: a short real run, its oracle's checks, and ratios of made-up timings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tool_runs import load, refusal, run_tool

results = load("_optimizer_results")


@pytest.mark.timeout(300)
def test_all_optimizers_on_a_small_network(tmp_path: Path) -> None:
    flags = ["--network=resnet_small", "--repeats=2", "--updates=1", "--output=optimizers.json"]
    done = run_tool("benchmark_optimizers", *flags, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "optimizers.json").read_text())
    names = ["keras_sgd", "momentum_sgd", "momentum_sgd_decay", "lars"]
    assert [row["optimizer"] for row in report["results"]] == names
    for row in report["results"]:
        assert row["verified"] is True, row["problems"]
        low, high = sorted(row["update_ms_all"])
        assert 0 < row["update_ms_min"] == low <= high == row["update_ms_max"]
    times = {row["optimizer"]: row["update_ms_p50"] for row in report["results"]}
    assert [ratio["optimizer"] for ratio in report["ratios"]] == names[1:]
    for ratio in report["ratios"]:
        expected = times[ratio["optimizer"]] / times["keras_sgd"]
        assert ratio["ratio"] == pytest.approx(expected)
    assert report["settings"] == {"network": "resnet_small", "repeats": 2, "updates": 1}
    assert "ratio to keras_sgd" in done.stdout


def test_the_oracle_in_closed_form() -> None:
    # |w| = 5, |g| = 2, 0.1 * 5 more: ratio 0.002; two steps of momentum 0.5 on a vector.
    weights = [np.array([[3.0, 4.0]]), np.array([1.0])]
    gradients = [np.array([[0.0, 2.0]]), np.array([1.0])]
    settings: dict[str, Any] = {"learning_rate": 10.0, "momentum": 0.5, "weight_decay": 0.1}
    (w, _) = results.expected_weights(
        weights, gradients, updates=1, trust_coefficient=0.001, **settings
    )
    np.testing.assert_allclose(w, [[3 - 0.02 * 0.3, 4 - 0.02 * 2.4]])
    (w, b) = results.expected_weights(weights, gradients, updates=1, **settings)
    np.testing.assert_allclose(w, [[0.0, -20.0]], atol=1e-12)
    np.testing.assert_allclose(b, [-9.0])
    (_, b) = results.expected_weights(weights, gradients, updates=2, **settings)
    np.testing.assert_allclose(b, [1.0 - 10.0 - 15.0])


@pytest.mark.parametrize(("error", "count"), [(5e-6, 0), (5e-5, 1), (float("nan"), 1)])
def test_weights_that_are_not_numpys(error: float, count: int) -> None:
    start, expected = [np.zeros(2), np.ones(2)], [np.array([0.1, 0.0]), np.ones(2)]
    found = [expected[0] + error, expected[1]]
    problems = results.check_weights(["first", "second"], start, found, expected)
    assert len(problems) == count
    assert all(text.startswith("first is ") for text in problems)


def test_medians_and_ratios() -> None:
    times = {"keras_sgd": [10.0, 30.0, 20.0], "lars": [15.0, 15.0, 40.0]}
    timings = [
        results.Timing(name, wall_ms=times[name][i], cpu_ms=2 * times[name][i])
        for i in range(3)
        for name in times
    ]
    rows = results.summarise(timings, {"keras_sgd": [], "lars": ["a is not NumPy's"]})
    assert [row["update_ms_p50"] for row in rows] == [20.0, 15.0]
    assert [row["cpu_ms_p50"] for row in rows] == [40.0, 30.0]
    assert [row["verified"] for row in rows] == [True, False]
    (ratio,) = results.compare(rows)
    assert (ratio["optimizer"], ratio["reference"]) == ("lars", "keras_sgd")
    assert (ratio["ratio"], ratio["cpu_ratio"]) == (0.75, 0.75)
    assert (ratio["lowest"], ratio["highest"]) == (0.5, 2.0)
    assert ratio["verified"] is False


@pytest.mark.parametrize(
    ("flag", "complaint"),
    [
        ("--optimizers=lars", "--optimizers must be two or more of keras_sgd, momentum_sgd,"),
        ("--optimizers=keras_sgd,adam", "--optimizers must be two or more of keras_sgd,"),
        ("--network=vgg", "--network"),
    ],
)
def test_wrong_flags(flag: str, complaint: str, tmp_path: Path) -> None:
    assert complaint in refusal("benchmark_optimizers", flag, cwd=tmp_path)
