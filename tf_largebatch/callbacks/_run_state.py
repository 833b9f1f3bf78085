"""What a training run consists of at one step: taken, checked against another run, given back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import keras
import numpy.typing as npt

from tf_largebatch.callbacks._callback_states import get_states, set_states, state_variables
from tf_largebatch.callbacks._run_variables import (
    Captured,
    Replicas,
    capture,
    describe,
    differences,
    restore,
)
from tf_largebatch.callbacks._state_agreement import AgreedState
from tf_largebatch.callbacks._state_contents import VERSION, Place, checked_contents
from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.core.nested_differences import nested_differences
from tf_largebatch.data._training_position import TrainingPosition


def take_state(
    model: keras.Model,
    in_use: Sequence[Any],
    place: Place,
    data: dict[str, Any] | None,
    replicas: Replicas,
) -> tuple[dict[str, Any], list[npt.NDArray[Any]]] | None:
    """Contents and arrays for a `StateDirectory`, on the chief; None on the others, which help.

    Args:
        in_use: all callbacks of the `fit`.
        data: `GlobalShuffleSharder.state` of the next batch; None where another data set is used.
    """
    groups = _groups(model, in_use)
    captured = capture([each for group in groups.values() for each in group], replicas)
    if captured is None:
        return None
    arrays = [each.value for each in captured]
    contents = {
        "version": VERSION,
        "place": asdict(place),
        "data": data,
        "variables": {name: list(map(describe, group)) for name, group in groups.items()},
        "is_per_replica": [each.is_per_replica for each in captured],
        "optimizer": _optimizer_config(model.optimizer),
        "callbacks": get_states(in_use, arrays),
    }
    return contents, arrays


class SavedRun:
    """A state that was loaded, for a model that is to be brought into it.

    Raises:
        ConfigurationError: the state is of another model, optimizer or recipe, or data set; with
            both sides. Also of another version.
        DataError: it is none of a training run.
    """

    def __init__(
        self,
        state: AgreedState,
        model: keras.Model,
        position: TrainingPosition | None,
        replicas: Replicas,
    ) -> None:
        self._state = state
        self._model = model
        self._replicas = replicas
        self.place = checked_contents(state.contents, state.arrays, state.where)
        self._check(position)
        if position is not None and not self.place.is_over:
            position.seek(state.contents["data"])

    def restore_model(self) -> None:
        """Weights and optimizer, for whatever reads them when training begins."""
        self._restore("model")
        self._restore("optimizer")

    def restore_rest(self, in_use: Sequence[Any], *, with_metrics: bool) -> None:
        """What was to wait until all callbacks have begun: metrics, callbacks and what they wrote.

        The optimizer once more: callbacks that multiply the learning rate when an epoch begins
        have just done so a second time.

        Args:
            in_use: all callbacks of the `fit`.
            with_metrics: whether training goes on within an epoch.
        """
        self._restore("optimizer")
        if with_metrics:
            self._restore("metrics")
        for name in state_variables(in_use):
            self._restore(name, in_use)
        states = self._state.contents["callbacks"]
        set_states(in_use, states, self._state.arrays, writes_files=self._replicas.is_chief)

    def _restore(self, name: str, in_use: Sequence[Any] = ()) -> None:
        saved_groups, start = self._state.contents["variables"], 0
        for group, variables in saved_groups.items():
            if group == name:
                break
            start += len(variables)
        else:
            return  # a callback that was not there
        here = _groups(self._model, in_use)[name]
        self._refuse(differences({name: saved_groups[name]}, {name: list(map(describe, here))}))
        places = range(start, start + len(here))
        flags = self._state.contents["is_per_replica"]
        saved = [Captured(self._state.arrays[place], flags[place]) for place in places]
        restore(here, saved, self._replicas)

    def _check(self, position: TrainingPosition | None) -> None:
        contents = self._state.contents
        # Metrics are compared when they are restored, as they may not have been built by now.
        names = ("model", "optimizer")
        here = {name: list(map(describe, _groups(self._model, ())[name])) for name in names}
        saved = {name: contents["variables"][name] for name in names}
        lines = differences(saved, here)
        lines += [
            f"optimizer{path}: {old} in the state, {new} here"
            for path, old, new in nested_differences(
                contents["optimizer"], _optimizer_config(self._model.optimizer)
            )
        ]
        data = {key: value for key, value in (contents["data"] or {}).items() if key not in _STEP}
        lines += [
            f"data{path}: {old} in the state, {new} here"
            for path, old, new in nested_differences(
                data, position.sharder.identity if position else {}
            )
        ]
        self._refuse(lines)

    def _refuse(self, lines: Sequence[str]) -> None:
        if lines:
            raise ConfigurationError(
                f"The state in {self._state.where} is of another run:\n  "
                + "\n  ".join(lines)
                + "\nTrain with the model, recipe and data that it was saved with, or choose an "
                "empty directory."
            )


_STEP = ("epoch", "step")


def _groups(model: keras.Model, in_use: Sequence[Any]) -> dict[str, list[Any]]:
    return {
        "model": list(model.variables),
        "optimizer": list(model.optimizer.variables),
        "metrics": list(model.metrics_variables),
        **state_variables(in_use),
    }


def _optimizer_config(optimizer: keras.optimizers.Optimizer) -> Any:
    """Class and settings with the schedule of the recipe, as JSON has them."""
    config = keras.saving.serialize_keras_object(optimizer)
    config = json.loads(json.dumps(config, default=lambda value: type(value).__name__))
    _drop_rates(config)
    return config


def _drop_rates(config: Any) -> None:
    """Leaves out a rate that is a number, as it changes while training; the state has it."""
    if not isinstance(config, dict):
        return
    if isinstance(config.get("learning_rate"), int | float):
        del config["learning_rate"]
    config.pop("name", None)
    for each in config.values():
        _drop_rates(each)
