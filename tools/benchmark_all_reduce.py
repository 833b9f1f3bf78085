"""Times an all-reduce between worker processes of this machine, algorithm against algorithm.

    python tools/benchmark_all_reduce.py --workers=8 --sizes=1KiB,256KiB,4MiB \\
        --algorithms=tensorflow,ring,halving_doubling,auto --one_way_delay_ms=5 --output=FILE.json

Workers talk over loopback, through gRPC, and share the machine's cores: without a delay these are
the limit. `--one_way_delay_ms` and `--bandwidth_mbit` put a relay between all pairs of workers (see
`_relay.py`), so that it behaves as a cluster does whose network has this latency and rate.

Algorithms are names for `tf_largebatch.AllReduceOptions`. Each sums float32 values in a traced
function: first whole numbers, which must come out exact, then normal numbers, which must be as
near to the sum in float64 as rounding allows, and equal to the bit on all workers, in each call.
Calls of the algorithms alternate; before each, workers agree on when to start. The time of a call
is that of the slowest worker, and has the cost of a call of any function of TensorFlow in it; the
time within the graph, as in a training step, is from when the last worker has its values to when
the last one has the sums.

    python tools/benchmark_all_reduce.py --workers=2 --transports=tensorflow,mpi

starts the workers by mpiexec, and runs the algorithms by each transport in the same processes; then
there is a last row of each size, transport "mpi4py": a bare `comm.Allreduce` of mpi4py on NumPy
arrays, without TensorFlow, which is the limit of what goes by MPI. "auto" by MPI is MPI's own
algorithm; "tensorflow" is none of MPI's. By TensorFlow, beside MPI, there is no "auto", and the
form of "halving_doubling" comes from typical costs: nothing is measured of it at start.

JSON: {"results": [{"transport", "algorithm", "workers", "size_bytes", "time_p50_ms",
"time_min_ms", "time_max_ms", "time_all_ms", "start_spread_p50_ms", "cpu_p50_ms", "in_graph_p50_ms",
"algbw_mb_per_second", "busbw_mb_per_second", "wire_dtype", "ratio", "predicted_ms", "verified",
"problems"}], "runs": [{"workers", "link", "relay", "all_reduce_report"}], "settings", "machine"}.
`algbw` is size / time, `busbw` that times 2(p - 1)/p for p workers, as in nccl-tests (in 10^6
bytes); `ratio` is to the first row of the size; `cpu_p50_ms` is the processor time of all workers;
`start_spread_p50_ms` from the first worker's start to the last one's. `predicted_ms` is what steps
and bytes of an algorithm cost by `link`, which is fitted to the rows of ring and halving_doubling;
with one bucket only. With mpi, rows have, of the time within the graph, `in_graph_ratio` to the
first row, and `to_raw`, the ratio to mpi4py's own; and runs `mpi_link`.

Exit code: 0 when all rows are verified, 1 when one is not, 2 for a wrong command line.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _all_reduce_results import (
    Link,
    Run,
    add_predictions,
    figures_table,
    fit_link,
    format_size,
    parse_size,
    rows_of,
)
from _all_reduce_values import ITEM_BYTES
from _all_reduce_ways import ALGORITHMS, TRANSPORTS, Way, ways_of
from _command_line import (
    define_bandwidth,
    define_delay,
    exit_for_usage,
    hand_over,
    parse_flags,
    prepare_environment,
)
from _forked_run import run_forked
from _machine import machine_facts
from _mpi_run import missing_for_mpi, run_ranks
from absl import app, flags
from rich.console import Console

_WORKERS = flags.DEFINE_list("workers", ["8"], "Numbers of worker processes, from 2.")
_SIZES = flags.DEFINE_list("sizes", ["1KiB", "256KiB", "4MiB"], "Bytes; B, KiB, MiB or GiB.")
_ALGORITHMS = flags.DEFINE_list(
    "algorithms", list(ALGORITHMS), f"One or more of {', '.join(ALGORITHMS)}."
)
_TRANSPORTS = flags.DEFINE_list(
    "transports",
    ["tensorflow"],
    f"One or more of {', '.join(TRANSPORTS)}. With mpi, workers are started by mpiexec.",
)
_DELAY = define_delay(0.0)
_BANDWIDTH = define_bandwidth()
_WIRE_DTYPE = flags.DEFINE_enum(
    "wire_dtype",
    "",
    ["", "bfloat16", "float16"],
    "As of AllReduceOptions; TensorFlow's own algorithm always sends float32.",
)
_BUCKETS = flags.DEFINE_integer(
    "buckets", 1, "Tensors that a size is cut into, each a bucket.", lower_bound=1
)
_IN_FLIGHT = flags.DEFINE_integer(
    "max_buckets_in_flight", None, "As of AllReduceOptions.", lower_bound=1
)
_REPEATS = flags.DEFINE_integer("repeats", 20, "Timed calls of each row.", lower_bound=1)
_WARMUP = flags.DEFINE_integer("warmup", 3, "Calls of each row before them.", lower_bound=0)
_MAX_SECONDS = flags.DEFINE_float(
    "max_seconds",
    0.0,
    "For the timed calls of a number of workers, shared by the sizes: when it is over, a row may "
    "have fewer than --repeats, but has one. 0 is without limit.",
    lower_bound=0.0,
)
_TIMEOUT = flags.DEFINE_float(
    "timeout_seconds", 600.0, "For a number of workers; then it has failed.", lower_bound=10.0
)
_OUTPUT = flags.DEFINE_string("output", None, "File for the JSON.")

_WORKER = Path(__file__).with_name("_all_reduce_worker.py")
# Of each worker: dozens of processes share few cores, and TensorFlow would make a pool for each.
_THREADS = {
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    # Else glibc hands large tensors back to the system, which takes longer than adding them up.
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
}


@dataclasses.dataclass(frozen=True)
class Request:
    """The lists of the command line, checked."""

    workers: list[int]
    sizes_bytes: list[int]
    ways: list[Way]


def _run(workers: int, request: Request) -> Run:
    worker_flags = {
        "transports": ",".join(_TRANSPORTS.value),
        "algorithms": ",".join(dict.fromkeys(_ALGORITHMS.value)),
        "sizes_bytes": ",".join(map(str, request.sizes_bytes)),
        "buckets": _BUCKETS.value,
        "max_buckets_in_flight": _IN_FLIGHT.value,
        "wire_dtype": _WIRE_DTYPE.value,
        "repeats": _REPEATS.value,
        "warmup": _WARMUP.value,
        "max_seconds": _MAX_SECONDS.value,
        "timeout_seconds": _TIMEOUT.value / 3,  # so that workers can still say who is late
    }
    limits = {"workers": workers, "timeout_seconds": _TIMEOUT.value}
    if "mpi" in _TRANSPORTS.value:
        run = run_ranks(_WORKER, worker_flags, **limits)
    else:
        run = run_forked(
            _WORKER,
            worker_flags,
            **limits,
            one_way_delay_ms=_DELAY.value,
            bandwidth_mbit=_BANDWIDTH.value,
        )
    return Run(workers, run.results, run.problem, run.relay)


def _checked_flags() -> Request:
    """Returns what is to be measured, or exits with what is wrong with it."""
    complaint, sizes_bytes = None, []
    try:
        sizes_bytes = [parse_size(text) for text in dict.fromkeys(_SIZES.value)]
    except ValueError as error:
        complaint = f"--sizes: {error}"
    granule_bytes = ITEM_BYTES * _BUCKETS.value
    if not all(text.isdecimal() and int(text) >= 2 for text in _WORKERS.value):
        complaint = f"--workers must be whole numbers of at least 2, not {_WORKERS.value}."
    elif not _ALGORITHMS.value or not set(_ALGORITHMS.value) <= set(ALGORITHMS):
        complaint = f"--algorithms must be one or more of {', '.join(ALGORITHMS)}."
    elif uneven := [size for size in sizes_bytes if size % granule_bytes]:
        nearest = max(1, round(uneven[0] / granule_bytes)) * granule_bytes
        complaint = (
            f"--sizes must be multiples of {granule_bytes} B, as each is cut into --buckets="
            f"{_BUCKETS.value} tensors of float32, but one is {uneven[0]} B; nearest: {nearest} B."
        )
    if complaint is None and (not sizes_bytes or not _WORKERS.value):
        complaint = "--sizes and --workers must not be empty."
    if (complaint := complaint or _wrong_transports()) is not None:
        exit_for_usage(complaint)
    workers = [int(text) for text in dict.fromkeys(_WORKERS.value)]
    return Request(workers, sizes_bytes, _ways())


def _ways() -> list[Way]:
    return ways_of(list(dict.fromkeys(_TRANSPORTS.value)), list(dict.fromkeys(_ALGORITHMS.value)))


def _wrong_transports() -> str | None:
    if not _TRANSPORTS.value or not set(_TRANSPORTS.value) <= set(TRANSPORTS):
        return f"--transports must be one or more of {', '.join(TRANSPORTS)}."
    if "mpi" not in _TRANSPORTS.value:
        return None
    if _DELAY.value or _BANDWIDTH.value:
        return (
            "--one_way_delay_ms and --bandwidth_mbit are for --transports=tensorflow alone: MPI "
            "does not go through the relay that slows the others down."
        )
    for transport in _TRANSPORTS.value:
        if transport not in {way.transport for way in _ways()}:
            return (
                f"--algorithms={','.join(_ALGORITHMS.value)} leave nothing to --transports="
                f"{transport}: by mpi there is no tensorflow, and beside mpi tensorflow has no "
                "auto. Both have ring and halving_doubling."
            )
    return missing_for_mpi()


def _settings() -> dict[str, Any]:
    own = (
        _TRANSPORTS,
        _DELAY,
        _BANDWIDTH,
        _WIRE_DTYPE,
        _BUCKETS,
        _IN_FLIGHT,
        _REPEATS,
        _WARMUP,
        _MAX_SECONDS,
    )
    threads = {name: os.environ[name] for name in _THREADS}
    return {flag.name: flag.value for flag in own} | {"environment": threads}


def _rows_and_facts(run: Run, request: Request) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    rows = rows_of(run, ways=request.ways, sizes_bytes=request.sizes_bytes)
    links = {}
    for transport in dict.fromkeys(row["transport"] for row in rows):
        own = [row for row in rows if row["transport"] == transport]
        links[transport] = _link(own)
        add_predictions(own, link=links[transport])
    facts = {
        "workers": run.workers,
        "link": _as_dict(links.get("tensorflow")),
        "relay": run.relay,
        "all_reduce_report": run.results[0]["all_reduce_report"] if run.results else None,
    }
    return rows, facts | ({"mpi_link": _as_dict(links["mpi"])} if "mpi" in links else {})


def _link(rows: Sequence[dict[str, Any]]) -> Link | None:
    if _BUCKETS.value > 1:
        return None
    return fit_link(rows, one_way_delay_seconds=_DELAY.value / 1e3)


def _as_dict(link: Link | None) -> dict[str, float] | None:
    return None if link is None else dataclasses.asdict(link)


def _print_problems(run: Run, rows: Sequence[dict[str, Any]], console: Console) -> None:
    if run.problem is not None:
        console.print(f"  NOT VERIFIED: {run.problem}")
        return
    for row in rows:
        for problem in row["problems"]:
            name = f"{row['transport']} {row['algorithm']}, {format_size(row['size_bytes'])}"
            console.print(f"  NOT VERIFIED: {name}: {problem}")


def main(_: Sequence[str]) -> int:
    request = _checked_flags()
    prepare_environment(**_THREADS)
    machine = machine_facts()
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    rows, runs = [], []
    for workers in request.workers:
        start = time.monotonic()
        run = _run(workers, request)
        own_rows, facts = _rows_and_facts(run, request)
        console.print(f"{workers} workers: {time.monotonic() - start:.1f} s")
        _print_problems(run, own_rows, console)
        rows += own_rows
        runs.append(facts)
    report = {"results": rows, "runs": runs, "settings": _settings(), "machine": machine}
    table = figures_table(rows, reference=request.ways[0])
    return hand_over(table, report, output=_OUTPUT.value)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
