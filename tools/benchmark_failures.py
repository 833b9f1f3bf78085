"""Times how long it takes until all workers have ended when one of them fails.

    python tools/benchmark_failures.py --workers=2,3 --repeats=5 --output=failures.json

Each trial has workers of its own, who train a small network with `model.fit` and `TrainingState`;
the culprit is the chief, or the last of the others.

Cases:
    kill       SIGKILL to the culprit within training, until all others have ended
    stop       SIGSTOP likewise; the others give up after `--timeout_seconds`, or when TensorFlow
               has had no sign of the culprit for 10 s, which is 5 to 10 s after it was stopped
    absent     from the start of the others, without the culprit, to their error, which they raise
               after `--timeout_seconds` as well
    terminate  SIGTERM to the culprit within training, until all, culprit and others, have left
               with a state saved

A trial is verified when all whose end is waited for end with code 1 and name the culprit's rank and
address; for `terminate`, with code 143, and there is a newer state than before.

JSON: {"results": [{"case", "culprit", "workers", "seconds_p50", "seconds_max", "seconds_all",
"verified", "problems"}], "settings", "machine"}.

Exit code: 0 when all rows are verified, 1 when one is not, 2 for a wrong command line.
"""

from __future__ import annotations

import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from _chaos_gangs import Gang, Nursery
from _chaos_settings import Training
from _command_line import exit_for_usage, hand_over, parse_flags, prepare_environment
from _failure_results import ROLES, Case, Trial, check_ends, check_states, figures_table, summarise
from _machine import machine_facts
from absl import app, flags
from rich.console import Console

