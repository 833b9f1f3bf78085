"""The overlap benchmark: a short real run, and its checks and figures on made-up results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tool_runs import load, refusal, run_tool

results = load("_overlap_results")
DELAY_MS = 10.0


@pytest.mark.timeout(300)
def test_two_workers_behind_a_relay(tmp_path: Path) -> None:
    flags = ["--workers=2", "--depth=8", "--image_size=8", "--per_replica_batch_size=2"]
    flags += ["--bucket_bytes=65536", "--repeats=2", "--warmup=0", "--all_reduce=halving_doubling"]
    flags += [f"--one_way_delay_ms={DELAY_MS}", "--timeout_seconds=140", "--output=out.json"]
    done = run_tool("benchmark_overlap", *flags, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    buckets, single = report["results"]
    assert [buckets["variant"], single["variant"]] == ["buckets", "single_bucket"]
    assert [buckets["bucket_bytes"], single["bucket_bytes"]] == [65536, None]
    for row in (buckets, single):
        assert row["verified"] is True, row["problems"]
        for part in ("all_reduce", "step"):
            assert row[part]["min_ms"] >= DELAY_MS  # nothing arrives earlier
            assert len(row[part]["all_ms"]) == 2
        assert 0 < row["possible"] <= 1
        assert row["hidden_min"] <= row["hidden_max"]
    # ResNetSmall of depth 8, 10 classes: weights of 3x3 convolutions, of 1x1 ones on two shortcuts,
    # scale and offset of all ten norms, dense layer.
    convolutions = 9 * (3 * 16 + 2 * 16 * 16 + 16 * 32 + 32 * 32 + 32 * 64 + 64 * 64)
    shortcuts, norms = 16 * 32 + 32 * 64, 2 * (3 * 16 + 3 * 32 + 3 * 64)
    assert report["gradient_bytes"] == 4 * (convolutions + shortcuts + norms + 64 * 10 + 10)
    assert report["relay"]["chunks"] > 0
    assert report["settings"]["one_way_delay_ms"] == DELAY_MS
    assert "halving_doubling" in report["all_reduce_report"]
    assert {"cores", "tensorflow"} <= set(report["machine"])
    assert "single_bucket" in done.stdout


@pytest.mark.parametrize(
    ("flag", "complaint"),
    [
        ("--workers=1", "workers"),
        ("--model=vgg", "model"),
        ("--bucket_bytes=0", "bucket_bytes"),
        ("--all_reduce=torus", "all_reduce"),
    ],
)
def test_wrong_flags(flag: str, complaint: str, tmp_path: Path) -> None:
    assert complaint in refusal("benchmark_overlap", flag, cwd=tmp_path)


def timed(*times_ms: float, sha256: str | None = "ab") -> dict[str, Any]:
    return {
        "spans_seconds": [[float(call), call + ms / 1e3] for call, ms in enumerate(times_ms)],
        "cpu_seconds": [0.001 * ms for ms in times_ms],
        "sha256": sha256,
    }


def worker_result(**changes: Any) -> dict[str, Any]:
    return {
        "timed": {
            "compute": timed(100.0, 120.0, 110.0, sha256=None),
            "buckets_all_reduce": timed(60.0, 50.0, 55.0),
            "buckets_step": timed(115.0, 120.0, 121.0),
            "single_bucket_all_reduce": timed(220.0, 220.0, 220.0),
            "single_bucket_step": timed(330.0, 330.0, 330.0),
        },
        "problems": {"buckets": [], "single_bucket": []},
        **changes,
    }


def test_the_hidden_part() -> None:
    buckets, single = results.rows_of([worker_result()] * 2, bucket_bytes=1000)
    # Of medians 110, 55 and 120, and of the repeats (100, 60, 115), (120, 50, 120), (110, 55, 121).
    assert buckets["hidden"] == pytest.approx(45 / 55)
    assert buckets["hidden_all"] == pytest.approx([45 / 60, 1.0, 44 / 55])
    assert (buckets["hidden_min"], buckets["hidden_max"]) == pytest.approx((0.75, 1.0))
    assert buckets["possible"] == 1.0
    assert buckets["hidden_of_possible"] == pytest.approx(45 / 55)
    assert buckets["compute"]["cpu_p50_ms"] == pytest.approx(2 * 110.0)
    # An all-reduce twice as long as what could hide it, and nothing hidden.
    assert single["hidden"] == pytest.approx(0.0)
    assert single["possible"] == pytest.approx(0.5)
    assert buckets["verified"] and single["verified"]


def test_times_are_those_of_the_slowest_worker() -> None:
    times = results.times_of([timed(10.0, 20.0), timed(30.0, 5.0)])
    assert times["all_ms"] == pytest.approx([30.0, 20.0])
    assert times["p50_ms"] == pytest.approx(25.0)


def test_what_is_not_verified() -> None:
    other = worker_result(problems={"buckets": ["step: far off"], "single_bucket": []})
    other["timed"]["single_bucket_step"] = timed(330.0, 330.0, 330.0, sha256="cd")
    buckets, single = results.rows_of([worker_result(), other], bucket_bytes=1000)
    assert buckets["problems"] == ["worker 1: step: far off"]
    assert single["problems"] == ["worker 1 has other bits than worker 0: single_bucket_step"]
    assert not buckets["verified"] and not single["verified"]
