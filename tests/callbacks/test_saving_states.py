"""When `TrainingState` saves, what it refuses, signals, logs, and what it leaves behind."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_largebatch as tlb
from tests.callbacks._training_runs import (
    STEPS,
    BreaksOff,
    BrokenOff,
    Outcome,
    Run,
    X,
    Y,
    assert_same,
    compiled_model,
    sharder_of,
    train,
)
from tf_largebatch.callbacks._state_writer import wait_for_all_writers
from tf_largebatch.callbacks._terminate_signal import TerminateSignal

PLAIN = Run()


def done(run: Run, folder: Path, **options: Any) -> Outcome:
    outcome = train(run, folder, **options)
    assert outcome is not None
    return outcome


def states(folder: Path) -> list[int]:
    """The updates of the states that are there."""
    return sorted(int(path.stem.removeprefix("state_")) for path in (folder / "state").iterdir())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0, 4, 8]),
        ({"save_every_steps": 3}, [0, 3, 6, 8]),
        ({"save_every_steps": 100}, [0, 8]),
        ({"save_every_steps": 3, "keep": 2}, [6, 8]),
        ({"keep": 1}, [8]),
        ({"save_every_seconds": 1e-6}, list(range(9))),
        ({"save_every_seconds": 1e6}, [0, 8]),
    ],
)
def test_when_states_are_saved(
    tmp_path: Path, options: dict[str, Any], expected: list[int]
) -> None:
    outcome = done(replace(PLAIN, state={"keep": 99, **options}), tmp_path)
    assert states(tmp_path) == expected
    if "keep" not in options:
        assert outcome.state.saves == len(expected)
    assert outcome.state.stall_seconds > 0


def test_more_epochs_after_the_end(tmp_path: Path) -> None:
    done(replace(PLAIN, epochs=1), tmp_path / "longer")
    longer = done(PLAIN, tmp_path / "longer")
    assert_same(longer, done(PLAIN, tmp_path / "at_once"))


def test_the_next_fit_is_not_changed(tmp_path: Path) -> None:
    """After a `fit` that trained, and after one that had nothing left to train."""
    handler = signal.getsignal(signal.SIGTERM)
    for _ in range(2):
        model = done(PLAIN, tmp_path).model
        assert signal.getsignal(signal.SIGTERM) is handler
        assert model.fit(X, Y, epochs=2, verbose=0).epoch == [0, 1]
        assert states(tmp_path) == [7, 8]


def test_a_state_that_was_still_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `fit` that follows an exception waits for it: two would write into one folder."""
    written, fsync = threading.Event(), os.fsync

    def slow(file: int) -> None:
        fsync(file)
        time.sleep(0.3)
        written.set()

    class SlowsDown(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if self.model.optimizer.iterations == 3:
                monkeypatch.setattr(os, "fsync", slow)

    train(replace(PLAIN, callbacks=lambda _: [SlowsDown()]), tmp_path, break_after=4)
    monkeypatch.setattr(os, "fsync", fsync)
    outcome = done(PLAIN, tmp_path)
    assert written.is_set()
    assert outcome.state.saves == 6  # those before steps 3 to 7, and the end


def scalars(folder: Path) -> list[tuple[str, str, int, float]]:
    return [
        (path.parent.name, value.tag, event.step, float(tf.make_ndarray(value.tensor)))
        for path in sorted(folder.glob("*/events*"))
        for event in tf.compat.v1.train.summary_iterator(str(path))
        for value in event.summary.value
    ]


@pytest.mark.parametrize("place", [0, None])
def test_logs_have_everything_once(tmp_path: Path, place: int | None) -> None:
    def callbacks(folder: Path) -> list[Any]:
        board = keras.callbacks.TensorBoard(str(folder / "board"), update_freq=1, write_graph=False)
        return [keras.callbacks.CSVLogger(str(folder / "log.csv")), board]

    run = replace(PLAIN, callbacks=callbacks, validation=True, place=place)
    broken, whole = tmp_path / "broken", tmp_path / "whole"
    expected = done(run, whole)
    # Between the saves, so that there is a batch too many in the logs.
    train(replace(run, state={"save_every_steps": 2}), broken, break_after=STEPS + 3)
    gc.collect()  # closes files, as the end of a process does
    assert_same(done(run, broken), expected)
    assert (broken / "log.csv").read_bytes() == (whole / "log.csv").read_bytes()
    gc.collect()
    points = scalars(whole / "board")
    assert len({point[:3] for point in points}) == len(points) > 2 * STEPS
    assert sorted(scalars(broken / "board")) == sorted(points)
    # Started again, it trains nothing, and leaves the logs alone.
    done(run, broken)
    gc.collect()
    assert (broken / "log.csv").read_bytes() == (whole / "log.csv").read_bytes()
    assert sorted(scalars(broken / "board")) == sorted(points)


# --- SIGTERM


@pytest.fixture
def earlier_handler() -> Iterator[list[int]]:
    """Signals that came to the handler of before."""
    received: list[int] = []

    def earlier(number: int, _: Any) -> None:
        received.append(number)
        raise BrokenOff

    before = signal.signal(signal.SIGTERM, earlier)
    yield received
    assert signal.getsignal(signal.SIGTERM) is earlier
    signal.signal(signal.SIGTERM, before)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_told_to_end(tmp_path: Path, earlier_handler: list[int]) -> None:
    run = replace(PLAIN, state={})
    with pytest.raises(SystemExit) as caught:
        train(run, tmp_path, break_after=STEPS + 2, act=terminate)
    assert caught.value.code == 143
    # It came when the state was done with that batch, so one more was trained.
    assert states(tmp_path) == [4, STEPS + 3]
    assert_same(done(run, tmp_path), done(run, tmp_path / "undisturbed"))
    assert earlier_handler == []


def test_told_to_end_by_the_last_batch(tmp_path: Path, earlier_handler: list[int]) -> None:
    with pytest.raises(SystemExit):
        train(PLAIN, tmp_path, break_after=2 * STEPS, act=terminate)
    assert states(tmp_path) == [7, 8]
    assert done(PLAIN, tmp_path).state.saves == 0


def test_told_twice(tmp_path: Path, earlier_handler: list[int]) -> None:
    def twice() -> None:
        terminate()
        terminate()

    assert train(PLAIN, tmp_path, break_after=2, act=twice) is None
    assert earlier_handler == [signal.SIGTERM]


def test_told_after_an_exception_has_left_the_fit(
    tmp_path: Path, earlier_handler: list[int]
) -> None:
    """Within another `fit`, and with the object in use a second time."""
    model = compiled_model(PLAIN)
    state = tlb.callbacks.TrainingState(tmp_path, save_every_steps=1)
    data = sharder_of(PLAIN).train_dataset()
    options = {"epochs": 2, "shuffle": False, "verbose": 0}
    with pytest.raises(BrokenOff):
        model.fit(data, callbacks=[state, BreaksOff(2)], **options)
    with pytest.raises(BrokenOff):
        model.fit(X, Y, callbacks=[BreaksOff(1, terminate)], verbose=0)
    assert earlier_handler == [signal.SIGTERM]
    model.fit(data, callbacks=[state], **options)
    with pytest.raises(BrokenOff):
        terminate()
    assert earlier_handler == [signal.SIGTERM] * 2


def test_a_second_signal_kills() -> None:
    def fit(callbacks: Any) -> None:
        terminate()
        terminate()
        os._exit(0)

    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        in_use = keras.callbacks.CallbackList([keras.callbacks.Callback()])
        TerminateSignal(in_use.callbacks[0]).install()
        fit(in_use)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


# --- Refusals


def wide_model() -> keras.Model:
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(7), keras.layers.Dense(1)])


