"""Times a training step of a tiny model: LargeBatchStrategy against TensorFlow's own strategy.

    python tools/benchmark_step.py --workers=1,2,4 --output=step.json

The model is so small that what is left is the cost of the strategy itself: collectives, metrics,
input. Every run is a set of worker processes on this machine, which talk over loopback and share
its cores; runs of the variants alternate, `--repeats` times, so that whatever else the machine does
meets all of them. A run trains one epoch as warmup and `--epochs` timed ones by `model.fit`; a
value is the mean time of a step of an epoch on worker 0. The table shows their median, least and
greatest, and the processor time of a step, summed over the workers' threads: other load on the
machine changes it less.

Variants (see `_step_worker.py`; times are compared with the first one's):
    stock                   MultiWorkerMirroredStrategy, its `reduce` mended so that Keras 3 trains
                            at all, with a plain data set that TensorFlow shards
    stock_per_worker_data   the same strategy, each worker makes a data set of its own rows
    ours_plain_data         LargeBatchStrategy with the plain data set
    ours                    LargeBatchStrategy with GlobalShuffleSharder

    python tools/benchmark_step.py --workers=2,4 --variants=ours --transports=tensorflow,mpi

runs our variants with each of these transports: one more row each. Workers with transport mpi are
started by mpiexec. The stock variants have no transport but TensorFlow's.

All variants train on the same rows in the same order. A run is verified when its loss falls, all
its workers hold the same weights, and these are within 1e-5 of the first run's, whatever its
variant and number of workers; and within 1e-6 of those of the same variant and number of workers
with another transport.

JSON: {"results": [{"variant", "transport", "workers", "step_ms_p50", "step_ms_min", "step_ms_max",
"step_ms_all", "step_ms_by_repeat", "cpu_ms_p50", "verified", "problems"}], "ratios": [{"workers",
"variant", "transport", "reference", "reference_transport", "ratio", "lowest", "highest",
"verified"}], "settings", "machine"}. A ratio is that of the medians; lowest and highest are those
of single repeats.

Exit code: 0 when all rows are verified, 1 when one is not, 2 for a wrong command line.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from _command_line import exit_for_usage, hand_over, parse_flags, prepare_environment
from _local_cluster import LocalCluster
from _machine import machine_facts
from _mpi_cluster import MpiLocalCluster
from _mpi_run import missing_for_mpi
from _mpiexec import find_mpiexec
from _step_results import (
    Entry,
    Run,
    check_results,
    check_transport,
    compare,
    figures_table,
    summarise,
)
from _worker_wait import wait_for_workers
from absl import app, flags
from rich.console import Console

_STOCK = ("stock", "stock_per_worker_data")
_VARIANT_NAMES = (*_STOCK, "ours_plain_data", "ours")
_TRANSPORT_NAMES = ("tensorflow", "mpi")
_WORKERS = flags.DEFINE_list("workers", ["1", "2", "4"], "Numbers of worker processes.")
_VARIANTS = flags.DEFINE_list(
    "variants",
    ["stock", "ours"],
    f"Of {', '.join(_VARIANT_NAMES)}; with one transport, two or more.",
)
_TRANSPORTS = flags.DEFINE_list(
    "transports", ["tensorflow"], f"Of our variants; of {', '.join(_TRANSPORT_NAMES)}."
)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Runs of each row.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 50, "Steps of an epoch.", lower_bound=2)
_EPOCHS = flags.DEFINE_integer("epochs", 3, "Timed epochs of a run.", lower_bound=1)
_GLOBAL_BATCH = flags.DEFINE_integer(
    "global_batch_size", 48, "Rows of a step over all workers.", lower_bound=1
)
_TIMEOUT = flags.DEFINE_float(
    "timeout_seconds", 300.0, "For one run; then it counts as failed.", lower_bound=1.0
)
_OUTPUT = flags.DEFINE_string("output", None, "File for the JSON.")

_WORKER = Path(__file__).with_name("_step_worker.py")
_WARMUP_EPOCHS = 1


def _run(entry: Entry, workers: int, repeat: int, runs: Sequence[Run]) -> Run:
    """Starts the workers of one run, waits for them, and checks what they hand back.

    Args:
        entry: what is run.
        workers: how many.
        repeat: its number.
        runs: those before it, with which it is compared.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark_step_") as folder:
        command = [
            sys.executable,
            str(_WORKER),
            f"--variant={entry.variant}",
            f"--transport={entry.transport}",
            f"--steps={_STEPS.value}",
            f"--epochs={_EPOCHS.value}",
            f"--global_batch_size={_GLOBAL_BATCH.value}",
            f"--result_dir={folder}",
        ]
        with _cluster(entry.transport) as cluster:
            cluster.start(command, num_workers=workers, replicas_per_worker=1, log_dir=Path(folder))
            problem = wait_for_workers(cluster, timeout_seconds=_TIMEOUT.value)
        if problem is not None:
            return Run(entry, workers, repeat, (), (problem,))
        files = sorted(Path(folder).glob("worker_*.json"))
        results = tuple(json.loads(file.read_text()) for file in files)
    first = next((run.results for run in runs if run.results), results)
    run = Run(entry, workers, repeat, results, ())
    problems = check_results(
        results,
        steps=_STEPS.value * (_WARMUP_EPOCHS + _EPOCHS.value),
        reference_weights=first[0]["weights"],
    )
    return dataclasses.replace(run, problems=(*problems, *check_transport(run, runs)))


