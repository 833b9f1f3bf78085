"""Kills and stops workers of a training at random, and proves that nothing is lost by it.

    python tools/chaos_train.py --workers=3 --kills=20 --output=chaos.json
    python tools/chaos_train.py --workers=2 --kills=1000 --minutes=30 --signals=KILL,STOP,TERM

A small network is trained undisturbed, without `TrainingState`; then once more, with it, while
workers are struck at random moments: in training, while a state is being written, while they
start; one of them, or several at once. All that ends is started again, on other ports, until the
strikes are used up and the training has come to its end. Then both are compared, bit by bit: all
variables of model and optimizer and their SHA-256 on every worker, `History` with all epochs, the
CSV file's text, and TensorBoard's scalars (one point an epoch). For each thing the first difference
is told.

In the training is what is hard to take up again: dropout, augmentation of rows, batch norm with
`BatchNormSync`, accumulated gradients, early stopping that gives the best weights back, LARS with
the recipe's schedule; with `--optimizer=sgd`, MomentumSGD and a rate that ReduceLROnPlateau lowers.

Signals:
    KILL   the worker is gone; the others must end by themselves
    STOP   for a while shorter than the strategy's timeout: training must go on. Or until the others
           have given up; then the stopped worker is killed, or wakes up and finds itself alone
    TERM   the workers save, and leave together

JSON: {"results": [{"what", "verified", "difference"}], "undisturbed", "disturbed", "seconds_lost",
"settings", "machine"}; `disturbed` has "restarts" and "strikes", each with where it
fell, `end_seconds` until all others had ended, and `batches_again`, which were trained twice.

Exit code: 0 when all is equal; 1 when not, or when a worker ends unprovoked, or when nothing moves
for `--hang_seconds` (then all stacks are shown), and the logs stay in `--work_dir`; 2 for a wrong
command line.
"""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _chaos_gangs import Nursery
from _chaos_plan import SIGNALS, plan_strikes
from _chaos_results import blow_row, blows_table, compare, comparison_table, run_figures
from _chaos_run import Outcome, RunFailed, StruckRun
from _chaos_settings import Training
from _command_line import (
    NOT_VERIFIED,
    exit_for_usage,
    hand_over,
    parse_flags,
    prepare_environment,
)
from _machine import machine_facts
from absl import app, flags
from rich.console import Console

_WORKERS = flags.DEFINE_integer("workers", 2, "Worker processes.", lower_bound=2)
_KILLS = flags.DEFINE_integer("kills", 20, "Strikes, of whatever signal.", lower_bound=0)
_MINUTES = flags.DEFINE_float("minutes", None, "After which nobody is struck.", lower_bound=0.0)
_SIGNALS = flags.DEFINE_list("signals", ["KILL", "STOP"], f"Of {', '.join(SIGNALS)}.")
_SEED = flags.DEFINE_integer("seed", 1, "Of the strikes and the training.", lower_bound=0)
_OPTIMIZER = flags.DEFINE_enum("optimizer", "lars", ["lars", "sgd"], "See above.")
_EPOCHS = flags.DEFINE_integer("epochs", 10, "At most, as it stops early.", lower_bound=1)
_UPDATES = flags.DEFINE_integer("updates_per_epoch", 8, "Of two batches each.", lower_bound=1)
_STEPS_PER_EXECUTION = flags.DEFINE_integer(
    "steps_per_execution", 1, "Batches that are one step for Keras.", lower_bound=1
)
_SAVE_EVERY = flags.DEFINE_integer("save_every_steps", 5, "Batches between states.", lower_bound=1)
_ALL_REDUCE = flags.DEFINE_enum(
    "all_reduce", "ring", ["ring", "halving_doubling", "tensorflow"], "See LargeBatchStrategy."
)
_TIMEOUT = flags.DEFINE_float(
    "timeout_seconds", 15.0, "Of the strategy, at start and later.", lower_bound=2.0
)
_HANG = flags.DEFINE_float(
    "hang_seconds", 60.0, "Without any sign of life: a failure.", lower_bound=5.0
)
_WORK_DIR = flags.DEFINE_string("work_dir", None, "New folder for logs and states, which stays.")
_OUTPUT = flags.DEFINE_string("output", None, "File for the JSON.")

_TABLE_WIDTH = 120  # in a file or a pipe
_THREADS = {"TF_NUM_INTRAOP_THREADS": "1", "OMP_NUM_THREADS": "1"}  # of each worker


