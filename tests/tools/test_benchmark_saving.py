"""The benchmark of saving: a short real run, and figures of made-up timings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tool_runs import load, refusal, run_tool

results = load("_saving_results")


@pytest.mark.timeout(300)
def test_a_small_model_on_one_and_two_workers(tmp_path: Path) -> None:
    flags = ["--parameters=20000", "--repeats=2", "--workers=1,2", "--output=saving.json"]
    done = run_tool("benchmark_saving", *flags, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "saving.json").read_text())
    rows = report["results"]
    assert [(row["workers"], row["variant"]) for row in rows] == [
        (workers, variant) for workers in (1, 2) for variant in results.VARIANTS
    ]
    for row in rows:
        assert row["verified"] is True, row["problems"]
        assert len(row["stall_ms_all"]) == 2 and row["stall_ms_p50"] > 0
        # One layer of 141 and its slots; iterations and the rate.
        assert row["megabytes"] == pytest.approx((2 * 141 * 142 * 4 + 12) / 1e6)
        assert (row["written_ms_p50"] is None) == (row["variant"] != "training_state")
    assert "written after" in done.stdout


def worker(**seconds: list[float]) -> dict[str, Any]:
    empty = {name: [] for name in (*results.VARIANTS, "written")}
    return {"seconds": {**empty, **seconds}, "megabytes": 50.0, "problems": []}


def test_the_slowest_worker_counts() -> None:
    chief = worker(
        training_state=[0.1, 0.2, 0.3],
        written=[1.0, 2.0, 6.0],
        backup_and_restore=[0.5, 0.6, 0.7],
        save_weights=[0.4, 0.4, 0.4],
    )
    rows = results.rows_of(2, [chief, worker(training_state=[0.4, 0.1, 0.1])], None)
    ours, backup, weights = rows
    assert ours["stall_ms_all"] == [400.0, 200.0, 300.0]
    assert (ours["stall_ms_p50"], ours["stall_ms_max"]) == (300.0, 400.0)
    assert (ours["stall_ms_per_mb"], ours["written_ms_p50"]) == (6.0, 2000.0)
    assert (backup["stall_ms_p50"], backup["written_ms_p50"]) == (600.0, None)
    assert weights["stall_ms_per_mb"] == 8.0
    assert all(row["verified"] for row in rows)


def test_what_is_wrong_with_one_worker_is_wrong_with_all_rows() -> None:
    other = {**worker(training_state=[1.0]), "problems": ["slots are not as they were"]}
    rows = results.rows_of(2, [worker(training_state=[1.0]), other], None)
    assert [row["verified"] for row in rows] == [False] * 3
    assert rows[0]["problems"] == ["worker 1: slots are not as they were"]


def test_a_run_that_failed() -> None:
    rows = results.rows_of(2, (), "not finished after 10 s")
    for row in rows:
        assert row["verified"] is False and row["stall_ms_p50"] is None
        assert row["problems"] == ["not finished after 10 s"]
    assert results.figures_table(rows).row_count == 3


@pytest.mark.parametrize(
    ("flag", "complaint"),
    [("--workers=0", "--workers must be"), ("--workers=", "--workers must"), ("--repeats=0", "--")],
)
def test_wrong_flags(flag: str, complaint: str, tmp_path: Path) -> None:
    assert complaint in refusal("benchmark_saving", flag, cwd=tmp_path)
