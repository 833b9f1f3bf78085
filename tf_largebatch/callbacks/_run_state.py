"""What a training run consists of at one step: taken, checked against another run, given back."""

from __future__ import annotations

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
from tf_largebatch.distribute._model_facts import model_facts
from tf_largebatch.optimizers._loss_scale_optimizer import innermost


def take_state(
    model: keras.Model,
    in_use: Sequence[Any],
    place: Place,
    data: dict[str, Any] | None,
    compiled_rate: float | None,
    replicas: Replicas,
) -> tuple[dict[str, Any], list[npt.NDArray[Any]]] | None:
    """Contents and arrays for a `StateDirectory`, on the chief; None on the others, which help.

    Args:
        in_use: all callbacks of the `fit`.
        data: `GlobalShuffleSharder.state` of the next batch; None where another data set is used.
        compiled_rate: see `rate_of`.
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
        "facts": _facts(model),
        "compiled_rate": compiled_rate,
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

    @property
    def where(self) -> str:
        """For people."""
        return self._state.where

    @property
    def compiled_rate(self) -> float | None:
        """What the learning rate was when the run began, if it is a number."""
        rate: float | None = self._state.contents["compiled_rate"]
        return rate

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
            f"{path.lstrip('.')}: {old} in the state, {new} here"
            for path, old, new in nested_differences(contents["facts"], _facts(self._model))
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


def rate_of(model: keras.Model) -> float | None:
    """The learning rate as it is now; None where a schedule gives it."""
    optimizer = innermost(model.optimizer)
    rate = getattr(optimizer, "learning_rate", None)
    is_number = any(rate is variable for variable in optimizer.variables)
    return float(keras.ops.convert_to_numpy(rate)) if is_number else None


def _optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """That of `compile`, and those that a model with a training step of its own keeps beside it."""
    kept = [each for each in vars(model).values() if isinstance(each, keras.optimizers.Optimizer)]
    others = [each for each in kept if each is not model.optimizer]
    for each in others:
        if not each.built:
            raise ConfigurationError(
                f"The model keeps another {type(each).__name__} beside that of compile, which has "
                "no variables yet, so that its state can be neither saved nor restored. Call its "
                "build(variables) within the strategy's scope before fit."
            )
    return [model.optimizer, *dict.fromkeys(others)]


def _groups(model: keras.Model, in_use: Sequence[Any]) -> dict[str, list[Any]]:
    return {
        "model": list(model.variables),
        "optimizer": [each for optimizer in _optimizers(model) for each in optimizer.variables],
        "metrics": list(model.metrics_variables),
        **state_variables(in_use),
    }


def _facts(model: keras.Model) -> dict[str, Any]:
    """What must be the same for a run to be the same, beside its variables."""
    facts = model_facts(model)
    # Variables are compared by themselves; the others do not change what is trained.
    kept = {name: facts[name] for name in ("layers", "optimizer", "loss", "metrics")}
    return _without_rates(kept)


def _without_rates(facts: Any) -> Any:
    """Leaves out rates that are numbers, as they change while training; the state has them."""
    if not isinstance(facts, dict):
        return facts
    return {
        name: _without_rates(value)
        for name, value in facts.items()
        if not (name == "learning_rate" and isinstance(value, int | float))
    }
