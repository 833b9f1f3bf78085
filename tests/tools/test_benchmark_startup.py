"""The start-up benchmark: a short real run, and its checks and ratios on made-up results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tool_runs import load, refusal, run_tool

results = load("_startup_results")


@pytest.mark.timeout(300)
def test_two_workers_seeded_differently_and_a_process_alone(tmp_path: Path) -> None:
    flags = ["--workers=2", "--variants=alone,ours_other_seeds", "--repeats=1"]
    flags += ["--model=resnet_small", "--timeout_seconds=140", "--output=out.json"]
    done = run_tool("benchmark_startup", *flags, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    alone, ours = report["results"]
    assert [(row["variant"], row["workers"]) for row in (alone, ours)] == [
        ("alone", 1),
        ("ours_other_seeds", 2),
    ]
    # Ten norms with four variables each, nine convolutions without bias, dense layer with one: a
    # slot for each of 31 weights, the optimizer's counter and learning rate.
    weights = 9 + 2 * 9 + 2
    for row in (alone, ours):
        assert row["verified"] is True, row["problems"]
        assert row["variables"] == weights + 2 * 9 + weights + 2
        assert row["seconds_min"] == row["seconds_p50"] == row["seconds_max"] > 0
        assert row["ratio"] is None  # nothing to compare with
    assert report["settings"]["workers"] == 2
    assert {"cores", "tensorflow"} <= set(report["machine"])
    assert "ours_other_seeds" in done.stdout


@pytest.mark.parametrize(
    ("flag", "complaint"),
    [
        ("--workers=1", "workers"),
        ("--variants=ours", "--variants must be one or more of alone, side_by_side, stock,"),
        ("--variants=", "--variants must be one or more of"),
        ("--model=vgg", "model"),
    ],
)
def test_wrong_flags(flag: str, complaint: str, tmp_path: Path) -> None:
    assert complaint in refusal("benchmark_startup", flag, cwd=tmp_path)


def worker_result(seconds: float = 2.0, sha256: str = "ab") -> dict[str, Any]:
    return {
        "seconds": seconds,
        "cpu_seconds": 1.5,
        "strategy_seconds": seconds / 4,
        "variables": 7,
        "sha256": sha256,
    }


@pytest.mark.parametrize(
    ("digests", "complaint"),
    [
        (["ab", "ab"], None),
        (["ab", "cd"], "worker 1 has other variables than worker 0"),
        (["cd", "cd"], "worker 0 has other variables than in the first run"),
    ],
)
def test_variables_that_differ(digests: list[str], complaint: str | None) -> None:
    by_rank = [worker_result(sha256=digest) for digest in digests]
    problems = results.check_results(by_rank, expected="ab")
    assert problems == ([] if complaint is None else [complaint])


def run(variant: str, repeat: int, seconds: list[float], *problems: str) -> Any:
    return results.Run(variant, repeat, tuple(map(worker_result, seconds)), problems)


def test_rows_and_ratios_of_several_repeats() -> None:
    rows = results.summarise(
        [
            run("alone", 0, [1.0]),
            run("stock", 0, [8.0, 7.0]),
            run("ours", 0, [2.0, 3.0]),
            run("alone", 1, [1.0]),
            run("stock", 1, [6.0, 10.0]),
            run("ours", 1, [2.0, 2.0], "worker 1 has other variables"),
            run("alone", 2, [1.0]),
            run("stock", 2, [12.0, 12.0]),
            run("ours", 2, []),
        ],
        reference="stock",
    )
    alone, stock, ours = rows
    assert stock["seconds_all"] == [8.0, 10.0, 12.0]  # of the slowest worker
    assert (stock["seconds_p50"], stock["ratio"]) == (10.0, 1.0)
    assert alone["ratio"] == pytest.approx(0.1)
    assert stock["strategy_seconds_p50"] == pytest.approx(2.5)
    assert (stock["cpu_seconds_p50"], alone["cpu_seconds_p50"]) == (3.0, 1.5)
    assert ours["ratio"] == pytest.approx(2.5 / 10)
    assert (ours["ratio_lowest"], ours["ratio_highest"]) == pytest.approx((0.2, 3 / 8))
    assert ours["problems"] == ["repeat 1: worker 1 has other variables"]
    assert not ours["verified"] and stock["verified"]


def test_a_variant_that_failed_in_all_repeats() -> None:
    failed, ours = results.summarise(
        [run("stock", 0, [], "not finished after 10 s"), run("ours", 0, [1.0])], reference="stock"
    )
    assert failed["seconds_p50"] is failed["workers"] is ours["ratio"] is None
    assert failed["verified"] is False
