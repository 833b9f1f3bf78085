"""The step benchmark: a short real run, and its checks and ratios on made-up results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tool_runs import load, refusal, run_tool

results = load("_step_results")
Entry = results.Entry


@pytest.mark.timeout(300)
def test_two_workers_stock_and_ours(tmp_path: Path) -> None:
    flags = ["--workers=2", "--repeats=1", "--steps=4", "--epochs=2", "--output=step.json"]
    done = run_tool("benchmark_step", *flags, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "step.json").read_text())
    assert [(row["variant"], row["transport"], row["workers"]) for row in report["results"]] == [
        ("stock", "tensorflow", 2),
        ("ours", "tensorflow", 2),
    ]
    for row in report["results"]:
        assert row["verified"] is True, row["problems"]
        low, high = sorted(row["step_ms_all"])
        assert 0 < row["step_ms_min"] == low <= high == row["step_ms_max"]
        assert row["step_ms_p50"] == pytest.approx((low + high) / 2)
        assert row["cpu_ms_p50"] > 0
    (ratio,) = report["ratios"]
    assert (ratio["variant"], ratio["reference"], ratio["workers"]) == ("ours", "stock", 2)
    stock, ours = (row["step_ms_p50"] for row in report["results"])
    assert ratio["ratio"] == pytest.approx(ours / stock)
    assert report["settings"]["steps"] == 4
    assert {"cores", "tensorflow", "keras", "python"} <= set(report["machine"])
    assert "ratio to stock" in done.stdout


def worker_result(**changes: Any) -> dict[str, Any]:
    return {
        "step_ms": [4.0, 6.0],
        "cpu_ms": [3.0, 3.0],
        "losses": [1.0, 0.5, 0.4],
        "steps": 12,
        "weights": [0.5, -1.0],
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({}, None),
        ({"weights": [0.5, -1.0 + 5e-6]}, "worker 1 has other weights than worker 0"),
        ({"losses": [1.0, 0.5, 1.0]}, "worker 1: the loss does not fall"),
        ({"losses": [1.0, float("nan"), 0.4]}, "worker 1: the loss does not fall"),
        ({"steps": 11}, "worker 1 made 11 updates instead of 12"),
    ],
)
def test_one_worker_that_is_not_as_the_others(
    changes: dict[str, Any], complaint: str | None
) -> None:
    problems = results.check_results(
        [worker_result(), worker_result(**changes)], steps=12, reference_weights=[0.5, -1.0]
    )
    assert (problems == []) if complaint is None else (complaint in problems[0])


@pytest.mark.parametrize(("difference", "allowed"), [(0.9e-5, True), (1.1e-5, False)])
def test_weights_that_differ_from_the_first_run(difference: float, allowed: bool) -> None:
    problems = results.check_results(
        [worker_result()], steps=12, reference_weights=[0.5, -1.0 + difference]
    )
    assert (problems == []) is allowed


def test_rows_and_ratios_of_several_repeats() -> None:
    def run(variant: str, repeat: int, times: list[float], *problems: str) -> Any:
        ranks = (worker_result(step_ms=times), worker_result(step_ms=[99.0, 99.0]))
        return results.Run(Entry(variant), 2, repeat, ranks if times else (), problems)

    rows = results.summarise(
        [
            run("stock", 0, [10.0, 20.0]),
            run("ours", 0, [6.0, 6.0]),
            run("stock", 1, [20.0, 20.0]),
            run("ours", 1, [5.0, 5.0], "weights differ"),
            run("stock", 2, []),
            run("ours", 2, [7.0, 7.0]),
        ]
    )
    stock, ours = rows
    assert stock["step_ms_all"] == [10.0, 20.0, 20.0, 20.0]
    assert (stock["step_ms_p50"], ours["step_ms_p50"]) == (20.0, 6.0)
    assert stock["cpu_ms_p50"] == 6.0  # both workers
    assert (stock["verified"], ours["verified"]) == (True, False)
    assert ours["problems"] == ["repeat 1: weights differ"]
    (ratio,) = results.compare(rows, reference=Entry("stock"))
    assert ratio["ratio"] == pytest.approx(0.3)
    assert (ratio["lowest"], ratio["highest"]) == pytest.approx((0.25, 0.4))
    assert ratio["verified"] is False


def run_by(transport: str, weights: list[float], **changes: Any) -> Any:
    fields = {
        "entry": Entry("ours", transport),
        "workers": 2,
        "repeat": 0,
        "results": (worker_result(weights=weights, step_ms=[4.0, 4.0]),),
        "problems": (),
    }
    return results.Run(**{**fields, **changes})


def test_a_transport_is_a_row_of_its_own() -> None:
    by_mpi = run_by("mpi", [0.5], results=(worker_result(step_ms=[1.0, 1.0]),))
    rows = results.summarise([run_by("tensorflow", [0.5]), by_mpi])
    assert [(row["variant"], row["transport"]) for row in rows] == [
        ("ours", "tensorflow"),
        ("ours", "mpi"),
    ]
    (ratio,) = results.compare(rows, reference=Entry("ours"))
    assert (ratio["transport"], ratio["reference_transport"]) == ("mpi", "tensorflow")
    assert ratio["ratio"] == pytest.approx(0.25)
    table = results.figures_table(rows, [ratio], reference=Entry("ours"))
    assert list(table.columns[1].cells) == ["ours", "ours by mpi"]
    assert list(table.columns[-2].cells) == ["", "0.25 (0.25-0.25)"]


@pytest.mark.parametrize(("difference", "allowed"), [(0.9e-6, True), (1.1e-6, False)])
def test_weights_that_differ_by_transport(difference: float, allowed: bool) -> None:
    before = [run_by("tensorflow", [0.5, -1.0])]
    problems = results.check_transport(run_by("mpi", [0.5, -1.0 + difference]), before)
    assert (problems == []) is allowed
    assert allowed or "from those by transport tensorflow" in problems[0]


@pytest.mark.parametrize(
    "other",
    [
        run_by("mpi", [9.0]),
        run_by("tensorflow", [9.0], workers=4),
        run_by("tensorflow", [9.0], entry=Entry("ours_plain_data")),
        run_by("tensorflow", [9.0], results=()),
    ],
)
def test_other_runs_say_nothing_of_a_transport(other: Any) -> None:
    assert results.check_transport(run_by("mpi", [0.5]), [other]) == []
    # The one that does is found behind it.
    problems = results.check_transport(run_by("mpi", [0.5]), [other, run_by("tensorflow", [0.6])])
    assert len(problems) == 1


@pytest.mark.parametrize(
    ("flag", "complaint"),
    [
        ("--transports=pigeons", "--transports must be one or more of tensorflow, mpi"),
        ("--transports=mpi --variants=ours", "--variants must be two or more"),
        ("--transports=tensorflow,mpi --variants=stock", "--variants must be two or more"),
        (
            "--transports=tensorflow,mpi --variants=stock,stock_per_worker_data",
            "--transports=mpi is for our variants",
        ),
    ],
)
def test_wrong_transports(flag: str, complaint: str, tmp_path: Path) -> None:
    done = run_tool("benchmark_step", *flag.split(), cwd=tmp_path)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert complaint in done.stderr


@pytest.mark.parametrize(
    ("flag", "complaint"),
    [
        ("--workers=2,5", "5 of --workers do not divide it"),
        ("--workers=two", "--workers must be whole numbers"),
        ("--variants=ours,theirs", "--variants must be two or more of stock,"),
        ("--steps=1", "--steps"),
    ],
)
def test_wrong_flags(flag: str, complaint: str, tmp_path: Path) -> None:
    assert complaint in refusal("benchmark_step", flag, cwd=tmp_path)
