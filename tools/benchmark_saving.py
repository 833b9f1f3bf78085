"""Times how long a training waits while its state is saved.

    python tools/benchmark_saving.py --parameters=25600000 --workers=1,2 --output=saving.json

A stack of dense layers with about `--parameters` weights and as many momentum slots is trained on
CPU, and saved before each of `--repeats` steps (and once before, uncounted). Variants alternate
within each step:
    training_state      TrainingState: the time it holds training up, while values are copied. The
                        file is written in the background; `written_ms_p50` is the time from then
                        on until it is there. With several workers that of the slowest.
    backup_and_restore  Keras' BackupAndRestore: the time of its save, on the chief
    save_weights        model.save_weights to an .h5 file, on the chief

Before the next variant is timed the file is written, so that nothing runs beside it. A run is
verified when a new model that resumes from the state has the same weights, slots and counters to
the bit, on all workers, and one that loads the .h5 file the same weights.

JSON: {"results": [{"variant", "workers", "megabytes", "stall_ms_p50", "stall_ms_max",
"stall_ms_all", "stall_ms_per_mb", "written_ms_p50", "verified", "problems"}], "settings",
"machine"}. `megabytes` are those of weights and slots, 10^6 bytes, for all variants.

Exit code: 0 when all rows are verified, 1 when one is not, 2 for a wrong command line.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from _command_line import exit_for_usage, hand_over, parse_flags, prepare_environment
from _forked_run import run_forked
from _machine import machine_facts
from _saving_results import figures_table, rows_of
from absl import app, flags
from rich.console import Console

_PARAMETERS = flags.DEFINE_integer(
    "parameters", 25_600_000, "Weights of the model, about.", lower_bound=100
)
_REPEATS = flags.DEFINE_integer("repeats", 9, "Saves of each variant.", lower_bound=1)
_WORKERS = flags.DEFINE_list("workers", ["1", "2"], "Numbers of worker processes.")
_TIMEOUT = flags.DEFINE_float(
    "timeout_seconds", 300.0, "For one set of workers; then it has failed.", lower_bound=10.0
)
_OUTPUT = flags.DEFINE_string("output", None, "File for the JSON.")

_WORKER = Path(__file__).with_name("_saving_worker.py")


def _numbers_of_workers() -> list[int]:
    texts = _WORKERS.value
    if not texts or not all(text.isdecimal() and int(text) > 0 for text in texts):
        exit_for_usage("--workers must be one or more whole numbers above 0, such as 1,2.")
    return [int(text) for text in texts]


def main(_: Sequence[str]) -> int:
    numbers = _numbers_of_workers()
    prepare_environment()
    machine = machine_facts()
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    rows = []
    for workers in numbers:
        run = run_forked(
            _WORKER,
            {
                "parameters": _PARAMETERS.value,
                "repeats": _REPEATS.value,
                "timeout_seconds": _TIMEOUT.value / 3,  # so that workers can still say who is late
            },
            workers=workers,
            timeout_seconds=_TIMEOUT.value,
        )
        rows += rows_of(workers, run.results, run.problem)
        console.print(f"{workers} workers: {'failed' if run.problem else 'done'}")
        for problem in rows[-1]["problems"]:
            console.print(f"  NOT VERIFIED: {problem}")
    settings = {flag.name: flag.value for flag in (_PARAMETERS, _REPEATS)}
    report = {"results": rows, "settings": settings, "machine": machine}
    return hand_over(figures_table(rows), report, output=_OUTPUT.value)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
