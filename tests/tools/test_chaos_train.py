"""Chaos: a short real run with three kills; its plan and its comparisons; nothing left running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tool_runs import ROOT, load, refusal, run_tool

settings = load("_chaos_settings")
plan = load("_chaos_plan")
load("_local_cluster")
gangs = load("_chaos_gangs")
load("_chaos_striker")
runs = load("_chaos_run")
results = load("_chaos_results")


@pytest.mark.timeout(240)
def test_three_kills_and_nothing_is_lost(tmp_path: Path) -> None:
    flags = ["--workers=2", "--kills=3", "--signals=KILL", "--seed=7", "--output=out.json"]
    flags += ["--epochs=3", "--updates_per_epoch=4", "--save_every_steps=3"]
    flags += ["--steps_per_execution=2"]
    done = run_tool("chaos_train", *flags, cwd=tmp_path)

    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads((tmp_path / "out.json").read_text())
    compared = [row["what"] for row in report["results"]]
    assert len(compared) == len(set(compared)) == 2 * 4 + 2  # of each worker, and the chief's files
    assert all(row["verified"] and row["difference"] is None for row in report["results"])
    disturbed, undisturbed = report["disturbed"], report["undisturbed"]
    assert undisturbed["restarts"] == 0 and undisturbed["strikes"] == []
    assert undisturbed["batches"] == disturbed["batches"] == 3 * 4 * 2
    assert disturbed["epochs"] == undisturbed["epochs"] == 3
    strikes = disturbed["strikes"]
    assert len(strikes) == disturbed["restarts"] == 3
    for strike in strikes:
        for rank in strike["victims"]:
            assert strike["codes"][str(rank)] == -signal.SIGKILL
        assert all(strike["codes"].values())  # nobody goes on without the others
    in_training = [strike for strike in strikes if strike["batches"] is not None]
    assert in_training
    for strike in in_training:
        # A state is at most the execution old that begins behind the third batch since the last.
        assert 0 <= strike["batches_again"] <= 3 + 2 * 2
    assert "3 strikes, 3 restarts" in done.stderr
    assert "TensorBoard" in done.stdout


@pytest.mark.timeout(120)
def test_the_workers_of_a_killed_run_end(tmp_path: Path) -> None:
    run = subprocess.Popen(
        [sys.executable, ROOT / "tools" / "chaos_train.py", "--work_dir=work", "--kills=0"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    started: list[psutil.Process] = []
    try:
        while len(started) < 3:  # the process of all imports, and its two forks
            assert run.poll() is None
            time.sleep(0.05)
            started = psutil.Process(run.pid).children(recursive=True)
    finally:
        run.kill()
        run.wait()
    _, left = psutil.wait_procs(started, timeout=60)
    for process in left:
        process.kill()
    assert not left


@pytest.mark.parametrize(
    ("flag", "complaint"),
    [
        ("--workers=1", "workers"),
        ("--signals=KILL,HUP", "--signals=KILL,HUP: must be of KILL, STOP, TERM"),
        ("--signals=", "--signals=: must be of"),
        ("--steps_per_execution=3", "must divide the 16 batches"),
        ("--hang_seconds=30", "must be above twice --timeout_seconds=15"),
        ("--work_dir=.", "--work_dir=. is there already"),
    ],
)
def test_wrong_flags(flag: str, complaint: str, tmp_path: Path) -> None:
    assert complaint in refusal("chaos_train", flag, cwd=tmp_path)


# --- The plan


def planned(count: int = 400, **changes: Any) -> list[Any]:
    options = {
        "signals": ["KILL", "STOP"],
        "workers": 3,
        "batches": 100,
        "save_every_steps": 7,
        "start_seconds": 4.0,
        "timeout_seconds": 8.0,
        "seed": 3,
    }
    return plan.plan_strikes(count, **{**options, **changes})


def test_strikes_come_in_order_and_hit_what_there_is() -> None:
    strikes = planned()
    assert len(strikes) == 400
    batches = [strike.batch for strike in strikes if strike.moment != "start"]
    assert batches == sorted(batches)
    assert min(batches) >= 1 and max(batches) < 100
    for strike in strikes:
        assert set(strike.victims) <= {0, 1, 2} and strike.victims
        assert list(strike.victims) == sorted(set(strike.victims))
        if strike.moment == "saving":
            assert strike.batch % 7 == 0
        if strike.moment == "start":
            assert strike.batch == 0 and 0 <= strike.delay_seconds <= 4.0


def test_all_kinds_are_drawn() -> None:
    strikes = planned()
    assert {strike.moment for strike in strikes} == {"start", "training", "saving"}
    assert {strike.signal for strike in strikes} == {"KILL", "STOP"}
    assert {len(strike.victims) for strike in strikes} == {1, 2, 3}
    first = [strike.moment == "start" for strike in strikes].index(True)
    assert first < 200  # not all behind the rest


def test_who_stops_for_how_long() -> None:
    for strike in planned():
        short = strike.pause_seconds is not None and strike.pause_seconds < 8.0
        assert strike.may_end(timeout_seconds=8.0) == (strike.signal == "KILL" or not short)
        if strike.signal == "KILL":
            assert strike.pause_seconds is None
        elif len(strike.victims) == 3:  # there is nobody who could give up
            assert strike.pause_seconds <= 2.0 or strike.pause_seconds == 12.0
        else:
            assert strike.pause_seconds is None or strike.pause_seconds <= 2.0


def test_a_plan_is_its_seed() -> None:
    assert planned() == planned() != planned(seed=4)


# --- Strikes and restarts, of workers that are made up


class FakeGang:
    """A gang by script: at each poll, its training is one batch further, until it ends.

    Args:
        life: `{"batches": n}`: so many, then all end with code 0; with "codes", with these; with
            "hangs", not at all. A gang that is killed ends at once.
    """

    lives: list[dict[str, Any]]

    def __init__(self, nursery: Any, training: Any, folder: Path) -> None:
        self.training, self.ranks = training, [0, 1]
        self.started_at = time.monotonic()
        self.ends: dict[int, Any] = {}
        self.signals: list[tuple[int, tuple[int, ...]]] = []
        self._life = self.lives.pop(0)
        self._batches = self._life.get("first", 0)
        self._stopped: set[int] = set()
        self._dying: list[dict[int, int]] = []
        self.lived.append(self)

    lived: list[FakeGang]

    def __enter__(self) -> FakeGang:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def poll(self) -> list[int]:
        if self._dying:  # some polls later
            self._end(self._dying.pop(0))
        elif not self.ends and not self._stopped:
            if self._batches < self._life["batches"]:
                self._batches += 1
            elif not self._life.get("hangs"):
                self._end(self._life.get("codes", {0: 0, 1: 0}))
        return [rank for rank in self.ranks if rank not in self.ends]

    def _end(self, codes: dict[int, int]) -> None:
        now = time.monotonic()
        self.ends |= {rank: gangs.End(code, now) for rank, code in codes.items()}

    def signal(self, number: int, victims: tuple[int, ...]) -> None:
        self.signals.append((int(number), tuple(victims)))
        if number == signal.SIGKILL:
            others = {rank: 1 for rank in self.ranks if rank not in self.ends}
            self._end({**others, **dict.fromkeys(victims, -9)})
        elif number == signal.SIGCONT:
            self._stopped -= set(victims)
            if self._life.get("gives_up"):
                self._dying = [{}, {}, dict.fromkeys(victims, 1)]
        else:
            self._stopped |= set(victims)
            if self._life.get("gives_up"):
                self._end({rank: 1 for rank in self.ranks if rank not in victims})

    def progress(self, rank: int) -> Any:
        first = self._life.get("first", 0)
        return settings.Progress(first, self._batches, 0) if self._batches > first else None

    def furthest(self) -> int:
        return self._batches

    def results(self) -> list[dict[str, Any]]:
        return [{}, {}]

    def log_end(self, rank: int) -> str:
        return f"log of {rank}"

    def write_stacks(self) -> None:
        self.signals.append((int(signal.SIGUSR1), (0, 1)))


def fake_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, strikes: list[Any], *lives: dict[str, Any]
) -> Any:
    FakeGang.lives, FakeGang.lived = list(lives), []
    monkeypatch.setattr(runs, "Gang", FakeGang)
    training = settings.Training(run_dir=str(tmp_path / "run"), workers=2, timeout_seconds=8.0)
    return runs.StruckRun(None, training, tmp_path, strikes=strikes, hang_seconds=0.3).run()


def strike(name: str, batch: int, victim: int = 1, **options: Any) -> Any:
    return plan.Strike(
        moment="training",
        batch=batch,
        delay_seconds=0.0,
        signal=name,
        victims=(victim,),
        **options,
    )


def test_a_killed_gang_is_started_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kills = [strike("KILL", 3), strike("KILL", 7, 0), strike("KILL", 99)]
    lives = [{"batches": 20}, {"first": 2, "batches": 20}, {"first": 5, "batches": 20}]
    outcome = fake_run(monkeypatch, tmp_path, kills, *lives)
    assert (outcome.gangs, outcome.batches, outcome.left_over) == (3, 20, 1)
    rows = [results.blow_row(blow) for blow in outcome.blows]
    assert [row["resumed_at"] for row in rows] == [2, 5]
    assert [row["codes"] for row in rows] == [{0: 1, 1: -9}, {0: -9, 1: 1}]
    for row, batch, resumed_at in zip(rows, (3, 7), (2, 5), strict=True):
        assert batch <= row["batches"] <= batch + 1
        assert row["batches_again"] == row["batches"] - resumed_at


def test_a_short_stop_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stop = strike("STOP", 3, pause_seconds=0.05)
    outcome = fake_run(monkeypatch, tmp_path, [stop], {"batches": 9})
    (gang,) = FakeGang.lived
    assert gang.signals == [(signal.SIGSTOP, (1,)), (signal.SIGCONT, (1,))]
    assert outcome.gangs == 1 and outcome.blows[0].codes is None


def test_a_short_stop_must_not_end_the_gang(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stop = strike("STOP", 3, pause_seconds=0.05)
    with pytest.raises(runs.RunFailed, match=r"though only STOP 1 for 0\.1 s was done to it"):
        fake_run(monkeypatch, tmp_path, [stop], {"batches": 9, "gives_up": True})


@pytest.mark.parametrize(("wakes", "last"), [(True, signal.SIGCONT), (False, signal.SIGKILL)])
def test_a_stop_until_the_others_have_given_up(
    wakes: bool, last: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stops = [strike("STOP", 3, 0, wakes=wakes), strike("KILL", 3)]
    lives = [{"batches": 9, "gives_up": True}, {"batches": 9}, {"batches": 9}]
    # The second one is due at once, but must wait for a gang that it can end.
    outcome = fake_run(monkeypatch, tmp_path, stops, *lives)
    assert FakeGang.lived[0].signals == [(signal.SIGSTOP, (0,)), (last, (0,))]
    assert outcome.gangs == 3
    assert outcome.blows[0].codes == {0: 1 if wakes else -9, 1: 1}


def test_an_end_that_nobody_brought_about(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    life = {"batches": 2, "codes": {0: 1, 1: -11}}
    with pytest.raises(runs.RunFailed, match=r"ended with code 1, though nothing was done") as at:
        fake_run(monkeypatch, tmp_path, [strike("KILL", 9)], life)
    assert "{0: 1, 1: -11}" in str(at.value) and "log of 0" in str(at.value)


def test_a_hang_shows_the_stacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(runs.RunFailed, match=r"nothing moved for 0\.3 s.* \[0, 1\] still run"):
        fake_run(monkeypatch, tmp_path, [], {"batches": 2, "hangs": True})
    assert FakeGang.lived[0].signals == [(signal.SIGUSR1, (0, 1))]


# --- What is compared


def made_up_outcome(folder: Path, *, csv: str = "epoch,loss\n0,0.5\n", loss: float = 0.5) -> Any:
    """Of two workers; `loss` is what worker 1 saw, and what TensorBoard shows."""
    training = settings.Training(run_dir=str(folder), workers=2)
    folder.mkdir()
    training.csv_path.write_text(csv)
    histories = [{"loss": [0.5]}, {"loss": [loss]}]
    for rank in range(2):
        np.savez(settings.arrays_path(folder, rank), kernel=np.ones(3))
    return runs.Outcome(
        training=training,
        folder=folder,
        results=[
            {
                "epochs": [0],
                "history": history,
                "weights_sha256": "ab",
                "scalars": {"train epoch_loss": [[0, loss]]} if rank == 0 else None,
            }
            for rank, history in enumerate(histories)
        ],
        seconds=2.0,
        start_seconds=1.0,
        batches=16,
        gangs=1,
        blows=[],
        left_over=0,
    )


def test_all_that_differs_is_told(tmp_path: Path) -> None:
    expected = made_up_outcome(tmp_path / "a")
    rows = results.compare(expected, made_up_outcome(tmp_path / "b"))
    assert len(rows) == 10 and all(row["verified"] for row in rows)

    text = "epoch,loss\n0,0.5\n0,0.5\n"
    rows = results.compare(expected, made_up_outcome(tmp_path / "c", csv=text, loss=0.25))
    assert {row["what"]: row["difference"] for row in rows if not row["verified"]} == {
        "worker 1: History": "['loss'][0]: 0.25 instead of 0.5",
        "CSV file": "[2]: '0,0.5' instead of ''",
        "TensorBoard": "['train epoch_loss'][0][1]: 0.25 instead of 0.5",
    }


@pytest.mark.parametrize(
    ("expected", "found", "difference"),
    [
        ({"loss": [1.5, 0.5]}, {"loss": [1.5, 0.5]}, None),
        ({"loss": [float("nan")]}, {"loss": [float("nan")]}, None),
        ({"loss": [0.1]}, {"loss": [0.1 + 2**-56]}, "['loss'][0]: 0.10000000000000002 instead"),
        ({"a": [1, 2, 3]}, {"a": [1, 3]}, "['a'][1]: 3 instead of 2"),
        ({"a": [1, 2]}, {"a": [1]}, "['a'][1]: is missing, should be 2"),
        ({"a": [[0, 1.0]]}, {"a": [[0, 1.0], [0, 1.0]]}, "['a'][1]: [0, 1.0], which should not"),
        ({"a": 1}, {"a": 1, "b": 2}, "['b']: 2, which should not be there"),
        ({"a": 1, "b": 2}, {"b": 2}, "['a']: is missing, should be 1"),
        ([0.0], [-0.0], "[0]: -0.0 instead of 0.0"),
        ("ab", "ac", ": 'ac' instead of 'ab'"),
        ([1], [1.0], "[0]: 1.0 instead of 1"),
    ],
)
def test_the_first_difference(expected: Any, found: Any, difference: str | None) -> None:
    told = results.first_difference(expected, found)
    assert told is None if difference is None else told.startswith(difference)


def test_the_first_variable_that_differs(tmp_path: Path) -> None:
    def difference(**changed: Any) -> str | None:
        old = {"0 a|kernel": np.zeros((2, 3), np.float32), "1 b": np.array(7)}
        paths = [tmp_path / "old.npz", tmp_path / "new.npz"]
        for path, arrays in zip(paths, (old, {**old, **changed}), strict=True):
            np.savez(path, **arrays)
        return results.variables_difference(*paths)

    one = np.zeros((2, 3), np.float32)
    assert difference(**{"0 a|kernel": one.copy()}) is None
    one[1, 2] = -0.0  # equal as a number
    told = difference(**{"0 a|kernel": one, "1 b": np.array(8)})
    assert told == (
        "2 of 2 differ, first '0 a/kernel'[1, 2]: np.float32(-0.0) instead of np.float32(0.0), and "
        "0 more of its 6 elements"
    )
    assert "[]: np.int64(8) instead of np.int64(7)" in difference(**{"1 b": np.array(8)})
    assert "float32[6] instead of float32[2, 3]" in difference(**{"0 a|kernel": one.reshape(6)})
    assert difference(c=one) == "names[2]: 'c', which should not be there"


def test_progress_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = settings.progress_path(tmp_path, 3)
    assert settings.Progress.read(path) is None
    with path.open("wb", buffering=0) as file:
        assert settings.Progress.read(path) is None
        for batches in (5, 6):
            progress = settings.Progress(5, batches, 1)
            progress.write(file)
            assert settings.Progress.read(path) == progress
