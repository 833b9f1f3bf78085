"""The workers of `benchmark_all_reduce.py`; see `_forks.py` for how they start.

They also share what the values of all of them sum to, which is computed before the fork.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from _all_reduce_values import ITEM_BYTES, Truth, Values, values_of
from _forks import read_addresses, run_forks
from _start_line import StartLine
from absl import app, flags

import tf_largebatch as tlb

_RESULT_DIR = flags.DEFINE_string("result_dir", None, "See above.", required=True)
_ALGORITHMS = flags.DEFINE_list("algorithms", None, "Names for AllReduceOptions.", required=True)
_SIZES = flags.DEFINE_list("sizes_bytes", None, "Multiples of 4 * buckets.", required=True)
_BUCKETS = flags.DEFINE_integer("buckets", 1, "Tensors that a size is cut into.")
_IN_FLIGHT = flags.DEFINE_integer("max_buckets_in_flight", None, "As of AllReduceOptions.")
_WIRE_DTYPE = flags.DEFINE_string("wire_dtype", "", "Of all but TensorFlow's own algorithm.")
_REPEATS = flags.DEFINE_integer("repeats", None, "Timed calls at most.", required=True)
_WARMUP = flags.DEFINE_integer("warmup", None, "Calls before them.", required=True)
_MAX_SECONDS = flags.DEFINE_float("max_seconds", 0.0, "For timed calls; 0 is without limit.")
_TIMEOUT = flags.DEFINE_float("timeout_seconds", None, "For each wait.", required=True)


def make_all_reduce(strategy: Any, algorithm: str, *, bucket_bytes: int) -> Callable[..., Any]:
    """The traced function from tensors to their sums over the workers."""
    in_flight = {} if _IN_FLIGHT.value is None else {"max_buckets_in_flight": _IN_FLIGHT.value}
    options = tlb.AllReduceOptions(
        algorithm=algorithm,
        bucket_bytes=bucket_bytes,
        wire_dtype=wire_dtype_of(algorithm),
        **in_flight,
    )

    def sum_over_workers(*tensors: tf.Tensor) -> Any:
        return tf.distribute.get_replica_context().all_reduce("SUM", tensors, options=options)

    return tf.function(lambda *tensors: strategy.run(sum_over_workers, args=tensors))


def wire_dtype_of(algorithm: str) -> str | None:
    return None if algorithm == "tensorflow" else _WIRE_DTYPE.value or None


class Row:
    """One algorithm at one size, on this worker."""

    def __init__(self, strategy: Any, algorithm: str, truth: Truth, rank: int) -> None:
        self._algorithm, self._truth = algorithm, truth
        self._all_reduce = make_all_reduce(
            strategy, algorithm, bucket_bytes=truth.length * ITEM_BYTES // _BUCKETS.value
        )
        values = values_of(rank, truth.length, truth.workers)
        self._whole, self._normal = (
            [tf.constant(part) for part in np.split(kind, _BUCKETS.value)] for kind in values
        )
        self._result = np.empty(0, np.float32)
        self._problems: list[str] = []
        self._spans: list[tuple[float, float]] = []  # of each timed call; one clock for all workers
        self._cpu_seconds: list[float] = []

    def verify(self) -> None:
        """Compares sums with the truth; what is timed afterwards must stay equal to the bit."""
        if not np.array_equal(_joined(self._all_reduce(*self._whole)), self._truth.whole_sum):
            self._problems.append("sums of whole numbers are not exact")
        self._result = _joined(self._all_reduce(*self._normal))
        excess = np.abs(self._result - self._truth.normal_sum) - self._truth.tolerance(
            wire_dtype_of(self._algorithm)
        )
        if not np.all(excess <= 0.0):
            self._problems.append(f"sums are {np.max(excess):.1e} beyond what rounding allows")

    def warm_up(self) -> None:
        for _ in range(_WARMUP.value):
            self._all_reduce(*self._normal)

    def time(self) -> None:
        cpu_start, start = time.process_time(), time.monotonic()
        outputs = self._all_reduce(*self._normal)
        end, cpu_end = time.monotonic(), time.process_time()
        self._spans.append((start, end))
        self._cpu_seconds.append(cpu_end - cpu_start)
        if not np.array_equal(_joined(outputs).view(np.int32), self._result.view(np.int32)):
            self._problems.append(f"timed call {len(self._spans)} has other bits than the first")

    def report(self) -> dict[str, Any]:
        return {
            "algorithm": self._algorithm,
            "size_bytes": self._truth.length * ITEM_BYTES,
            "wire_dtype": wire_dtype_of(self._algorithm),
            "sha256": hashlib.sha256(self._result.tobytes()).hexdigest(),
            "spans_seconds": self._spans,
            "cpu_seconds": self._cpu_seconds,
            "problems": self._problems,
        }


def _joined(tensors: Sequence[tf.Tensor]) -> Values:
    return np.concatenate([tensor.numpy() for tensor in tensors])


def time_in_turn(rows: Sequence[Row], start_line: StartLine, *, deadline: float) -> None:
    """Times all rows, call by call, so that whatever else the machine does meets all of them.

    Args:
        rows: those which are compared. Each round starts with the next of them.
        start_line: where workers meet before each call.
        deadline: no round is begun after it, by the clock of whoever is first; the first one is.
    """
    for repeat in range(_REPEATS.value):
        first = repeat % len(rows)
        is_late = repeat > 0 and time.monotonic() >= deadline
        for row in (*rows[first:], *rows[:first]):
            if start_line.wait(is_late):
                return
            row.time()


def measure(rank: int, truths: Sequence[Truth]) -> dict[str, Any]:
    """All rows of one worker."""
    strategy = tlb.LargeBatchStrategy(
        start_timeout_seconds=_TIMEOUT.value, timeout_seconds=_TIMEOUT.value
    )
    start_line = StartLine(strategy)
    rows: list[Row] = []
    for truth in truths:
        compared = [Row(strategy, name, truth, rank) for name in _ALGORITHMS.value]
        for row in compared:
            row.verify()
            row.warm_up()
        seconds = (_MAX_SECONDS.value or np.inf) / len(truths)
        time_in_turn(compared, start_line, deadline=time.monotonic() + seconds)
        rows += compared
    strategy.barrier()
    return {
        "rows": [row.report() for row in rows],
        "all_reduce_report": str(strategy.all_reduce_report()),
    }


def main(_: Sequence[str]) -> int:
    folder = Path(_RESULT_DIR.value)
    workers = len(read_addresses(folder))
    truths = [Truth.of(int(size), workers) for size in _SIZES.value]
    return run_forks(folder, functools.partial(measure, truths=truths))


if __name__ == "__main__":
    app.run(main)
