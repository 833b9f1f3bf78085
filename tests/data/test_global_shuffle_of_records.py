"""What a shuffle buffer cannot do: a true shuffle of files that are sorted by class; resume."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.processes import run_python
from tf_largebatch.data import GlobalShuffleSharder, TFRecordSource

ROOT = Path(__file__).parents[2]
CLASSES, ROWS_PER_CLASS, SHARDS = 100, 600, 10
ROWS = CLASSES * ROWS_PER_CLASS
BATCH, BATCHES = 500, 20  # 10,000 rows: 100 of each class are expected


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Records that hold their own number, class after class, as packed folders are."""
    folder = tmp_path_factory.mktemp("sorted")
    paths = [str(folder / f"sorted-{shard:02d}.tfrecord") for shard in range(SHARDS)]
    for shard, path in enumerate(paths):
        with tf.io.TFRecordWriter(path) as writer:
            for row in range(shard * ROWS // SHARDS, (shard + 1) * ROWS // SHARDS):
                writer.write(str(row).encode())
    return paths


def classes_of_first_batches(dataset: Any) -> np.ndarray:
    """How many rows of each class come in the first batches."""
    batches = [batch.numpy().astype(np.int64) for batch in dataset.take(BATCHES)]
    return np.bincount(np.concatenate(batches) // ROWS_PER_CLASS, minlength=CLASSES)


def largest_deviation(counts: np.ndarray) -> float:
    """From the uniform histogram, in standard deviations of drawing without putting back."""
    drawn, share = counts.sum(), 1 / CLASSES
    variance = drawn * share * (1 - share) * (ROWS - drawn) / (ROWS - 1)
    return float(np.max(np.abs(counts - drawn * share)) / np.sqrt(variance))


def test_first_batches_hold_all_classes_alike_where_a_shuffle_buffer_fails(
    files: list[str],
) -> None:
    sharder = GlobalShuffleSharder(TFRecordSource(files), global_batch_size=BATCH, seed=4)
    # The largest of 100 normal deviations exceeds 4.5 once in 1,500 times.
    assert largest_deviation(classes_of_first_batches(sharder.train_dataset())) < 4.5
    buffered = tf.data.TFRecordDataset(files).shuffle(10_000, seed=4).batch(BATCH)
    counts = classes_of_first_batches(buffered)
    assert (counts == 0).sum() > CLASSES / 2  # more than half of the classes not seen at all
    assert largest_deviation(counts) > 20


def test_memory_is_eight_bytes_a_row_and_does_not_grow(files: list[str]) -> None:
    script = "tests/data/_record_memory_script.py"
    bytes_of = json.loads(run_python(script, json.dumps(files)))
    assert 8 * ROWS <= bytes_of["held"] < 9 * ROWS
    assert bytes_of["rows"] == 30_000
    assert bytes_of["peak"] < 1e6  # a buffer of them would hold some 50 bytes each


def steps_read(
    files: list[str], *, workers: int, state: dict[str, Any] | None, kill_after: int | None
) -> list[tuple[dict[str, Any], list[int]]]:
    """What a process of its own reads, until it is killed or at the end of the epoch."""
    steps = []
    command = [sys.executable, "tests/data/_read_steps_script.py"]
    arguments = [str(Path(files[0]).parent / "sorted-0[01].tfrecord"), str(workers)]
    with subprocess.Popen(
        [*command, *arguments, json.dumps(state)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "-1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            steps.append(tuple(json.loads(line)))
            if len(steps) == kill_after:
                process.kill()
                break
    return steps


@pytest.mark.timeout(200)
def test_killed_in_mid_epoch_and_resumed_by_another_number_of_workers(files: list[str]) -> None:
    before = steps_read(files, workers=2, state=None, kill_after=67)
    state, _ = before.pop()  # killed in this step, which is made again
    assert state["step"] == 66
    after = steps_read(files, workers=3, state=state, kill_after=None)
    rows = [row for _, step in (*before, *after) for row in step]
    assert len(before) + len(after) == 200
    assert sorted(rows) == list(range(ROWS * 2 // SHARDS))
    assert rows != sorted(rows)
