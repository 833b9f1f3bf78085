"""Times how long a model's variables take to come to exist, and to be equal, on all workers.

    python tools/benchmark_startup.py --workers=4 --output=startup.json

TensorFlow broadcasts every variable of a multi-worker strategy from the chief as it is made, one
after the other. What is timed: from entering `strategy.scope()`, which all workers do together, to
its end; within it a ResNet-50 is built and compiled with SGD with momentum, and the optimizer's
variables are made. A time is that of the slowest worker; `--repeats` sets of workers of each
variant alternate, so that whatever else the machine does meets all of them. Workers share the
machine's cores, one thread each, and talk over loopback; with `--one_way_delay_ms` through a relay.

Variants; times are compared with those of `stock`:
    alone              one process without a strategy
    side_by_side       as many processes as workers, without a strategy: what building costs on
                       these cores
    stock              MultiWorkerMirroredStrategy
    ours_other_seeds   LargeBatchStrategy, each worker seeded differently: all that is random
                       differs, and comes from the chief
    ours_equal_seeds   LargeBatchStrategy, all workers seeded alike
    ours_parallel      LargeBatchStrategy(parallel_initialization=True), all workers seeded alike

A run is verified when all its workers hold the same values of all variables, to the bit, and these
are those of the first run, whatever its variant: the chief's seed is always the same.

JSON: {"results": [{"variant", "workers", "seconds_p50", "seconds_min", "seconds_max",
"seconds_all", "cpu_seconds_p50", "strategy_seconds_p50", "variables", "ratio", "ratio_lowest",
"ratio_highest", "verified", "problems"}], "settings", "machine"}. `cpu_seconds` are the processor
time of all workers; `strategy_seconds` is how long making the strategy took before, which is not
part of the time. `ratio` is that of the medians to `stock`'s, lowest and highest are of single
repeats.

Exit code: 0 when all rows are verified, 1 when one is not, 2 for a wrong command line.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from _command_line import (
    define_delay,
    exit_for_usage,
    hand_over,
    parse_flags,
    prepare_environment,
)
from _forked_run import run_forked
from _machine import machine_facts
from _startup_results import Run, check_results, figures_table, summarise
from absl import app, flags
from rich.console import Console

_NO_STRATEGY = ("alone", "side_by_side")
_VARIANT_NAMES = (*_NO_STRATEGY, "stock", "ours_other_seeds", "ours_equal_seeds", "ours_parallel")
_REFERENCE = "stock"
_WORKERS = flags.DEFINE_integer("workers", 4, "Worker processes.", lower_bound=2)
_VARIANTS = flags.DEFINE_list(
    "variants", list(_VARIANT_NAMES), f"One or more of {', '.join(_VARIANT_NAMES)}."
)
_MODEL = flags.DEFINE_enum("model", "resnet50", ["resnet50", "resnet_small"], "What is built.")
_REPEATS = flags.DEFINE_integer("repeats", 3, "Sets of workers of each variant.", lower_bound=1)
_DELAY = define_delay(0.0)
_TIMEOUT = flags.DEFINE_float(
    "timeout_seconds", 300.0, "For one set of workers; then it has failed.", lower_bound=10.0
)
_OUTPUT = flags.DEFINE_string("output", None, "File for the JSON.")

_WORKER = Path(__file__).with_name("_startup_worker.py")
_THREADS = {"TF_NUM_INTRAOP_THREADS": "1", "OMP_NUM_THREADS": "1"}  # of each worker


def _run(variant: str, repeat: int, expected: str | None) -> Run:
    """Starts the workers of one run, waits for them, and checks what they hand back."""
    run = run_forked(
        _WORKER,
        {
            "variant": variant,
            "model": _MODEL.value,
            "timeout_seconds": _TIMEOUT.value / 3,  # so that workers can still say who is late
        },
        workers=1 if variant == "alone" else _WORKERS.value,
        timeout_seconds=_TIMEOUT.value,
        one_way_delay_ms=0.0 if variant in _NO_STRATEGY else _DELAY.value,
    )
    if run.problem is not None:
        return Run(variant, repeat, (), (run.problem,))
    problems = check_results(run.results, expected=expected or run.results[0]["sha256"])
    return Run(variant, repeat, run.results, tuple(problems))


def _run_all(variants: Sequence[str], console: Console) -> list[Run]:
    """All runs, variants innermost, so that those which are compared follow one another."""
    runs: list[Run] = []
    expected = None
    for repeat in range(_REPEATS.value):
        for variant in variants:
            run = _run(variant, repeat, expected)
            runs.append(run)
            if run.results:
                expected = expected or run.results[0]["sha256"]
            time = f"{run.seconds:.2f} s, CPU {run.cpu_seconds:.2f} s" if run.results else "no time"
            console.print(f"repeat {repeat}, {variant}: {time}")
            for problem in run.problems:
                console.print(f"  NOT VERIFIED: {problem}")
    return runs


def main(_: Sequence[str]) -> int:
    variants = list(dict.fromkeys(_VARIANTS.value))
    if not variants or not set(variants) <= set(_VARIANT_NAMES):
        exit_for_usage(f"--variants must be one or more of {', '.join(_VARIANT_NAMES)}.")
    prepare_environment(**_THREADS)
    machine = machine_facts()
    runs = _run_all(variants, Console(stderr=True, highlight=False, markup=False, soft_wrap=True))
    rows = summarise(runs, reference=_REFERENCE)
    settings = {flag.name: flag.value for flag in (_WORKERS, _MODEL, _REPEATS, _DELAY)}
    settings["environment"] = {name: os.environ[name] for name in _THREADS}
    report = {"results": rows, "settings": settings, "machine": machine}
    table = figures_table(rows, reference=_REFERENCE)
    return hand_over(table, report, output=_OUTPUT.value)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
