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

All variants train on the same rows in the same order. A run is verified when its loss falls, all
its workers hold the same weights, and these are within 1e-5 of the first run's, whatever its
variant and number of workers.

JSON: {"results": [{"variant", "workers", "step_ms_p50", "step_ms_min", "step_ms_max",
"step_ms_all", "step_ms_by_repeat", "cpu_ms_p50", "verified", "problems"}], "ratios": [{"workers",
"variant", "reference", "ratio", "lowest", "highest", "verified"}], "settings", "machine"}. A ratio
is that of the medians; lowest and highest are those of single repeats.

Exit code: 0 when all rows are verified, 1 when one is not, 2 for a wrong command line.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from _command_line import exit_for_usage, hand_over, parse_flags, prepare_environment
from _local_cluster import LocalCluster
from _machine import machine_facts
from _step_results import Run, check_results, compare, figures_table, summarise
from absl import app, flags
from rich.console import Console

_VARIANT_NAMES = ("stock", "stock_per_worker_data", "ours_plain_data", "ours")
_WORKERS = flags.DEFINE_list("workers", ["1", "2", "4"], "Numbers of worker processes.")
_VARIANTS = flags.DEFINE_list(
    "variants", ["stock", "ours"], f"Two or more of {', '.join(_VARIANT_NAMES)}."
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
_POLL_SECONDS = 0.1
_GRACE_SECONDS = 10.0
_LOG_LINES = 10


def _wait(cluster: LocalCluster) -> str | None:
    """Waits for all workers to exit; returns what went wrong, with the end of a log."""
    failed_at = None
    while cluster.poll():
        if cluster.elapsed >= _TIMEOUT.value:
            return f"not finished after {_TIMEOUT.value:g} s"
        if failed_at is None and any(worker.failed for worker in cluster.exited):
            failed_at = cluster.elapsed
        if failed_at is not None and cluster.elapsed >= failed_at + _GRACE_SECONDS:
            break
        time.sleep(_POLL_SECONDS)
    for worker in cluster.exited:
        if worker.failed:
            lines = "\n".join(worker.last_log_lines(_LOG_LINES))
            return f"worker {worker.rank} {worker.describe_exit()}:\n{lines}"
    return None


def _run(variant: str, workers: int, repeat: int, reference_weights: Sequence[float] | None) -> Run:
    """Starts the workers of one run, waits for them, and checks what they hand back."""
    with tempfile.TemporaryDirectory(prefix="benchmark_step_") as folder:
        command = [
            sys.executable,
            str(_WORKER),
            f"--variant={variant}",
            f"--steps={_STEPS.value}",
            f"--epochs={_EPOCHS.value}",
            f"--global_batch_size={_GLOBAL_BATCH.value}",
            f"--result_dir={folder}",
        ]
        with LocalCluster() as cluster:
            cluster.start(command, num_workers=workers, replicas_per_worker=1, log_dir=Path(folder))
            problem = _wait(cluster)
        if problem is not None:
            return Run(variant, workers, repeat, (), (problem,))
        files = sorted(Path(folder).glob("worker_*.json"))
        results = tuple(json.loads(file.read_text()) for file in files)
    problems = check_results(
        results,
        steps=_STEPS.value * (_WARMUP_EPOCHS + _EPOCHS.value),
        reference_weights=reference_weights or results[0]["weights"],
    )
    return Run(variant, workers, repeat, results, tuple(problems))


def _run_all(workers: Sequence[int], variants: Sequence[str], console: Console) -> list[Run]:
    """All runs, variants innermost, so that those which are compared follow one another."""
    plan = [
        (repeat, count, variant)
        for repeat in range(_REPEATS.value)
        for count in workers
        for variant in variants
    ]
    runs: list[Run] = []
    reference_weights = None
    for number, (repeat, count, variant) in enumerate(plan, start=1):
        run = _run(variant, count, repeat, reference_weights)
        runs.append(run)
        if run.results and reference_weights is None:
            reference_weights = run.results[0]["weights"]
        times = " ".join(f"{value:.2f}" for value in run.step_ms) or "no"
        console.print(
            f"[{number}/{len(plan)}] repeat {repeat}, {count} workers, {variant}: {times} ms a step"
        )
        for problem in run.problems:
            console.print(f"  NOT VERIFIED: {problem}")
    return runs


def _checked_flags() -> tuple[list[int], list[str]]:
    """Returns the numbers of workers and the variants, or exits with what is wrong with them."""
    complaint = None
    if not all(text.isdecimal() and int(text) >= 1 for text in _WORKERS.value):
        complaint = f"--workers must be whole numbers of at least 1, not {_WORKERS.value}."
    elif uneven := [text for text in _WORKERS.value if _GLOBAL_BATCH.value % int(text)]:
        complaint = (
            f"--global_batch_size={_GLOBAL_BATCH.value} must be divisible by the numbers of "
            f"workers, but {', '.join(uneven)} of --workers do not divide it."
        )
    elif not set(_VARIANTS.value) <= set(_VARIANT_NAMES) or len(set(_VARIANTS.value)) < 2:
        complaint = f"--variants must be two or more of {', '.join(_VARIANT_NAMES)}."
    if complaint is not None:
        exit_for_usage(complaint)
    return [int(text) for text in dict.fromkeys(_WORKERS.value)], list(
        dict.fromkeys(_VARIANTS.value)
    )


def main(_: Sequence[str]) -> int:
    workers, variants = _checked_flags()
    prepare_environment()
    machine = machine_facts()
    runs = _run_all(workers, variants, Console(stderr=True, highlight=False, markup=False))
    rows = summarise(runs)
    ratios = compare(rows, reference=variants[0])
    report = {
        "results": rows,
        "ratios": ratios,
        "settings": {
            "repeats": _REPEATS.value,
            "steps": _STEPS.value,
            "epochs": _EPOCHS.value,
            "warmup_epochs": _WARMUP_EPOCHS,
            "global_batch_size": _GLOBAL_BATCH.value,
        },
        "machine": machine,
    }
    table = figures_table(rows, ratios, reference=variants[0])
    return hand_over(table, report, output=_OUTPUT.value)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
