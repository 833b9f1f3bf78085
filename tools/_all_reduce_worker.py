"""The workers of `benchmark_all_reduce.py`.

Without MPI they are forks of one process (see `_forks.py`), which computes before the fork what the
values of all of them sum to. With it each is a rank that `mpiexec` has started, and does so itself.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from _all_reduce_values import ITEM_BYTES, Truth, Values, values_of
from _all_reduce_ways import RAW, Way, ways_of
from _forks import read_addresses, run_forks
from _start_line import StartLine
from absl import app, flags

import tf_largebatch as tlb

_RESULT_DIR = flags.DEFINE_string("result_dir", None, "See above.", required=True)
_ALGORITHMS = flags.DEFINE_list("algorithms", None, "Names for AllReduceOptions.", required=True)
_TRANSPORTS = flags.DEFINE_list("transports", None, "Of the algorithms.", required=True)
_SIZES = flags.DEFINE_list("sizes_bytes", None, "Multiples of 4 * buckets.", required=True)
_BUCKETS = flags.DEFINE_integer("buckets", 1, "Tensors that a size is cut into.")
_IN_FLIGHT = flags.DEFINE_integer("max_buckets_in_flight", None, "As of AllReduceOptions.")
_WIRE_DTYPE = flags.DEFINE_string("wire_dtype", "", "Of all but TensorFlow's own algorithm.")
_REPEATS = flags.DEFINE_integer("repeats", None, "Timed calls at most.", required=True)
_WARMUP = flags.DEFINE_integer("warmup", None, "Calls before them.", required=True)
_MAX_SECONDS = flags.DEFINE_float("max_seconds", 0.0, "For timed calls; 0 is without limit.")
_TIMEOUT = flags.DEFINE_float("timeout_seconds", None, "For each wait.", required=True)


Span = tuple[float, float]


class StrategySum:
    """Sums by the strategy, in a traced function.

    Args:
        strategy: of the workers.
        way: by what, and how.
        length: elements of what is summed.
    """

    def __init__(self, strategy: Any, way: Way, length: int) -> None:
        self.wire_dtype = (_WIRE_DTYPE.value or None) if way.has_wire_dtype else None
        in_flight = {} if _IN_FLIGHT.value is None else {"max_buckets_in_flight": _IN_FLIGHT.value}
        options = tlb.AllReduceOptions(
            algorithm=way.algorithm,
            transport=way.transport,
            bucket_bytes=length * ITEM_BYTES // _BUCKETS.value,
            wire_dtype=self.wire_dtype,
            **in_flight,
        )

        def sum_over_workers(*tensors: tf.Tensor) -> Any:
            with tf.control_dependencies(tensors):
                begin = tf.timestamp()
            with tf.control_dependencies([begin]):
                tensors = [tf.identity(tensor) for tensor in tensors]
            sums = tf.distribute.get_replica_context().all_reduce("SUM", tensors, options=options)
            with tf.control_dependencies(sums):
                return sums, (begin, tf.timestamp())

        self._sum = tf.function(lambda *tensors: strategy.run(sum_over_workers, args=tensors))

    def place(self, values: Values) -> list[tf.Tensor]:
        """`values` as they are handed over."""
        return [tf.constant(part) for part in np.split(values, _BUCKETS.value)]

    def __call__(self, placed: list[tf.Tensor]) -> tuple[Sequence[tf.Tensor], Span]:
        """The sums, and when within the graph the values and the sums existed."""
        sums, (begin, end) = self._sum(*placed)
        return sums, (float(begin), float(end))


class RawSum:
    """Sums by mpi4py, in one piece, into memory of its own; otherwise as `StrategySum`.

    Args:
        comm: a communicator that nobody else uses.
        length: elements of what is summed.
    """

    wire_dtype = None

    def __init__(self, comm: Any, length: int) -> None:
        self._comm = comm
        self._sums = np.empty(length, np.float32)

    def place(self, values: Values) -> Values:
        return values

    def __call__(self, placed: Values) -> tuple[Sequence[Values], Span]:
        begin = time.time()
        self._comm.Allreduce(placed, self._sums)
        return [self._sums], (begin, time.time())


class Row:
    """One way to sum at one size, on this worker."""

    def __init__(self, way: Way, summing: StrategySum | RawSum, truth: Truth, rank: int) -> None:
        self._way, self._sum, self._truth = way, summing, truth
        self._whole, self._normal = map(summing.place, values_of(rank, truth.length, truth.workers))
        self._result = np.empty(0, np.float32)
        self._problems: list[str] = []
        # Of each timed call, and of what is within its graph; one clock each for all workers.
        self._spans: list[Span] = []
        self._graph_spans: list[Span] = []
        self._cpu_seconds: list[float] = []

    def verify(self) -> None:
        """Compares sums with the truth; what is timed afterwards must stay equal to the bit."""
        if not np.array_equal(_joined(self._sum(self._whole)[0]), self._truth.whole_sum):
            self._problems.append("sums of whole numbers are not exact")
        self._result = _joined(self._sum(self._normal)[0])
        error = np.abs(self._result - self._truth.normal_sum)
        excess = error - self._truth.tolerance(self._sum.wire_dtype)
        if not np.all(excess <= 0.0):
            self._problems.append(f"sums are {np.max(excess):.1e} beyond what rounding allows")

    def warm_up(self) -> None:
        for _ in range(_WARMUP.value):
            self._sum(self._normal)

    def time(self) -> None:
        cpu_start, start = time.process_time(), time.monotonic()
        outputs, graph_span = self._sum(self._normal)
        end, cpu_end = time.monotonic(), time.process_time()
        self._spans.append((start, end))
        self._graph_spans.append(graph_span)
        self._cpu_seconds.append(cpu_end - cpu_start)
        if not np.array_equal(_joined(outputs).view(np.int32), self._result.view(np.int32)):
            self._problems.append(f"timed call {len(self._spans)} has other bits than the first")

    def report(self) -> dict[str, Any]:
        return {
            **dataclasses.asdict(self._way),
            "size_bytes": self._truth.length * ITEM_BYTES,
            "wire_dtype": self._sum.wire_dtype,
            "sha256": hashlib.sha256(self._result.tobytes()).hexdigest(),
            "spans_seconds": self._spans,
            "graph_spans_seconds": self._graph_spans,
            "cpu_seconds": self._cpu_seconds,
            "problems": self._problems,
        }


def _joined(parts: Sequence[tf.Tensor] | Sequence[Values]) -> Values:
    return np.concatenate([np.asarray(part) for part in parts])


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


def measure(strategy: Any, rank: int, truths: Sequence[Truth]) -> dict[str, Any]:
    """All rows of one worker."""
    ways = ways_of(_TRANSPORTS.value, _ALGORITHMS.value)
    comm = _own_communicator() if RAW in ways else None
    start_line = StartLine(strategy)
    rows: list[Row] = []
    for truth in truths:
        compared = [
            Row(
                way,
                RawSum(comm, truth.length)
                if way == RAW
                else StrategySum(strategy, way, truth.length),
                truth,
                rank,
            )
            for way in ways
        ]
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


def _own_communicator() -> Any:
    from mpi4py import MPI  # which the strategy has started, with all that it needs

    return MPI.COMM_WORLD.Dup()


def make_strategy(**options: Any) -> Any:
    return tlb.LargeBatchStrategy(
        start_timeout_seconds=_TIMEOUT.value, timeout_seconds=_TIMEOUT.value, **options
    )


def measure_as_fork(rank: int, truths: Sequence[Truth]) -> dict[str, Any]:
    return measure(make_strategy(), rank, truths)


def measure_as_rank(folder: Path) -> None:
    """Writes what this rank measured to `folder/rank_NN.json`."""
    # Rows name their algorithms; but only one that leaves a choice has its costs measured at start.
    strategy = make_strategy(transport="mpi", all_reduce="halving_doubling")
    topology = strategy.topology
    truths = [Truth.of(int(size), topology.num_workers) for size in _SIZES.value]
    result = measure(strategy, topology.rank, truths)
    (folder / f"rank_{topology.rank:02d}.json").write_text(json.dumps(result))


def main(_: Sequence[str]) -> int:
    folder = Path(_RESULT_DIR.value)
    if "mpi" in _TRANSPORTS.value:
        measure_as_rank(folder)
        return 0
    workers = len(read_addresses(folder))
    truths = [Truth.of(int(size), workers) for size in _SIZES.value]
    return run_forks(folder, functools.partial(measure_as_fork, truths=truths))


if __name__ == "__main__":
    app.run(main)
