"""The benchmark of failures: a real case, and its checks on made-up ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tool_runs import load, refusal, run_tool

results = load("_failure_results")
Case, Trial = results.Case, results.Trial
ADDRESSES = ["127.0.0.1:15000", "127.0.0.1:15001", "127.0.0.1:15002"]


@pytest.mark.timeout(240)
def test_a_worker_that_is_absent_or_told_to_end(tmp_path: Path) -> None:
    flags = ["--workers=2", "--cases=terminate,absent", "--repeats=1", "--timeout_seconds=2"]
    flags += ["--culprits=other"]
    done = run_tool("benchmark_failures", *flags, "--output=out.json", cwd=tmp_path)

    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads((tmp_path / "out.json").read_text())
    rows = report["results"]
    assert [(row["case"], row["culprit"]) for row in rows] == [
        ("terminate", "other"),
        ("absent", "other"),
    ]
    for row in rows:
        assert row["verified"] is True, row["problems"]
        assert row["workers"] == 2
        assert row["seconds_p50"] == row["seconds_max"] == row["seconds_all"][0]
        assert row["case"] == "terminate" or row["seconds_max"] >= 2.0  # nobody gives up earlier
    assert report["settings"]["timeout_seconds"] == 2.0
    assert "absent" in done.stdout


@pytest.mark.parametrize(
    ("flag", "complaint"),
    [
        ("--workers=2,1", "--workers=2,1: must be one or more whole numbers above 1"),
        ("--workers=two", "--workers=two: must be"),
        ("--workers=", "--workers=: must be"),
        ("--cases=kill,crash", "--cases=kill,crash: must be of kill, stop, absent, terminate"),
        ("--culprits=all", "--culprits=all: must be of chief, other"),
        ("--timeout_seconds=0", "timeout_seconds"),
    ],
)
def test_wrong_flags(flag: str, complaint: str, tmp_path: Path) -> None:
    assert complaint in refusal("benchmark_failures", flag, cwd=tmp_path)


def kill(culprit: int = 1, *, name: str = "kill") -> Any:
    return Case(name=name, culprit=culprit, workers=3)


NAMES_IT = "Error\n  worker 1 at 127.0.0.1:15001 is gone"


@pytest.mark.parametrize(
    ("code", "log", "problem"),
    [
        (1, NAMES_IT, None),
        (None, NAMES_IT, "worker 2 did not end"),
        (0, NAMES_IT, "worker 2 ended with code 0 instead of 1"),
        (-6, NAMES_IT, "worker 2 ended with code -6 instead of 1"),
        (1, "worker 1 at 127.0.0.1:15002", "worker 2 does not name worker 1 at 127.0.0.1:15001"),
        (1, "worker 0 at 127.0.0.1:15001", "worker 2 does not name worker 1 at 127.0.0.1:15001"),
    ],
)
def test_ends_that_are_not_as_they_should_be(
    code: int | None, log: str, problem: str | None
) -> None:
    told = results.check_ends(kill(), {0: 1, 2: code}, {0: NAMES_IT, 2: log}, ADDRESSES)
    assert told == ([] if problem is None else [problem])


def test_who_is_told_to_end_leaves_with_143_and_names_nobody() -> None:
    case = kill(name="terminate")
    logs = dict.fromkeys(range(3), "")
    assert results.check_ends(case, {0: 143, 1: 143, 2: 143}, logs, ADDRESSES) == []
    assert results.check_ends(case, {0: 143, 1: -15, 2: 143}, logs, ADDRESSES) == [
        "worker 1 ended with code -15 instead of 143"
    ]


@pytest.mark.parametrize(
    ("before", "after", "is_newer"),
    [([0], [0, 9], True), ([], [3], True), ([0, 9], [0, 9], False), ([4], [], False), ([], [], 0)],
)
def test_a_newer_state(before: list[int], after: list[int], is_newer: bool) -> None:
    assert bool(results.check_states(before, after)) == (not is_newer)


def trial(case: Any, seconds: float | None, *problems: str) -> Any:
    return Trial(case=case, seconds=seconds, problems=problems)


def test_rows_of_several_repeats() -> None:
    chief, other = kill(0), kill(2)
    rows = results.summarise(
        [
            trial(chief, 1.0),
            trial(other, 9.0),
            trial(chief, 5.0),
            trial(other, None, "worker 0 did not end"),
            trial(chief, 2.0),
        ]
    )
    assert [(row["culprit"], row["seconds_p50"], row["seconds_max"]) for row in rows] == [
        ("chief", 2.0, 5.0),
        ("other", 9.0, 9.0),
    ]
    assert rows[0]["seconds_all"] == [1.0, 5.0, 2.0]
    assert rows[0]["verified"] is True
    assert rows[1]["problems"] == ["repeat 1: worker 0 did not end"]
    assert rows[1]["verified"] is False


def test_a_case_that_always_failed() -> None:
    (row,) = results.summarise([trial(kill(), None, "the workers do not train")])
    assert row["seconds_p50"] is row["seconds_max"] is None
    assert results.figures_table([row], timeout_seconds=10.0).row_count == 1