_CASE_NAMES = ("kill", "stop", "absent", "terminate")
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM}
_WORKERS = flags.DEFINE_list("workers", ["2", "3"], "Worker processes of a cluster, each above 1.")
_CASES = flags.DEFINE_list("cases", list(_CASE_NAMES), f"Of {', '.join(_CASE_NAMES)}.")
_CULPRITS = flags.DEFINE_list("culprits", list(ROLES), f"Of {', '.join(ROLES)}.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "Trials of each case.", lower_bound=1)
_TIMEOUT = flags.DEFINE_float("timeout_seconds", 10.0, "Of the strategy.", lower_bound=2.0)
_LIMIT = flags.DEFINE_float(
    "limit_seconds", 60.0, "Beyond the timeout, for a start and for an end.", lower_bound=10.0
)
_OUTPUT = flags.DEFINE_string("output", None, "File for the JSON.")

_THREADS = {"TF_NUM_INTRAOP_THREADS": "1", "OMP_NUM_THREADS": "1"}  # of each worker
_POLL_SECONDS = 0.005
_START_SECONDS = 60.0  # of the strategy, where the start is not what is timed
_FIRST_BATCHES = 3  # within training is after those
_ENDLESS = 10**6  # epochs


def _checked_cases() -> list[Case]:
    """Those that the flags ask for, in the order of trials."""
    names = list(dict.fromkeys(_CASES.value))
    if not names or not set(names) <= set(_CASE_NAMES):
        exit_for_usage(f"--cases={','.join(names)}: must be of {', '.join(_CASE_NAMES)}.")
    roles = list(dict.fromkeys(_CULPRITS.value))
    if not roles or not set(roles) <= set(ROLES):
        exit_for_usage(f"--culprits={','.join(roles)}: must be of {', '.join(ROLES)}.")
    numbers = list(dict.fromkeys(_WORKERS.value))
    if not numbers or not all(text.isdecimal() and int(text) > 1 for text in numbers):
        exit_for_usage(
            f"--workers={','.join(numbers)}: must be one or more whole numbers above 1, as 2,3."
        )
    return [
        Case(name=name, culprit=culprit, workers=workers)
        for workers in map(int, numbers)
        for name in names
        for culprit in [0 if role == "chief" else workers - 1 for role in roles]
    ]


def _try(nursery: Nursery, case: Case, folder: Path) -> Trial:
    """One trial, in a new folder."""
    absent = case.name == "absent"
    training = Training(
        run_dir=str(folder / "run"),
        workers=case.workers,
        epochs=_ENDLESS,
        patience=_ENDLESS,
        save_every_steps=0,
        start_timeout_seconds=_TIMEOUT.value if absent else _START_SECONDS,
        timeout_seconds=_TIMEOUT.value,
    )
    Path(training.run_dir).mkdir(parents=True)
    others = [rank for rank in range(case.workers) if rank != case.culprit]
    ranks = others if absent else range(case.workers)
    with Gang(nursery, training, folder / "gang", ranks=ranks) as gang:
        begin, states = gang.started_at, []
        if not absent:
            if (problem := _wait_for_training(gang)) is not None:
                return Trial(case=case, seconds=None, problems=(problem,))
            states = _states(training)
            begin = time.monotonic()
            gang.signal(_SIGNALS[case.name], [case.culprit])
        awaited = list(ranks) if case.name == "terminate" else others
        _wait_for_ends(gang, awaited)
        ends = {rank: gang.ends.get(rank) for rank in awaited}
        codes = {rank: None if end is None else end.code for rank, end in ends.items()}
        logs = {rank: gang.log(rank) for rank in awaited}
        problems = check_ends(case, codes, logs, gang.addresses)
        if case.name == "terminate":
            problems += check_states(states, _states(training))
        seconds = None if None in ends.values() else max(end.at for end in ends.values()) - begin
        return Trial(case=case, seconds=seconds, problems=tuple(problems))


def _wait_for_training(gang: Gang) -> str | None:
    """Returns when all train; what is wrong if they do not."""
    deadline = time.monotonic() + _LIMIT.value
    while len(gang.poll()) == len(gang.ranks) and time.monotonic() < deadline:
        found = [gang.progress(rank) for rank in gang.ranks]
        if all(progress and progress.batches >= _FIRST_BATCHES for progress in found):
            return None
        time.sleep(_POLL_SECONDS)
    return "the workers do not train:\n" + "\n".join(map(gang.log_end, gang.ranks))


def _wait_for_ends(gang: Gang, ranks: Sequence[int]) -> None:
    deadline = time.monotonic() + _TIMEOUT.value + _LIMIT.value
    while set(ranks) & set(gang.poll()) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _states(training: Training) -> list[int]:
    """After how many batches each of the states was taken."""
    names = [path.name for path in training.state_dir.glob("state_*.tlb")]
    return sorted(int(re.findall(r"\d+", name)[0]) for name in names)


def _trials(cases: Sequence[Case], console: Console) -> Iterator[Trial]:
    """Cases innermost, so that whatever else the machine does meets all of them."""
    with (
        tempfile.TemporaryDirectory(
            prefix="benchmark_failures_", ignore_cleanup_errors=True
        ) as folder,
        Nursery(Path(folder)) as nursery,
    ):
        nursery.open()
        for repeat in range(_REPEATS.value):
            for number, case in enumerate(cases):
                trial = _try(nursery, case, Path(folder) / f"trial_{repeat}_{number}")
                time_text = "no time" if trial.seconds is None else f"{trial.seconds:.2f} s"
                console.print(
                    f"repeat {repeat}, {case.workers} workers, {case.name} {case.role}: {time_text}"
                )
                for problem in trial.problems:
                    console.print(f"  NOT VERIFIED: {problem}")
                yield trial


def main(_: Sequence[str]) -> int:
    cases = _checked_cases()
    prepare_environment(**_THREADS)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # tidies up, too
    machine = machine_facts()
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    rows = summarise(list(_trials(cases, console)))
    settings = {flag.name: flag.value for flag in (_WORKERS, _CASES, _CULPRITS, _REPEATS, _TIMEOUT)}
    report = {"results": rows, "settings": settings, "machine": machine}
    table = figures_table(rows, timeout_seconds=_TIMEOUT.value)
    return hand_over(table, report, output=_OUTPUT.value)


if __name__ == "__main__":
    sys.exit(app.run(main, flags_parser=parse_flags))
