"""The scaling benchmark: a short real run, its model, and its figures on made-up results."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tool_runs import load, refusal, run_tool

results = load("_scaling_results")
model = load("_scaling_model")
COMPUTE_MS, DELAY_MS = 60.0, 5.0


@pytest.mark.alone
@pytest.mark.timeout(300)
def test_two_workers_behind_a_relay(tmp_path: Path) -> None:
    flags = ["--workers=2", f"--compute_ms={COMPUTE_MS}", f"--one_way_delay_ms={DELAY_MS}"]
    flags += ["--gradient_mb=0.25", "--layers=8", "--steps=4", "--profiled_steps=2", "--repeats=1"]
    flags += ["--bucket_bytes=65536", "--output=out.json", "--plot=out.png"]
    done = run_tool("benchmark_scaling", *flags, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    rows = {(row["variant"], row["workers"]): row for row in report["results"]}
    assert list(rows) == [("alone", 1), ("ours", 2), ("stock", 2)]
    alone = rows["alone", 1]
    for (variant, workers), row in rows.items():
        assert row["verified"] is True, row["problems"]
        assert row["step_ms"] >= COMPUTE_MS
        assert row["images_per_second"] == pytest.approx(workers * 32 * 1e3 / row["step_ms"])
        assert row["efficiency"] == pytest.approx(alone["step_ms"] / row["step_ms"])
        if variant == "stock":  # not profiled
            assert set(row["parts_ms"].values()) == {None}
            continue
        assert row["parts_ms"]["compute"] >= 0.9 * COMPUTE_MS
        # The gradients of the first layers cannot hide, and they travel one way at least.
        exposed = row["parts_ms"]["exposed_communication"]
        assert exposed == 0.0 if variant == "alone" else exposed >= 0.9 * DELAY_MS
    # Stock sums when backward is over, in two steps from worker to worker.
    assert rows["stock", 2]["step_ms"] >= COMPUTE_MS + 2 * DELAY_MS
    assert "measured at start" in report["all_reduce_reports"]["2"]
    assert [relay["variant"] for relay in report["relays"]] == ["ours", "stock"]
    assert report["settings"]["bucket_bytes"] == 65536
    assert report["gradient_bytes"] == pytest.approx(0.25 * 2**20, rel=0.1)  # whole widths
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert "Images a second" in done.stdout


@pytest.mark.parametrize(
    ("flag", "complaint"),
    [
        ("--workers=1,none", "--workers must be whole numbers"),
        ("--workers=0", "--workers must be whole numbers"),
        ("--variants=ours,theirs", "--variants must be of ours, stock"),
        ("--gradient_mb=0", "gradient_mb"),
    ],
)
def test_wrong_flags(flag: str, complaint: str, tmp_path: Path) -> None:
    assert complaint in refusal("benchmark_scaling", flag, cwd=tmp_path)


def worker_result(*step_seconds: float, **changes: Any) -> dict[str, Any]:
    parts = {"compute": 0.08, "input_wait": 0.0, "exposed_communication": 0.01, "other": 0.01}
    return {
        "step_seconds": list(step_seconds),
        "cpu_seconds_a_step": 0.02,
        "problems": [],
        "weights_sha256": "ab",
        "parts": parts,
        **changes,
    }


def run(variant: str, workers: int, repeat: int, *step_seconds: float, **changes: Any) -> Any:
    ranks = [worker_result(*step_seconds)] + [
        worker_result(9.0, **changes) for _ in range(1, workers)
    ]
    return results.Run(variant, workers, repeat, tuple(ranks))


def test_speed_and_efficiency() -> None:
    runs = [
        run("alone", 1, 0, 0.1),
        run("ours", 4, 0, 0.1, 0.15),  # 125 ms
        run("alone", 1, 1, 0.11),
        run("ours", 4, 1, 0.115),
        run("alone", 1, 2, 0.09),
        run("ours", 4, 2, 0.12),
    ]
    alone, ours = results.rows_of(runs, per_replica_batch_size=8)
    assert alone["images_per_second"] == pytest.approx(80.0)  # of a median of 100 ms
    assert alone["efficiency"] == 1.0
    assert ours["step_ms_by_repeat"] == pytest.approx([125.0, 115.0, 120.0])
    assert ours["images_per_second"] == pytest.approx(4 * 8 / 0.12)
    assert ours["efficiency"] == pytest.approx(0.1 / 0.12)
    assert ours["efficiency_min"] == pytest.approx(0.09 / 0.12)
    assert ours["efficiency_max"] == pytest.approx(0.11 / 0.115)
    assert ours["cpu_ms"] == pytest.approx(4 * 20.0)
    assert ours["parts_ms"]["compute"] == pytest.approx(80.0)
    assert alone["verified"] and ours["verified"]


def test_what_is_not_verified() -> None:
    wrong = results.Run("stock", 2, 1, (), "worker 1 exited with code 1")
    (row,) = results.rows_of(
        [run("stock", 2, 0, 0.1, weights_sha256="cd"), wrong], per_replica_batch_size=1
    )
    assert row["problems"] == [
        "repeat 0: worker 1 has other weights than worker 0",
        "repeat 1: worker 1 exited with code 1",
    ]
    assert row["verified"] is False
    assert row["step_ms"] == pytest.approx(100.0)
    assert row["efficiency"] is None  # none ran alone
    (failed,) = results.rows_of([wrong], per_replica_batch_size=1)
    assert failed["images_per_second"] is None
    results.figures_table([row, failed])


def test_most_gradients_are_those_of_the_last_layers() -> None:
    matrices = model.initial_matrices(16, 2**20)
    sizes = [matrix.nbytes for matrix in matrices]
    assert sum(sizes) == pytest.approx(2**20, rel=0.05)
    for before, after in itertools.pairwise(matrices):
        assert before.shape[1] == after.shape[0]
    # Widths 1, 2, 4 and 8, of four layers each: 340 products, of which 256 are the last four's
    # but for the step from one width to the next.
    assert sum(sizes[-4:]) / sum(sizes) > 0.7
    assert sum(sizes[:4]) / sum(sizes) < 0.03


def test_the_reference_descends_along_the_numerical_gradient() -> None:
    random = np.random.default_rng(1)
    matrices = [random.standard_normal(shape) for shape in ((2, 3), (3, 4))]
    x, y = random.standard_normal((5, 2)), random.standard_normal((5, 4))
    (after, _) = model.trained(matrices, [(x, y)])

    def loss(first: Any) -> float:
        return float(np.mean((x @ first @ matrices[1] - y) ** 2))

    for place in np.ndindex(2, 3):
        change = np.zeros((2, 3))
        change[place] = 1e-5
        slope = (loss(matrices[0] + change) - loss(matrices[0] - change)) / 2e-5
        descent = (matrices[0] - after)[place] / model.LEARNING_RATE
        assert descent == pytest.approx(slope, rel=1e-5, abs=1e-8)


def test_a_worker_that_is_left_out_is_found() -> None:
    matrices = model.initial_matrices(8, 2**16)
    x, y = model.make_rows(16 * 4, matrices)
    expected = model.trained(matrices, [(x, y)])
    rounded = [matrix.astype(np.float32) for matrix in expected]
    assert model.wrong_weights(rounded, matrices, expected) == []
    x[:4], y[:4] = 0.0, 0.0  # one of 16 workers adds nothing
    problems = model.wrong_weights(model.trained(matrices, [(x, y)]), matrices, expected)
    assert len(problems) == 8
    assert problems[0].startswith("the change of matrix 0 is off by ")


def test_a_step_of_the_clock_lasts_as_long_as_its_compute() -> None:
    clock = model.Clock(3, 0.06)
    begin = time.monotonic()
    seen = []
    for layer in (0, 1, 2):
        clock.pause(layer, is_forward=True)
        seen.append(time.monotonic() - begin)
        if layer == 1:
            time.sleep(0.003)  # late, which the device does not notice
    for layer in (2, 1, 0):
        clock.pause(layer, is_forward=False)
        seen.append(time.monotonic() - begin)
    third = 0.06 / 9
    due = [third, 2 * third, 3 * third, 5 * third, 7 * third, 9 * third]
    for own, expected in zip(seen, due, strict=True):
        assert expected <= own <= expected + 0.25  # nothing is done early
