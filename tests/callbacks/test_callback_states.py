"""What callbacks remember goes through JSON and arrays to a new one, and the logs with it."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_largebatch as tlb
from tf_largebatch.callbacks._callback_states import (
    get_states,
    named_callbacks,
    open_files,
    set_states,
    state_variables,
)
from tf_largebatch.callbacks._running_fit import inner_callback
from tf_largebatch.core.state_text import from_text, to_text

kinds = keras.callbacks


class Keeps(kinds.Callback):
    """Gives and takes anything."""

    def __init__(self, state: Any = None) -> None:
        super().__init__()
        self.state = state

    def get_state(self) -> Any:
        return self.state

    def set_state(self, state: Any) -> None:
        self.state = state


def carried(old: list[Any], new: list[Any], *, writes_files: bool = True) -> None:
    """From the callbacks of one process to those of another."""
    arrays: list[Any] = []
    contents = from_text(to_text(get_states(old, arrays)))
    set_states(new, contents, arrays, writes_files=writes_files)


@pytest.mark.parametrize(
    ("make", "attributes"),
    [
        (
            lambda: kinds.EarlyStopping(restore_best_weights=True),
            {"best": 0.1, "best_epoch": 3, "stopped_epoch": 0, "wait": 2},
        ),
        (kinds.ReduceLROnPlateau, {"best": float("inf"), "cooldown_counter": 1, "wait": 4}),
        (
            lambda: kinds.ModelCheckpoint("x.keras"),
            {
                "best": 0.25,
                "_batches_seen_since_last_saving": 2,
                "_last_batch_seen": 5,
                "_current_epoch": 1,
            },
        ),
        (
            lambda: kinds.TensorBoard("/nowhere"),
            {"_global_train_batch": 12, "_global_test_batch": 3},
        ),
        (kinds.History, {"epoch": [0, 1], "history": {"loss": [0.1, float("inf")]}}),
    ],
)
@pytest.mark.parametrize("wrap", [lambda each: each, tlb.callbacks.ChiefOnly])
def test_callbacks_of_keras(make: Any, attributes: dict[str, Any], wrap: Any) -> None:
    old, new = make(), make()
    if getattr(old, "monitor_op", "none") is None and not isinstance(old, kinds.ModelCheckpoint):
        wrap = lambda each: each  # noqa: E731  needed on every worker
    for name, value in attributes.items():
        assert f"self.{name}" in inspect.getsource(type(old))
        setattr(old, name, value)
    carried([wrap(old)], [wrap(new)])
    assert {name: getattr(new, name) for name in attributes} == attributes


def test_best_weights() -> None:
    old, new = (kinds.EarlyStopping(restore_best_weights=True) for _ in range(2))
    old.best_weights = [np.arange(3, dtype=np.float32), np.float16([[1.5]])]
    old.best = np.float32(0.1)
    carried([old], [new])
    assert new.best == float(np.float32(0.1))
    for value, expected in zip(new.best_weights, old.best_weights, strict=True):
        np.testing.assert_array_equal(value, expected, strict=True)


def test_all_that_one_of_a_users_own_may_hold() -> None:
    state = {
        "none": None,
        "flag": True,
        "count": 3,
        "nested": {"list": [1, [2.5, "text"], {"array": np.arange(4)}]},
        "empty": np.zeros((0, 2), np.int8),
        "tensor": keras.ops.convert_to_tensor([1.0, 2.0]),
        "numbers": [np.int64(7), np.float32(0.5), np.bool_(False), np.array(2)],
        "tuple": (1, 2),
    }
    new = Keeps()
    carried([Keeps(state)], [new])
    np.testing.assert_array_equal(new.state["nested"]["list"][2].pop("array"), np.arange(4))
    np.testing.assert_array_equal(new.state.pop("empty"), np.zeros((0, 2), np.int8), strict=True)
    np.testing.assert_array_equal(new.state.pop("tensor"), np.float32([1, 2]), strict=True)
    assert new.state == {
        "none": None,
        "flag": True,
        "count": 3,
        "nested": {"list": [1, [2.5, "text"], {}]},
        "numbers": [7, 0.5, False, 2],
        "tuple": [1, 2],
    }


def test_what_is_saved_does_not_change_with_the_callback() -> None:
    keeps, arrays = Keeps({"sums": np.zeros(2)}), []
    get_states([keeps], arrays)
    keeps.state["sums"] += 1.0
    assert arrays[0].tolist() == [0.0, 0.0]


def test_by_class_and_number() -> None:
    old = [Keeps({"n": 1}), kinds.History(), tlb.callbacks.ChiefOnly(Keeps({"n": 2}))]
    new = [tlb.callbacks.ChiefOnly(Keeps()), Keeps(), Keeps({"n": "begins anew"})]
    carried(old, new)
    assert [inner_callback(each).state["n"] for each in new] == [1, 2, "begins anew"]
    names = [name for name, _ in named_callbacks(old)]
    assert names == ["Keeps 0", "History 0", "Keeps 1"]


def test_what_is_wrapped() -> None:
    keeps = Keeps({"n": 1})
    twice = tlb.callbacks.ChiefOnly(tlb.callbacks.ChiefOnly(keeps))
    assert inner_callback(twice) is keeps
    keeps.callback = print  # a function that it calls, which is no callback
    assert inner_callback(keeps) is keeps


def test_variables_of_callbacks() -> None:
    class Has(kinds.Callback):
        state_variables = ("a variable",)

    found = state_variables([Keeps(), tlb.callbacks.ChiefOnly(Has()), Has()])
    assert found == {"callback Has 0": ["a variable"], "callback Has 1": ["a variable"]}


# --- Logs


def logger_of(path: Path, epochs: int = 0, **options: Any) -> kinds.CSVLogger:
    """A `CSVLogger` within a `fit`."""
    logger = kinds.CSVLogger(str(path), **options)
    logger.set_model(keras.Sequential())
    logger.on_train_begin()
    for epoch in range(epochs):
        logger.on_epoch_end(epoch, {"loss": epoch / 8})
    return logger


@pytest.mark.parametrize("append", [False, True])
@pytest.mark.parametrize("saved_epochs", [0, 1, 2])
@pytest.mark.parametrize("wrap", [lambda each: each, tlb.callbacks.ChiefOnly])
def test_a_csv_goes_on_behind_what_was_saved(
    tmp_path: Path, append: bool, saved_epochs: int, wrap: Any
) -> None:
    path = tmp_path / "log.csv"
    old = logger_of(path, saved_epochs, append=append)
    arrays: list[Any] = []
    states = get_states([wrap(old)], arrays)
    old.on_epoch_end(saved_epochs, {"loss": 7.0})  # more than is in the state
    old.csv_file.close()

    new = logger_of(path, append=append)
    set_states([wrap(new)], states, arrays, writes_files=True)
    for epoch in range(saved_epochs, 3):
        new.on_epoch_end(epoch, {"loss": epoch / 8})
    new.on_train_end()
    expected = logger_of(tmp_path / "whole.csv", 3)
    expected.on_train_end()
    assert path.read_bytes() == (tmp_path / "whole.csv").read_bytes()


def test_a_csv_that_is_closed(tmp_path: Path) -> None:
    old = logger_of(tmp_path / "log.csv", 2)
    old.on_train_end()
    text, arrays = (tmp_path / "log.csv").read_bytes(), []
    states = get_states([old], arrays)
    new = logger_of(tmp_path / "log.csv")
    new.on_train_end()
    assert (tmp_path / "log.csv").read_bytes() == b""
    set_states([new], states, arrays, writes_files=True)
    assert (tmp_path / "log.csv").read_bytes() == text


def test_files_are_put_back_by_the_worker_that_writes_alone(tmp_path: Path) -> None:
    old, arrays = logger_of(tmp_path / "log.csv", 2), []
    states = get_states([old], arrays)
    new = logger_of(tmp_path / "log.csv")
    set_states([new], states, arrays, writes_files=False)
    assert (tmp_path / "log.csv").read_bytes() == b""


def test_event_files_of_a_run_end_where_they_did(tmp_path: Path) -> None:
    """Those of others in the same folder stay as they are."""
    writes = tf.summary.create_file_writer
    foreign = tmp_path / "train" / "events.out.tfevents.17.other.1.v2"
    (tmp_path / "validation").mkdir()
    foreign.parent.mkdir()
    foreign.write_bytes(b"12345678")
    board = kinds.TensorBoard(str(tmp_path))
    board._train_dir, board._val_dir = str(foreign.parent), str(tmp_path / "validation")
    open_files([board], validates=True)
    arrays: list[Any] = []
    states = get_states([board], arrays)
    own = {path for path in tmp_path.glob("*/*") if path != foreign}
    assert {path.parent.name for path in own} == {"train", "validation"}
    before = {path: path.read_bytes() for path in own}
    for path in (*own, foreign):
        with path.open("ab") as file:
            file.write(b"later")
    later = writes(str(foreign.parent))  # of a process that has saved nothing
    set_states([kinds.TensorBoard(str(tmp_path))], states, arrays, writes_files=True)
    assert {path: path.read_bytes() for path in own} == before
    assert foreign.read_bytes() == b"12345678later"
    assert len(list(foreign.parent.iterdir())) == 3
    later.close()