def _check_flags() -> None:
    unknown = sorted(set(_SIGNALS.value) - set(SIGNALS))
    if unknown or not _SIGNALS.value:
        exit_for_usage(f"--signals={','.join(_SIGNALS.value)}: must be of {', '.join(SIGNALS)}.")
    batches = _training(Path()).batches_per_epoch
    if batches % _STEPS_PER_EXECUTION.value:
        exit_for_usage(
            f"--steps_per_execution={_STEPS_PER_EXECUTION.value} must divide the {batches} batches "
            "of an epoch, two for each of --updates_per_epoch."
        )
    if _HANG.value <= 2 * _TIMEOUT.value:
        exit_for_usage(
            f"--hang_seconds={_HANG.value:g} must be above twice --timeout_seconds="
            f"{_TIMEOUT.value:g}, within which workers may well stand still."
        )
    if _WORK_DIR.value and Path(_WORK_DIR.value).exists():
        exit_for_usage(f"--work_dir={_WORK_DIR.value} is there already; give a new folder.")


def _training(run_dir: Path, *, with_state: bool = True) -> Training:
    return Training(
        run_dir=str(run_dir),
        workers=_WORKERS.value,
        optimizer=_OPTIMIZER.value,
        epochs=_EPOCHS.value,
        updates_per_epoch=_UPDATES.value,
        steps_per_execution=_STEPS_PER_EXECUTION.value,
        save_every_steps=_SAVE_EVERY.value,
        with_state=with_state,
        all_reduce=_ALL_REDUCE.value,
        start_timeout_seconds=_TIMEOUT.value,
        timeout_seconds=_TIMEOUT.value,
        seed=_SEED.value,
    )


def _settings() -> dict[str, Any]:
    settings = _training(Path()).to_dict()
    del settings["run_dir"]
    return settings | {flag.name: flag.value for flag in (_KILLS, _MINUTES, _SIGNALS, _HANG)}


def _run_both(folder: Path, console: Console) -> tuple[Outcome, Outcome]:
    """The undisturbed training, then the other one."""
    with Nursery(folder) as nursery:
        nursery.open()
        undisturbed = StruckRun(
            nursery,
            _training(folder / "undisturbed", with_state=False),
            folder / "undisturbed_gangs",
            hang_seconds=_HANG.value,
        ).run()
        console.print(
            f"undisturbed: {undisturbed.batches} batches in {undisturbed.seconds:.1f} s, the first "
            f"after {undisturbed.start_seconds:.1f} s"
        )
        strikes = plan_strikes(
            _KILLS.value,
            signals=_SIGNALS.value,
            workers=_WORKERS.value,
            batches=undisturbed.batches,
            save_every_steps=_SAVE_EVERY.value,
            start_seconds=undisturbed.start_seconds,
            timeout_seconds=_TIMEOUT.value,
            seed=_SEED.value,
        )
        disturbed = StruckRun(
            nursery,
            _training(folder / "disturbed"),
            folder / "disturbed_gangs",
            strikes=strikes,
            hang_seconds=_HANG.value,
            strike_seconds=float("inf") if _MINUTES.value is None else 60 * _MINUTES.value,
            report=console.print,
        ).run()
        return undisturbed, disturbed


def _report(undisturbed: Outcome, disturbed: Outcome) -> dict[str, Any]:
    return {
        "results": compare(undisturbed, disturbed),
        "undisturbed": run_figures(undisturbed),
        "disturbed": run_figures(disturbed),
        "seconds_lost": disturbed.seconds - undisturbed.seconds,
    }


def _say_figures(report: dict[str, Any], console: Console) -> None:
    disturbed = report["disturbed"]
    strikes = disturbed["strikes"]
    again = sum(strike["batches_again"] or 0 for strike in strikes)
    torn = sum(strike["left_partial_file"] for strike in strikes)
    console.print(
        f"{len(strikes)} strikes, {disturbed['restarts']} restarts, {again} batches trained again, "
        f"{torn} states torn; {disturbed['seconds']:.1f} s instead of "
        f"{report['undisturbed']['seconds']:.1f} s"
    )
    if disturbed["strikes_left_over"]:
        console.print(f"{disturbed['strikes_left_over']} strikes were left over at its end")


def main(_: Sequence[str]) -> int:
    _check_flags()
    prepare_environment(**_THREADS)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # tidies up, too
    width = None if sys.stderr.isatty() else _TABLE_WIDTH
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True, width=width)
    folder = Path(_WORK_DIR.value or tempfile.mkdtemp(prefix="chaos_train_")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    stays = bool(_WORK_DIR.value)
    try:
        report = {"machine": machine_facts(), "settings": _settings()}
        try:
            undisturbed, disturbed = _run_both(folder, console)
        except RunFailed as failed:
            row = {"what": "came to its end", "verified": False, "difference": str(failed)}
            report |= {"results": [row], "strikes": list(map(blow_row, failed.blows))}
            console.print(blows_table(failed.blows))
            console.print(str(failed))
        else:
            report |= _report(undisturbed, disturbed)
            console.print(blows_table(disturbed.blows))
            _say_figures(report, console)
        code = hand_over(comparison_table(report["results"]), report, output=_OUTPUT.value)
        stays = stays or code == NOT_VERIFIED
    finally:
        if stays:
            console.print(f"all logs and states are in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return code


if __name__ == "__main__":
    sys.exit(app.run(main, flags_parser=parse_flags))