def _cluster(transport: str) -> LocalCluster:
    return MpiLocalCluster(find_mpiexec()) if transport == "mpi" else LocalCluster()


def _run_all(workers: Sequence[int], entries: Sequence[Entry], console: Console) -> list[Run]:
    """All runs, entries innermost, so that those which are compared follow one another."""
    plan = [
        (repeat, count, entry)
        for repeat in range(_REPEATS.value)
        for count in workers
        for entry in entries
    ]
    runs: list[Run] = []
    for number, (repeat, count, entry) in enumerate(plan, start=1):
        run = _run(entry, count, repeat, runs)
        runs.append(run)
        times = " ".join(f"{value:.2f}" for value in run.step_ms) or "no"
        console.print(
            f"[{number}/{len(plan)}] repeat {repeat}, {count} workers, {entry}: {times} ms a step"
        )
        for problem in run.problems:
            console.print(f"  NOT VERIFIED: {problem}")
    return runs


def _checked_flags() -> tuple[list[int], list[Entry]]:
    """Returns numbers of workers and what is compared, or exits with what is wrong with them."""
    complaint = None
    if not all(text.isdecimal() and int(text) >= 1 for text in _WORKERS.value):
        complaint = f"--workers must be whole numbers of at least 1, not {_WORKERS.value}."
    elif uneven := [text for text in _WORKERS.value if _GLOBAL_BATCH.value % int(text)]:
        complaint = (
            f"--global_batch_size={_GLOBAL_BATCH.value} must be divisible by the numbers of "
            f"workers, but {', '.join(uneven)} of --workers do not divide it."
        )
    elif not _TRANSPORTS.value or not set(_TRANSPORTS.value) <= set(_TRANSPORT_NAMES):
        complaint = f"--transports must be one or more of {', '.join(_TRANSPORT_NAMES)}."
    elif not set(_VARIANTS.value) <= set(_VARIANT_NAMES) or len(_entries()) < 2:
        complaint = (
            f"--variants must be two or more of {', '.join(_VARIANT_NAMES)}; or one of ours, if "
            "--transports are two."
        )
    elif not set(_TRANSPORTS.value) <= {entry.transport for entry in _entries()}:
        complaint = "--transports=mpi is for our variants; --variants has none of them."
    elif "mpi" in _TRANSPORTS.value:
        complaint = missing_for_mpi()
    if complaint is not None:
        exit_for_usage(complaint)
    return [int(text) for text in dict.fromkeys(_WORKERS.value)], _entries()


def _entries() -> list[Entry]:
    """Of each variant those with the transports that it has, in the order of the command line."""
    entries = [
        Entry(variant, "tensorflow" if variant in _STOCK else transport)
        for variant in _VARIANTS.value
        for transport in _TRANSPORTS.value
    ]
    return list(dict.fromkeys(entries))


def main(_: Sequence[str]) -> int:
    workers, entries = _checked_flags()
    prepare_environment()
    machine = machine_facts()
    runs = _run_all(workers, entries, Console(stderr=True, highlight=False, markup=False))
    rows = summarise(runs)
    ratios = compare(rows, reference=entries[0])
    report = {
        "results": rows,
        "ratios": ratios,
        "settings": {
            "transports": _TRANSPORTS.value,
            "repeats": _REPEATS.value,
            "steps": _STEPS.value,
            "epochs": _EPOCHS.value,
            "warmup_epochs": _WARMUP_EPOCHS,
            "global_batch_size": _GLOBAL_BATCH.value,
        },
        "machine": machine,
    }
    table = figures_table(rows, ratios, reference=entries[0])
    return hand_over(table, report, output=_OUTPUT.value)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
