"""What other callbacks remember, and what they have written: saved and given back.

Callbacks of Keras keep it in attributes, which are listed here. One of your own has
`get_state() -> dict` and `set_state(dict)`, of plain values and NumPy arrays, and, for variables
that replicas keep each for themselves, a list `state_variables`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from tf_largebatch.callbacks._running_fit import inner_callback
from tf_largebatch.callbacks._written_logs import (
    open_event_files,
    read_csv,
    read_event_files,
    restore_csv,
    restore_event_files,
)
from tf_largebatch.core.errors import ConfigurationError

_ARRAY = "__array__"
_WHAT_IS_WRITTEN = ("filename", "log_dir", "filepath")
_REMEMBERED: tuple[tuple[type, tuple[str, ...]], ...] = (
    (
        keras.callbacks.EarlyStopping,
        ("best", "best_epoch", "best_weights", "stopped_epoch", "wait"),
    ),
    (keras.callbacks.ReduceLROnPlateau, ("best", "cooldown_counter", "wait")),
    (
        keras.callbacks.ModelCheckpoint,
        ("best", "_batches_seen_since_last_saving", "_last_batch_seen", "_current_epoch"),
    ),
    (keras.callbacks.TensorBoard, ("_global_train_batch", "_global_test_batch")),
    (keras.callbacks.History, ("epoch", "history")),
)


def named_callbacks(in_use: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """(name, callback) of each, wrapped ones taken out.

    Named by class, by the file or folder that it writes, and by number among those alike.
    """
    counts: Counter[str] = Counter()
    for callback in map(inner_callback, in_use):
        written = [
            Path(str(getattr(callback, attribute))).name
            for attribute in _WHAT_IS_WRITTEN
            if hasattr(callback, attribute)
        ]
        name = " ".join([type(callback).__name__, *written])
        yield f"{name} {counts[name]}", callback
        counts[name] += 1


def state_variables(in_use: Sequence[Any]) -> dict[str, list[Any]]:
    """The variables of callbacks that have some, by name."""
    found = {name: getattr(each, "state_variables", None) for name, each in named_callbacks(in_use)}
    return {f"callback {name}": list(variables) for name, variables in found.items() if variables}


def get_states(in_use: Sequence[Any], arrays: list[npt.NDArray[Any]]) -> dict[str, Any]:
    """Of all callbacks, as JSON has it; arrays are appended to `arrays`."""
    states = {}
    for name, callback in named_callbacks(in_use):
        state = _get(callback)
        if state:
            try:
                states[name] = _packed(state, arrays)
            except TypeError as error:
                raise ConfigurationError(
                    f"What {name} remembers cannot be saved: {error}. Its get_state() must return "
                    "a dict by text of numbers, texts, None, lists, such dicts, and arrays of "
                    "numbers."
                ) from error
    return states


def open_files(in_use: Sequence[Any], *, validates: bool) -> bool:
    """Has callbacks open the files that the next state must know of; whether there are any."""
    boards = [
        callback
        for callback in map(inner_callback, in_use)
        if isinstance(callback, keras.callbacks.TensorBoard)
    ]
    for board in boards:
        open_event_files(board, validates=validates)
    return bool(boards)


def set_states(
    in_use: Sequence[Any],
    states: dict[str, Any],
    arrays: Sequence[npt.NDArray[Any]],
    *,
    writes_files: bool,
) -> None:
    """Gives each callback its own; one that has none saved begins anew.

    Args:
        writes_files: whether this worker is the one that writes, whose files are put back as well.
    """
    for name, callback in named_callbacks(in_use):
        if name in states:
            state = _unpacked(states[name], arrays)
            _set(callback, state)
            if writes_files:
                _restore_files(callback, state)


def _get(callback: Any) -> dict[str, Any]:
    state = {
        attribute: getattr(callback, attribute)
        for kind, attributes in _REMEMBERED
        if isinstance(callback, kind)
        for attribute in attributes
        if hasattr(callback, attribute)
    }
    if isinstance(callback, keras.callbacks.CSVLogger):
        state |= read_csv(callback)
    if isinstance(callback, keras.callbacks.TensorBoard):
        state |= read_event_files(callback)
    if hasattr(callback, "get_state"):
        state |= {"own": callback.get_state()}
    return state


def _set(callback: Any, state: dict[str, Any]) -> None:
    for kind, attributes in _REMEMBERED:
        if isinstance(callback, kind):
            for attribute in attributes:
                if attribute in state:
                    setattr(callback, attribute, state[attribute])
    if "own" in state and hasattr(callback, "set_state"):
        callback.set_state(state["own"])


def _restore_files(callback: Any, state: dict[str, Any]) -> None:
    if isinstance(callback, keras.callbacks.CSVLogger):
        restore_csv(callback, state)
    if isinstance(callback, keras.callbacks.TensorBoard):
        restore_event_files(callback, state)


def _packed(value: Any, arrays: list[npt.NDArray[Any]]) -> Any:
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise TypeError(f"a dict has the keys {list(value)}")
        return {key: _packed(each, arrays) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_packed(each, arrays) for each in value]
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float | np.number | np.bool_):
        return value.item() if isinstance(value, np.generic) else value
    array = np.array(value)  # also what TensorFlow has
    if array.dtype.kind in "OSUM":
        raise TypeError(f"{value!r} is a {type(value).__name__}")
    if array.ndim == 0 and array.dtype.kind in "biuf":
        return array.item()
    arrays.append(array)
    return {_ARRAY: len(arrays) - 1}


def _unpacked(value: Any, arrays: Sequence[npt.NDArray[Any]]) -> Any:
    if isinstance(value, dict):
        if set(value) == {_ARRAY}:
            return arrays[value[_ARRAY]]
        return {key: _unpacked(each, arrays) for key, each in value.items()}
    if isinstance(value, list):
        return [_unpacked(each, arrays) for each in value]
    return value
