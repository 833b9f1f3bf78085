"""The ghost batch norm benchmark: a short real run, and what it refuses."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
from tool_runs import refusal, run_tool


def test_two_sizes(tmp_path: Path) -> None:
    flags = ["--sizes=8x3x2,64x5", "--virtual_batch_size=4", "--repeats=3", "--output=ghost.json"]
    done = run_tool("benchmark_ghost_batch_norm", *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "ghost.json").read_text())
    assert [(row["size"], row["layer"]) for row in report["results"]] == [
        ("8x3x2", "keras"),
        ("8x3x2", "ghost"),
        ("64x5", "keras"),
        ("64x5", "ghost"),
    ]
    for row in report["results"]:
        assert row["verified"] is True, row["problems"]
        low, middle, high = sorted(row["time_ms_all"])
        assert 0 < row["time_ms_min"] == low <= row["time_ms_p50"] == middle
        assert middle <= high == row["time_ms_max"]
    for ratio, keras, ghost in zip(
        report["ratios"], report["results"][::2], report["results"][1::2], strict=True
    ):
        pairs = [
            mine / theirs
            for mine, theirs in zip(ghost["time_ms_all"], keras["time_ms_all"], strict=True)
        ]
        assert ratio["ratio"] == pytest.approx(statistics.median(pairs))
        assert (ratio["lowest"], ratio["highest"]) == pytest.approx((min(pairs), max(pairs)))
        assert ratio["cpu_ratio"] > 0
    assert report["settings"] == {"virtual_batch_size": 4, "repeats": 3}
    assert "CPU ratio" in done.stdout


@pytest.mark.parametrize(
    ("flag", "complaint"),
    [
        ("--sizes=12x0", "--sizes must be like"),
        ("--sizes=48x8", "--virtual_batch_size=32 must divide the rows of 48x8; 16 does"),
        ("--repeats=0", "--repeats"),
    ],
)
def test_wrong_flags(flag: str, complaint: str, tmp_path: Path) -> None:
    assert complaint in refusal("benchmark_ghost_batch_norm", flag, cwd=tmp_path)
