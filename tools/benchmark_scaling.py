"""Images a second and scaling efficiency of 1 to 16 workers, with emulated compute and links.

    python tools/benchmark_scaling.py --workers=1,2,4,8,16 --compute_ms=3000 \\
        --one_way_delay_ms=20 --output=scaling.json --plot=scaling.png

What is emulated, so that a machine of few cores can show how a cluster behaves:
    compute     a step takes `--compute_ms` without using the cores: a network of `--layers` whose
                forward and backward pause after each layer, as long as an accelerator of its own
                would compute (see `_scaling_model.py`). Gradients, `--gradient_mb` of them, come
                to exist layer by layer, those of the last layers, which are the largest, first
    links       a relay delays and limits what workers send one another (see `_relay.py`)
All else is real, and runs on the cores that the workers share: `model.fit`, input, optimizer,
collectives over TCP, and the relay. Where `CPU of all` comes near the step's time times the number
of cores, or other programs run, the cores are what is measured.

Variants:
    ours     LargeBatchStrategy, `all_reduce="auto"`, data of GlobalShuffleSharder
    stock    MultiWorkerMirroredStrategy with its `reduce` mended, so that Keras 3 trains at all,
             and a plain data set
    alone    always run as well: one worker without a strategy, the same work a step

    efficiency(p) = images a second of p workers / (p * images a second of one alone)

A run trains some steps, then those that are timed, then some under `StepProfile`, which says where
the time goes (but for stock, whose processes TensorFlow's profiler can crash). It is verified when
all matrices, before timing and after it, are what NumPy makes of the global batches, so that
gradients are summed right, and all workers hold the same bits. Runs of the variants follow one
another, `--repeats` times. A run's value is the mean time of a step, and a row's the median of its
runs.

JSON: {"results": [{"variant", "workers", "step_ms", "step_ms_by_repeat", "images_per_second",
"efficiency", "efficiency_min", "efficiency_max", "cpu_ms", "parts_ms", "verified", "problems"}],
"all_reduce_reports", "gradient_bytes", "relays", "settings", "machine"}. `cpu_ms` is the processor
time of a step of all workers together; `parts_ms` are medians of profiled steps of worker 0, and
null for stock.

Exit code: 0 when all rows are verified, 1 when one is not, 2 for a wrong command line.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
from _scaling_results import ALONE, Run, figures_table, rows_of, write_plot
from absl import app, flags
from rich.console import Console

_VARIANT_NAMES = ("ours", "stock")
_WORKERS = flags.DEFINE_list("workers", ["1", "2", "4", "8", "16"], "Numbers of workers.")
_VARIANTS = flags.DEFINE_list("variants", list(_VARIANT_NAMES), "Of ours, stock.")
_COMPUTE_MS = flags.DEFINE_float("compute_ms", 1000.0, "Emulated, of a step.", lower_bound=0.0)
_GRADIENT_MB = flags.DEFINE_float(
    "gradient_mb", 4.0, "Of all gradients together, in 2^20 bytes.", lower_bound=0.001
)
_LAYERS = flags.DEFINE_integer("layers", 16, "Of the network.", lower_bound=1)
_BATCH = flags.DEFINE_integer("per_replica_batch_size", 32, "Images a worker.", lower_bound=1)
_DELAY = define_delay(20.0)
_BANDWIDTH = define_bandwidth()
_BUCKET_BYTES = flags.DEFINE_integer(
    "bucket_bytes", 2**20, "As of LargeBatchStrategy, but for the default.", lower_bound=1
)
_IN_FLIGHT = flags.DEFINE_integer(
    "max_buckets_in_flight", None, "As of LargeBatchStrategy.", lower_bound=1
)
_WIRE_DTYPE = flags.DEFINE_enum(
    "wire_dtype", "", ["", "bfloat16", "float16"], "As of LargeBatchStrategy."
)
_WARMUP = flags.DEFINE_integer("warmup_steps", 2, "Not timed.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 8, "Timed steps of a run.", lower_bound=2)
_PROFILED = flags.DEFINE_integer("profiled_steps", 3, "Steps under StepProfile.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 2, "Runs of each row.", lower_bound=1)
_TIMEOUT = flags.DEFINE_float(
    "timeout_seconds", 600.0, "For one run; then it counts as failed.", lower_bound=10.0
)
_OUTPUT = flags.DEFINE_string("output", None, "File for the JSON.")
_PLOT = flags.DEFINE_string("plot", None, "File for the plot, .png.")

_WORKER = Path(__file__).with_name("_scaling_worker.py")
_FOR_WORKERS = (
    *(_COMPUTE_MS, _GRADIENT_MB, _LAYERS, _BATCH, _BUCKET_BYTES, _IN_FLIGHT),
    _WIRE_DTYPE,
    *(_WARMUP, _STEPS, _PROFILED),
)
# Of each worker: one thread is in a pause, and few computations are long.
_THREADS = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "4", "OMP_NUM_THREADS": "1"}


def _run(variant: str, workers: int, repeat: int) -> tuple[Run, dict[str, float] | None]:
    """Trains a variant once; with the facts of the relay."""
    run = run_forked(
        _WORKER,
        {
            "variant": variant,
            **{flag.name: flag.value for flag in _FOR_WORKERS},
            # Workers wait less than this program, so that they can still say who is late.
            "timeout_seconds": _TIMEOUT.value / 3,
        },
        workers=workers,
        timeout_seconds=_TIMEOUT.value,
        one_way_delay_ms=_DELAY.value if workers > 1 else 0.0,
        bandwidth_mbit=_BANDWIDTH.value if workers > 1 else 0.0,
    )
    return Run(variant, workers, repeat, run.results, run.problem), run.relay


def _run_all(
    workers: Sequence[int], variants: Sequence[str], console: Console
) -> tuple[list[Run], list[dict[str, Any]]]:
    """All runs, variants innermost, so that those which are compared follow one another."""
    plan = [
        (variant, count, repeat)
        for repeat in range(_REPEATS.value)
        for variant, count in [
            (ALONE, 1),
            *((variant, count) for count in workers for variant in variants),
        ]
    ]
    runs, relays = [], []
    for number, (variant, count, repeat) in enumerate(plan, start=1):
        run, relay = _run(variant, count, repeat)
        runs.append(run)
        if relay:
            relays.append({"variant": variant, "workers": count, "repeat": repeat, **relay})
        step = "no time" if run.step_ms is None else f"{run.step_ms:.0f} ms a step"
        console.print(f"[{number}/{len(plan)}] repeat {repeat}, {count} workers, {variant}: {step}")
        for problem in run.problems:
            console.print(f"  NOT VERIFIED: {problem}")
    return runs, relays


def _checked_flags() -> tuple[list[int], list[str]]:
    """Returns the numbers of workers and the variants, or exits with what is wrong with them."""
    complaint = None
    if not all(text.isdecimal() and int(text) >= 1 for text in _WORKERS.value):
        complaint = f"--workers must be whole numbers of at least 1, not {_WORKERS.value}."
    elif not _VARIANTS.value or not set(_VARIANTS.value) <= set(_VARIANT_NAMES):
        complaint = f"--variants must be of {', '.join(_VARIANT_NAMES)}, not {_VARIANTS.value}."
    if complaint is not None:
        exit_for_usage(complaint)
    workers = [int(text) for text in dict.fromkeys(_WORKERS.value)]
    return workers, list(dict.fromkeys(_VARIANTS.value))


def _title() -> str:
    rate = f", {_BANDWIDTH.value:g} Mbit/s" if _BANDWIDTH.value else ""
    return (
        f"Emulated: {_COMPUTE_MS.value:g} ms of compute a step, links of {_DELAY.value:g} ms one "
        f"way{rate}; real: the rest, {_GRADIENT_MB.value:g} MB of gradients"
    )


def main(_: Sequence[str]) -> int:
    workers, variants = _checked_flags()
    prepare_environment(**_THREADS)
    machine = machine_facts()
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    runs, relays = _run_all(workers, variants, console)
    rows = rows_of(runs, per_replica_batch_size=_BATCH.value)
    network = (_DELAY, _BANDWIDTH, _REPEATS)
    report = {
        "results": rows,
        "all_reduce_reports": {
            str(run.workers): run.results[0]["all_reduce_report"]
            for run in runs
            if run.results and run.variant == "ours"
        },
        "gradient_bytes": next(
            (run.results[0]["gradient_bytes"] for run in runs if run.results), 0
        ),
        "relays": relays,
        "settings": {
            **{flag.name: flag.value for flag in (*_FOR_WORKERS, *network)},
            "environment": {name: os.environ[name] for name in _THREADS},
        },
        "machine": machine,
    }
    if _PLOT.value and any(row["step_ms"] for row in rows if row["variant"] == ALONE):
        write_plot(Path(_PLOT.value), rows, title=_title())
    return hand_over(figures_table(rows), report, output=_OUTPUT.value)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
