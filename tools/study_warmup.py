"""Reproduces the paper's study of large minibatches on patches of photographs, in minutes a run.

    python tools/study_warmup.py --study=table --seeds=1-5          # the paper's table
    python tools/study_warmup.py --study=table --only=gradual --seeds=3 --results=mine.jsonl
    python tools/study_warmup.py --report                            # tables and plots of the file

A ResNet-8 learns to tell 17 photographs apart (see examples/_photo_patches.py): 20 epochs of 1,024
micro-batches of n = 8, at k = 1 with a rate of 0.1 the baseline, else with k accumulated or with k
workers. Every run appends a line to the file of results, and runs that are in it are not made
again, so a study that was broken off goes on. Seed 0 is for choosing settings, on the validation
patches; its runs never see the test patches. A run's error is the median of its last 5 epochs.

Studies (see `_study_settings.py` for their runs):
    table     baseline at 8; 128 with gradual, no and constant warmup, unscaled, and square root
    size      8 to 512, linear scaling with gradual warmup
    gamma     the last gamma of a block starting as 0 and as 1
    rates     the rate alone, at 8 and at 128
    controls  the table's first four at half of the base rate, where no warmup should do no harm
    lars      LARS at 256 and 512
    workers   k = 2 and 4 by real workers and by accumulation

Exit code: 0 when all asked for is in the file, 1 when a run failed, 2 for a wrong command line.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import sys
from collections.abc import Container, Mapping, Sequence
from pathlib import Path

from _command_line import exit_for_usage, parse_flags, prepare_environment
from _local_cluster import die_with_parent
from _study_results import Row, append_row, read_rows
from _study_settings import STUDIES, Setting, chosen_settings
from absl import app, flags
from rich.console import Console

import tf_largebatch as tlb

_RUN_FAILED = 1
_ROOT = Path(__file__).parents[1]


def define_flags() -> None:
    """Not at import: the processes of the runs import this file too."""
    flags.DEFINE_list("study", ["table"], f"One or more of {', '.join(STUDIES)}.")
    flags.DEFINE_list("only", [], "Variants of the study; default: all.")
    flags.DEFINE_string("seeds", "1-5", "As 0, or 1-5, or 1,2,7.")
    flags.DEFINE_integer("split", 0, "How blocks are dealt to the parts.", lower_bound=0)
    flags.DEFINE_integer("processes", 2, "Runs side by side, one thread each.", lower_bound=1)
    flags.DEFINE_string(
        "results", str(_ROOT / "docs" / "study" / "results.jsonl"), "File of the results."
    )
    flags.DEFINE_bool("report", False, "Make no run; print the tables and write the plots.")
    flags.DEFINE_string("plots", None, "Folder for the plots; default: that of the results.")


def parsed_seeds(text: str) -> list[int]:
    """The seeds of "0", "1-5" or "1,3,7-9".

    Raises:
        ValueError: for another text, or a range without a seed.
    """
    seeds: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        seeds += (some := range(int(first), int(last or first) + 1))
        if not some:
            raise ValueError(part)
    return seeds


def _checked_settings() -> list[Setting]:
    """The runs that the flags ask for, or exits with what is wrong with them."""
    options = flags.FLAGS
    unknown = sorted(set(options.study) - set(STUDIES))
    if unknown or not options.study:
        exit_for_usage(f"--study={','.join(unknown)}: must be of {', '.join(STUDIES)}.")
    try:
        seeds = parsed_seeds(options.seeds)
    except ValueError:
        exit_for_usage(f"--seeds={options.seeds}: must be as 0, or 1-5, or 1,2,7.")
    try:
        return chosen_settings(options.study, only=options.only, seeds=seeds, split=options.split)
    except tlb.ConfigurationError as error:
        exit_for_usage(str(error))


def _checked_path() -> Path:
    """The file of results, which a report reads and runs add to; exits if it cannot be opened."""
    path = Path(flags.FLAGS.results)
    try:
        if not flags.FLAGS.report:
            path.parent.mkdir(parents=True, exist_ok=True)
        path.open("rb" if flags.FLAGS.report else "ab").close()
    except OSError as error:
        exit_for_usage(f"--results={path}: {error.strerror}.")
    return path


def _start_process(parent_pid: int) -> None:
    """The first thing in a process of the pool."""
    if prepare := die_with_parent(parent_pid):
        prepare()
    from _study_runs import use_one_thread

    use_one_thread()


def _run(setting: Setting) -> dict[str, object]:
    """In a process of the pool."""
    from _study_runs import run  # TensorFlow: only those need it

    return run(setting)


def _make_runs(
    settings: Sequence[Setting], done: Container[Setting], path: Path, console: Console
) -> int:
    """Makes those that are not done, into the file; returns how many failed."""
    missing = [setting for setting in settings if setting not in done]
    console.print(f"{len(missing)} of {len(settings)} runs to make, for {path}", soft_wrap=True)
    prepare_environment()
    pool = concurrent.futures.ProcessPoolExecutor(
        flags.FLAGS.processes,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_process,
        initargs=(os.getpid(),),
    )
    failed = 0
    try:
        futures = {pool.submit(_run, setting): setting for setting in missing}
        for number, future in enumerate(concurrent.futures.as_completed(futures), start=1):
            setting, error = futures[future], future.exception()
            if error is None:
                append_row(path, setting, future.result())
                text = _line(setting, future.result())
            else:
                failed += 1
                text = f"{setting} FAILED: {error!r}"
            console.print(f"[{number}/{len(missing)}] {text}", soft_wrap=True)
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C no more runs begin
    return failed


def _line(setting: Setting, outcome: dict[str, object]) -> str:
    errors = [
        f"{name} {outcome[key]:.2%}"
        for name, key in (("validation", "val_error"), ("test", "test_error"))
        if outcome[key] is not None
    ]
    return (
        f"{setting.batch} at {setting.rate:g}, {setting.warmup}, {setting.optimizer}, seed "
        f"{setting.seed}: error {', '.join(errors)}; {outcome['seconds']} s"
    )


def _report(rows: Mapping[Setting, Row], path: Path) -> None:
    from _study_plots import write_plots
    from _study_report import print_report

    split = flags.FLAGS.split
    if not any(setting.split == split for setting in rows):
        exit_for_usage(f"--results={path}: has no runs of --split={split}.")
    print_report(rows, split=split)
    for plot in write_plots(rows, Path(flags.FLAGS.plots or path.parent), split=split):
        print(plot)


def main(_: Sequence[str]) -> int:
    settings, path = _checked_settings(), _checked_path()
    try:
        rows = read_rows(path)
    except tlb.DataError as error:
        exit_for_usage(str(error))
    if flags.FLAGS.report:
        _report(rows, path)
        return 0
    failed = _make_runs(settings, rows, path, Console(stderr=True, highlight=False, markup=False))
    return _RUN_FAILED if failed else 0


if __name__ == "__main__":
    define_flags()
    sys.exit(app.run(main, flags_parser=parse_flags))
