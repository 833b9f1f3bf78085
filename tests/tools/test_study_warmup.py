"""The study of warmup: which runs it makes, what a run is, its file, its statistics."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import tf_largebatch as tlb
from tests.tools.tool_runs import ROOT, load, refusal, run_tool

settings = load("_study_settings")
results = load("_study_results")
report = load("_study_report")
plots = load("_study_plots")
Setting = settings.Setting


def outcome(error: float, *, epochs: int = 20) -> dict[str, Any]:
    """As a run returns it, with made-up errors."""
    curve = [round(error + 0.4 * 0.8**epoch, 5) for epoch in range(epochs)]
    return {
        "updates": 1280,
        "val_error": error,
        "test_error": error,
        "test_errors": [error] * 5,
        **{name: curve for name in ("learning_rate", "train_loss", "train_error")},
        "seconds": 60.0,
    }


# Of the study


@pytest.mark.parametrize(
    ("name", "peak", "first"),
    [
        ("baseline", 0.1, 0.1),
        ("gradual", 1.6, 0.1 + 1.5 / 192),  # grows from the first update of 3 x 64 on
        ("constant", 1.6, 0.1),
        ("none", 1.6, 1.6),
        ("unscaled", 0.1, 0.1),
        ("sqrt", 0.4, 0.1 + 0.3 / 192),
    ],
)
def test_the_rates_of_the_table(name: str, peak: float, first: float) -> None:
    setting = settings.STUDIES["table"][name]
    recipe = setting.recipe(8192)
    rates = recipe.learning_rate_at(np.arange(recipe.total_steps))
    updates = 8192 // setting.batch
    assert recipe.total_steps == 20 * updates
    assert recipe.global_batch_size == setting.batch
    assert rates[3 * updates] == pytest.approx(peak)
    assert rates[0] == pytest.approx(first, rel=0.1)
    by_epoch = rates[updates - 1 :: updates]
    expected = peak * np.repeat([1.0, 0.1, 0.01, 0.001], [10, 5, 3, 2])
    np.testing.assert_allclose(by_epoch[3:], expected[3:])


def test_the_rules_behind_the_rates() -> None:
    table = settings.STUDIES["table"]
    square_root = tlb.sqrt_scaling_rule(0.1, global_batch_size=128, base_batch_size=8)
    assert table["sqrt"].rate == pytest.approx(square_root)
    for setting in settings.STUDIES["size"].values():
        rule = tlb.linear_scaling_rule(0.1, global_batch_size=setting.batch, base_batch_size=8)
        assert setting.rate == pytest.approx(rule)


def test_every_run_has_a_recipe_and_micro_batches_of_eight() -> None:
    for variants in settings.STUDIES.values():
        for setting in variants.values():
            recipe = setting.recipe(8192)
            assert recipe.peak_learning_rate == pytest.approx(setting.rate)
            assert recipe.per_replica_batch_size == 8
            assert recipe.steps_per_epoch * setting.batch == 8192  # no row is left out


def test_a_rate_without_a_whole_reference_batch_is_refused() -> None:
    with pytest.raises(tlb.ConfigurationError, match=r"the nearest is 1\.42222"):
        Setting(batch=128, rate=1.5, warmup="none").recipe(8192)


def test_runs_that_studies_share_are_made_once() -> None:
    runs = settings.chosen_settings(["table", "size", "gamma"], only=[], seeds=[1, 2], split=0)
    assert len(runs) == len(set(runs)) == 2 * (6 + 5 + 2)  # 8 and 128 of `size` are in the table
    assert [run.seed for run in runs] == [1] * 13 + [2] * 13
    (one,) = settings.chosen_settings(["table"], only=["gradual"], seeds=[3], split=1)
    assert one == dataclasses.replace(settings.STUDIES["table"]["gradual"], seed=3, split=1)


# The file of results


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "study" / "results.jsonl"
    assert results.read_rows(path) == {}
    first, second = (Setting(batch=8, rate=0.1, warmup="none", seed=seed) for seed in (1, 2))
    results.append_row(path, first, outcome(0.25))
    results.append_row(path, second, outcome(0.3))
    results.append_row(path, first, outcome(0.5))  # made twice by two processes
    rows = results.read_rows(path)
    assert {setting: row["test_error"] for setting, row in rows.items()} == {
        first: 0.25,
        second: 0.3,
    }


def test_a_line_that_was_not_finished_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    first, second = (Setting(batch=8, rate=0.1, warmup="none", seed=seed) for seed in (1, 2))
    results.append_row(path, first, outcome(0.25))
    whole = path.read_text()
    path.write_text(whole + '{"setting": {"batch": 1')
    assert list(results.read_rows(path)) == [first]
    results.append_row(path, second, outcome(0.3))
    assert path.read_text().startswith(whole)
    assert list(results.read_rows(path)) == [first, second]


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"[]", b"\xff", b'{"setting": {"bach": 8}}', b'{"seting": {}}', b"3"]
)
def test_a_damaged_line_is_named(damage: bytes, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    first = Setting(batch=8, rate=0.1, warmup="none")
    results.append_row(path, first, outcome(0.25))
    path.write_bytes(path.read_bytes() + damage + b"\n")
    with pytest.raises(tlb.DataError, match=r"results\.jsonl, line 2: is not a run"):
        results.read_rows(path)


def append_many(path: Path, seeds: range) -> None:
    for seed in seeds:
        setting = Setting(batch=8, rate=0.1, warmup="none", seed=seed)
        results.append_row(path, setting, {"text": "x" * 20_000})


def test_several_processes_may_write(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    fork = multiprocessing.get_context("fork")
    writers = [
        fork.Process(target=append_many, args=(path, range(first, first + 20)))
        for first in (0, 20, 40)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert sorted(setting.seed for setting in results.read_rows(path)) == list(range(60))


# Statistics


def test_comparison_by_hand() -> None:
    found = report.compare([31.0, 33.0, 35.0], [22.0, 23.0, 24.0])
    assert found.difference == pytest.approx(10.0)
    assert found.p_value == pytest.approx(2 / 20)  # all above all: 2 of C(6, 3) orders
    # Welch: variances 4 and 1, standard error sqrt(5/3), (5/3)^2 / ((4/3)^2/2 + (1/3)^2/2)
    # = 50/17 degrees of freedom, whose 97.5 % point of t is 3.2182.
    half = 3.2182 * np.sqrt(5 / 3)
    assert (found.low, found.high) == pytest.approx((10 - half, 10 + half), abs=2e-3)


def test_five_against_five_as_in_the_paper_has_p_0008() -> None:
    found = report.compare([5.0, 6.0, 7.0, 8.0, 19.0], [0.0, 1.0, 2.0, 3.0, 4.0])
    assert found.p_value == pytest.approx(2 / 252)


def made_up_rows() -> dict[Any, dict[str, Any]]:
    rows = {}
    for study in settings.STUDIES.values():
        for variant in study.values():
            for seed in range(4):
                row = outcome((20 + seed) / 100)
                if seed == settings.SELECTION_SEED:
                    row = {**row, "test_error": None, "test_errors": []}
                rows[dataclasses.replace(variant, seed=seed)] = row
    return rows


def test_runs_of_selection_count_for_no_result() -> None:
    rows = made_up_rows()
    runs = report.runs_of_study(rows, "table", split=0)
    assert [row["test_error"] for row in runs["gradual"]] == [0.21, 0.22, 0.23]
    selection = report.runs_of_study(rows, "table", split=0, selection=True)
    assert [row["test_error"] for row in selection["gradual"]] == [None]
    assert not any(report.runs_of_study(rows, "table", split=1).values())
    assert report.percent([0.21, 0.22, 0.23]) == "22.0 ± 1.0"


def test_report_and_plots(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    with path.open("w") as file:
        for setting, row in made_up_rows().items():
            file.write(json.dumps({"setting": setting.to_dict(), **row}) + "\n")
    done = run_tool("study_warmup", "--report", f"--results={path}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for text in ("22.0 ± 1.0", "constant - gradual", "p = 1", "seed 0, val.", "lars_512_8"):
        assert text in done.stdout
    for name in ("training_error", "size", "gamma", "rates"):
        size = (tmp_path / f"{name}.png").stat().st_size
        assert 5_000 < size < 100_000


def test_no_plots_without_runs(tmp_path: Path) -> None:
    assert plots.write_plots({}, tmp_path, split=0) == []


@pytest.mark.parametrize(
    ("flag", "complaint"),
    [
        ("--study=tables", "must be of table, size"),
        ("--only=gradul", "--study=table has baseline, gradual"),
        ("--study=", "--study=: must be of table, size"),
        ("--seeds=many", "must be as 0, or 1-5"),
        ("--seeds=5-1", "must be as 0, or 1-5"),
        ("--results=.", "--results=.: Is a directory"),
        ("extra", "Unknown arguments: extra; flags begin with --"),
        ("--processes=0", "--processes"),
    ],
)
def test_wrong_flags(flag: str, complaint: str, tmp_path: Path) -> None:
    assert complaint in refusal("study_warmup", flag, cwd=tmp_path)


@pytest.mark.parametrize(
    ("contents", "complaint"),
    [
        (None, "results.jsonl: No such file"),
        ("", "has no runs of --split=0"),
        ("\n", "results.jsonl, line 1: is not a run"),
    ],
)
def test_a_report_of_nothing(contents: str | None, complaint: str, tmp_path: Path) -> None:
    if contents is not None:
        (tmp_path / "results.jsonl").write_text(contents)
    done = run_tool("study_warmup", "--report", "--results=results.jsonl", cwd=tmp_path)
    assert done.returncode == 2
    assert complaint in done.stderr and "Traceback" not in done.stderr


# Runs


def test_the_processes_of_a_killed_study_end(tmp_path: Path) -> None:
    study = subprocess.Popen(
        [sys.executable, ROOT / "tools" / "study_warmup.py", "--results=r", "--processes=1"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    started: list[psutil.Process] = []
    try:
        while not any(_has_tensorflow(process) for process in started):
            assert study.poll() is None
            time.sleep(0.1)
            started = psutil.Process(study.pid).children(recursive=True)
    finally:
        study.kill()
        study.wait()
    _, left = psutil.wait_procs(started, timeout=60)
    for process in left:
        process.kill()
    assert not left


def _has_tensorflow(process: psutil.Process) -> bool:
    try:
        return "libtensorflow" in Path(f"/proc/{process.pid}/maps").read_text()
    except OSError:
        return False


@pytest.fixture(scope="module")
def runs() -> Any:
    before = list(sys.path)
    load("_local_cluster")
    yield load("_study_runs")
    sys.path[:] = before


def small_parts() -> dict[str, Any]:
    random = np.random.default_rng(0)
    return {
        name: (
            random.normal(size=(count, 16, 16, 1)).astype(np.float32),
            (np.arange(count) % 17).astype(np.int32),
        )
        for name, count in {"train": 64, "validation": 20, "test": 30}.items()
    }


def test_a_run(runs: Any) -> None:
    setting = Setting(batch=16, rate=0.2, warmup="gradual", epochs=2, warmup_epochs=1.0)
    parts = small_parts()
    row = runs.train(setting, parts)
    assert json.loads(json.dumps(row, allow_nan=False)) == row
    assert row["updates"] == 2 * 64 // 16
    for name in ("learning_rate", "train_loss", "train_error", "val_errors"):
        assert len(row[name]) == 2
    assert row["learning_rate"] == pytest.approx([0.2 - 0.1 / 4, 0.02], abs=0.03)
    assert row["test_error"] == np.median(row["test_errors"])
    for error, count in ((row["test_errors"][-1], 30), (row["val_errors"][-1], 20)):
        assert error * count == pytest.approx(round(error * count), abs=1e-3)

    unseen = runs.train(dataclasses.replace(setting, seed=settings.SELECTION_SEED), parts)
    assert (unseen["test_error"], unseen["test_errors"]) == (None, [])
    assert unseen["weights_sha256"] != row["weights_sha256"]
