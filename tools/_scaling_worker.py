"""The workers of `benchmark_scaling.py`; see `_forks.py` for how they start."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from _forks import read_addresses, run_forks
from _mended_strategy import MendedStrategy
from _scaling_model import (
    Array,
    build_model,
    initial_matrices,
    make_rows,
    trained,
    wrong_weights,
)
from _scaling_results import ALONE, PARTS
from absl import app, flags

import tf_largebatch as tlb

OURS, STOCK = "ours", "stock"
_RESULT_DIR = flags.DEFINE_string("result_dir", None, "See _forks.py.", required=True)
_VARIANT = flags.DEFINE_enum("variant", None, [ALONE, OURS, STOCK], "Strategy.", required=True)
_COMPUTE_MS = flags.DEFINE_float("compute_ms", None, "Of a step.", required=True)
_GRADIENT_MB = flags.DEFINE_float("gradient_mb", None, "In 2^20 bytes.", required=True)
_LAYERS = flags.DEFINE_integer("layers", None, "Of the network.", required=True)
_BATCH = flags.DEFINE_integer("per_replica_batch_size", None, "Images a worker.", required=True)
_WARMUP = flags.DEFINE_integer("warmup_steps", None, "Before all else.", required=True)
_STEPS = flags.DEFINE_integer("steps", None, "Timed ones.", required=True)
_PROFILED = flags.DEFINE_integer("profiled_steps", None, "After them.", required=True)
_BUCKET_BYTES = flags.DEFINE_integer("bucket_bytes", None, "As of LargeBatchStrategy.")
_IN_FLIGHT = flags.DEFINE_integer("max_buckets_in_flight", None, "As of LargeBatchStrategy.")
_WIRE_DTYPE = flags.DEFINE_string("wire_dtype", None, "As of LargeBatchStrategy.")
_TIMEOUT = flags.DEFINE_float("timeout_seconds", None, "For each wait.", required=True)

_SEED = 1
_POLL_SECONDS = 0.05


class StepTimes(keras.callbacks.Callback):
    """Seconds from the begin of a step to that of the next one, without the epoch's first."""

    def __init__(self) -> None:
        super().__init__()
        self._begins: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._begins.append(time.perf_counter())

    @property
    def seconds(self) -> list[float]:
        return np.diff(self._begins[1:]).tolist()


def make_strategy() -> Any:
    if _VARIANT.value == ALONE:
        return tf.distribute.get_strategy()
    if _VARIANT.value == STOCK:
        return MendedStrategy()
    chosen = {
        "bucket_bytes": _BUCKET_BYTES.value,
        "max_buckets_in_flight": _IN_FLIGHT.value,
        "wire_dtype": _WIRE_DTYPE.value or None,
    }
    return tlb.LargeBatchStrategy(
        start_timeout_seconds=_TIMEOUT.value,
        timeout_seconds=_TIMEOUT.value,
        **{name: value for name, value in chosen.items() if value is not None},
    )


class Data:
    """Rows for some steps, and the batches that they are dealt into."""

    def __init__(self, steps: int, workers: int, matrices: Sequence[Array]) -> None:
        self._steps, self._rows_a_step = steps, workers * _BATCH.value
        self._x, self._y = make_rows(steps * self._rows_a_step, matrices)
        self._sharder = tlb.data.GlobalShuffleSharder(
            tlb.data.ArraySource((self._x, self._y)),
            global_batch_size=self._rows_a_step,
            seed=_SEED,
        )

    def batches(self) -> list[tuple[Array, Array]]:
        """The global ones, in order."""
        return [
            (self._x[rows], self._y[rows])
            for rows in (
                self._sharder.positions(epoch=0, step=step, shard_index=0, shard_count=1)
                for step in range(self._steps)
            )
        ]

    def dataset(self, strategy: Any) -> Any:
        """For `fit`: ours, or the same batches as a plain data set."""
        if _VARIANT.value == OURS:
            return self._sharder.train_dataset(strategy)
        x, y = map(np.concatenate, zip(*self.batches(), strict=True))
        dataset = tf.data.Dataset.from_tensor_slices((x, y))
        return dataset.batch(self._rows_a_step, drop_remainder=True).prefetch(tf.data.AUTOTUNE)


def measure(rank: int) -> dict[str, Any]:
    """Trains: some steps to begin with, those that are timed, some that are profiled."""
    workers = len(read_addresses(Path(_RESULT_DIR.value)))
    strategy = make_strategy()
    matrices = initial_matrices(_LAYERS.value, _GRADIENT_MB.value * 2**20)
    with strategy.scope() if _VARIANT.value != ALONE else contextlib.nullcontext():
        model = build_model(matrices, _COMPUTE_MS.value / 1e3)
    # Stopping TensorFlow's profiler crashes processes of its own strategy that wait for slow links.
    is_profiled = _VARIANT.value != STOCK
    data = {
        name: Data(steps, workers, matrices)
        for name, steps in (
            ("warmup", _WARMUP.value),
            ("timed", _STEPS.value + 2),  # the first, and the end of the last
            ("profiled", _PROFILED.value + 2),
        )
        if is_profiled or name != "profiled"
    }
    expected: Sequence[Array] = matrices
    problems: list[str] = []
    times = StepTimes()
    profile = tlb.callbacks.StepProfile(first_step=1, steps=_PROFILED.value)
    callbacks = {"warmup": [], "timed": [times], "profiled": [profile]}
    cpu_seconds = {}
    for name, own in data.items():
        before = time.process_time()
        model.fit(own.dataset(strategy), callbacks=callbacks[name], shuffle=False, verbose=0)
        cpu_seconds[name] = time.process_time() - before
        if rank == 0 and name != "profiled":
            after = trained(expected, own.batches())
            problems += [
                f"{name}: {text}" for text in wrong_weights(model.get_weights(), expected, after)
            ]
            expected = after
    if rank == 0:
        wait_for_others(workers)
    return {
        "step_seconds": times.seconds,
        "cpu_seconds_a_step": cpu_seconds["timed"] / (_STEPS.value + 2),
        "problems": problems,
        "weights_sha256": digest(model),
        "gradient_bytes": sum(matrix.nbytes for matrix in matrices),
        "parts": profile.report and {part: getattr(profile.report, part) for part in PARTS},
        "all_reduce_report": strategy.all_reduce_report() if _VARIANT.value == OURS else None,
    }


def wait_for_others(workers: int) -> None:
    """The chief leaves last: TensorFlow ends the processes of those that it leaves behind."""
    deadline = time.monotonic() + _TIMEOUT.value
    files = [Path(_RESULT_DIR.value) / f"rank_{rank:02d}.json" for rank in range(1, workers)]
    while time.monotonic() < deadline and not all(file.exists() for file in files):
        time.sleep(_POLL_SECONDS)


def digest(model: keras.Model) -> str:
    return hashlib.sha256(b"".join(each.tobytes() for each in model.get_weights())).hexdigest()


def main(_: Sequence[str]) -> int:
    return run_forks(Path(_RESULT_DIR.value), measure)


if __name__ == "__main__":
    app.run(main)
