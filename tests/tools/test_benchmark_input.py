"""The input benchmark: a short real run, and its medians and ratios on made-up passes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tool_runs import load, refusal, run_tool

results = load("_input_results")


@pytest.mark.timeout(300)
def test_one_source_beside_the_references(tmp_path: Path) -> None:
    flags = ["--images=40", "--batch_size=2", "--repeats=1", "--sources=tfrecord"]
    done = run_tool("benchmark_input", *flags, "--output=input.json", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "input.json").read_text())
    names = ["decode_alone", "usual", "ours_tfrecord"]
    assert [row["pipeline"] for row in report["results"]] == names
    for row in report["results"]:
        assert row["verified"] is True, row["problems"]
        assert [row["images_per_cpu_second_p50"]] == row["images_per_cpu_second_all"]
        assert row["images_per_cpu_second_p50"] > 0
        assert row["images_per_second_per_core_p50"] > 0
    speed = {row["pipeline"]: row["images_per_cpu_second_p50"] for row in report["results"]}
    assert {(each["pipeline"], each["reference"]) for each in report["ratios"]} == {
        ("ours_tfrecord", "decode_alone"),
        ("ours_tfrecord", "usual"),
    }
    for each in report["ratios"]:
        ratio = speed["ours_tfrecord"] / speed[each["reference"]]
        assert each["ratio"] == pytest.approx(ratio)
    assert report["settings"]["images"] == 40
    assert "times as fast" in done.stdout


def test_medians_and_ratios() -> None:
    def passes(name: str, *seconds: tuple[float, float]) -> list[object]:
        return [results.Pass(name, 100, wall, cpu, 2**20) for wall, cpu in seconds]

    rows = results.summarise(
        [*passes("usual", (1.0, 4.0), (2.0, 2.0), (4.0, 1.0)), *passes("ours", (1.0, 1.0))],
        cores=2,
        problems={"ours": ["not shuffled"]},
    )
    usual, ours = rows
    assert usual["images_per_second_per_core_p50"] == 25.0  # 100 images in 2 s on 2 cores
    assert usual["images_per_cpu_second_p50"] == 50.0
    assert usual["memory_growth_mib"] == 1.0
    assert (usual["verified"], ours["verified"]) == (True, False)
    (ratio,) = results.compare(rows, references=["usual", "none"])
    assert (ratio["pipeline"], ratio["reference"]) == ("ours", "usual")
    assert (ratio["ratio"], ratio["wall_ratio"]) == (2.0, 2.0)
    assert ratio["verified"] is False


@pytest.mark.parametrize(
    ("flag", "complaint"),
    [
        ("--sources=tar", "--sources must be one or more of tfrecord, array_record, image_folder"),
        ("--images=64", "--images=64 must be 17 batches at least, so --batch_size at most 3"),
    ],
)
def test_wrong_flags(flag: str, complaint: str, tmp_path: Path) -> None:
    assert complaint in refusal("benchmark_input", flag, cwd=tmp_path)