@pytest.fixture(scope="module")
def broken_off(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("broken_off")
    train(PLAIN, folder, break_after=6)
    wait_for_all_writers()
    return folder


@pytest.mark.parametrize(
    ("changes", "sides"),
    [
        ({"model": wide_model}, r"model: 9 variables in the state, 4 here; number 0: .*\[3, 7\]"),
        (
            {"optimizer": lambda: keras.optimizers.SGD(0.05, momentum=0.9)},
            r"optimizer\.class: 'MomentumSGD' in the state, 'SGD' here",
        ),
        (
            {"optimizer": lambda: tlb.optimizers.MomentumSGD(0.05, weight_decay=1e-2)},
            r"optimizer\.weight_decay: 0\.001 in the state, 0\.01 here",
        ),
        (
            {
                "optimizer": lambda: tlb.optimizers.MomentumSGD(
                    keras.optimizers.schedules.CosineDecay(0.1, 9), weight_decay=1e-3
                )
            },
            r"optimizer\.learning_rate: none in the state, \{.*'CosineDecay'",
        ),
        ({"seed": 3}, r"data\.seed: 2 in the state, 3 here"),
        ({"batch": 12}, r"data\.global_batch_size: 6 in the state, 12 here"),
        ({"rows": 18}, r"data\.num_rows: 24 in the state, 18 here"),
        ({"data": lambda: (X, Y), "state": {}}, r"data\.seed: 2 in the state, none here"),
    ],
)
def test_a_state_of_another_run(broken_off: Path, changes: dict[str, Any], sides: str) -> None:
    before = states(broken_off)
    with pytest.raises(tlb.ConfigurationError, match=f"(?s)is of another run:.*{sides}"):
        train(replace(PLAIN, **changes), broken_off)
    assert states(broken_off) == before


def test_another_number_of_steps_per_execution(broken_off: Path) -> None:
    run = replace(PLAIN, steps_per_execution=4)
    with pytest.raises(tlb.ConfigurationError, match=r"before step 1 of 4.*steps_per_execution=4"):
        train(run, broken_off)


def test_the_state_counts_whatever_initial_epoch_says(tmp_path: Path) -> None:
    expected = done(PLAIN, tmp_path / "undisturbed")
    train(PLAIN, tmp_path / "resumed", break_after=2)
    assert_same(done(replace(PLAIN, initial_epoch=1), tmp_path / "resumed"), expected)


def test_an_exception_of_another_callback_leaves_nothing_for_the_next_fit(tmp_path: Path) -> None:
    class Raises(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            raise ValueError("of another callback")

    train(PLAIN, tmp_path, break_after=6)
    model = compiled_model(PLAIN)
    raising = [tlb.callbacks.TrainingState(tmp_path / "state"), Raises()]
    with pytest.raises(ValueError, match="of another callback"):
        model.fit(sharder_of(PLAIN).train_dataset(), epochs=2, verbose=0, callbacks=raising)
    assert model.fit(X, Y, epochs=2, verbose=0).epoch == [0, 1]


def test_logs_stay_where_a_state_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    logged = replace(PLAIN, callbacks=lambda _: [keras.callbacks.CSVLogger(str(path))])
    train(logged, tmp_path, break_after=6)
    before = path.read_text()
    assert before.startswith("epoch,")
    with pytest.raises(tlb.ConfigurationError, match="is of another run"):
        train(replace(logged, seed=3), tmp_path)
    assert path.read_text() == before


def test_a_loop_of_ones_own_is_refused(tmp_path: Path) -> None:
    model = compiled_model(PLAIN)
    listed = keras.callbacks.CallbackList(
        [tlb.callbacks.TrainingState(tmp_path)], model=model, epochs=1, steps=2
    )
    with pytest.raises(tlb.ConfigurationError, match="works within fit"):
        listed.on_train_begin()


@pytest.mark.parametrize(
    ("run", "rule"),
    [
        (
            Run(data=lambda: tf.data.Dataset.from_tensor_slices((X, Y)).batch(6)),
            "within epochs, but fit trains on data of _BatchDataset",
        ),
        (Run(data=lambda: (X, Y), state={"save_every_seconds": 1.0}), "data of ndarray"),
        (
            Run(batch=8, steps_per_execution=2),
            r"steps_per_execution=2 does not divide the 3 steps of an epoch",
        ),
        (
            Run(data=lambda: sharder_of(PLAIN).train_dataset(), batch=8, given_steps=True),
            "steps_per_epoch=3, but the sharder's epochs have 4 steps",
        ),
        (
            Run(callbacks=lambda folder: [keras.callbacks.BackupAndRestore(folder / "backup")]),
            "BackupAndRestore and TrainingState both",
        ),
    ],
)
def test_refused_when_training_begins(tmp_path: Path, run: Run, rule: str) -> None:
    with pytest.raises(tlb.ConfigurationError, match=rule):
        train(run, tmp_path)
    assert not (tmp_path / "state").exists()


def test_steps_per_execution_that_leave_a_rest(tmp_path: Path) -> None:
    """Between epochs only, told to end as well: the rest could not be read."""
    run = replace(PLAIN, batch=4, rows=20, steps_per_execution=2, eagerly=False, state={})
    with pytest.raises(SystemExit):
        train(run, tmp_path, break_after=2, act=terminate)
    assert states(tmp_path) == [0]
    assert_same(done(run, tmp_path), done(run, tmp_path / "undisturbed"))


@pytest.mark.parametrize(
    "options",
    [{"save_every_steps": 0}, {"save_every_steps": 1.5}, {"save_every_seconds": 0}, {"keep": 0}],
)
def test_arguments_out_of_range(tmp_path: Path, options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(tlb.ConfigurationError, match=name):
        tlb.callbacks.TrainingState(tmp_path, **options)


def test_directories_that_cannot_be_read(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(tlb.ConfigurationError, match="is a file"):
        tlb.callbacks.TrainingState(file)
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "state_000000000003.tlb").write_text("nonsense")
    with pytest.raises(tlb.DataError, match="None of the 1 states"):
        train(PLAIN, tmp_path)


def test_weights_of_a_refused_run_stay(broken_off: Path) -> None:
    """Nothing is given to the model before all is seen to fit."""
    run = replace(PLAIN, seed=3)
    model = compiled_model(run)
    before = model.get_weights()
    with pytest.raises(tlb.ConfigurationError):
        train(run, broken_off, model=model)
    for value, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, other)
