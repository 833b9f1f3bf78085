"""Which variables an optimizer leaves out of weight decay and of layer-wise rates."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from tf_largebatch.core.errors import ConfigurationError

_VERSION = 1


@dataclasses.dataclass(frozen=True)
class ExcludedVariable:
    """One variable that is left out.

    Args:
        path: where it is, as `"block/embedding/embeddings"`.
        shape: its sizes.
        reason: why it is left out.
        position: its number among the optimizer's variables; before the optimizer is built, among
            those of the model that was given, or None.
        num_variables: how many variables there are, of which it is number `position`.
    """

    path: str
    shape: tuple[int, ...]
    reason: str
    position: int | None = None
    num_variables: int | None = None


class Exclusions:
    """Variables that the user leaves out, from the call that names them to a reloaded model.

    They are given as layers, variables or patterns, found among the optimizer's variables when it
    is built, and kept by position from then on: Keras counts up the names of layers in each
    process, so a reloaded model's paths may be others, while its variables come in the same order.
    """

    def __init__(self) -> None:
        self._given: list[tuple[Any, ExcludedVariable]] = []  # each with its variable
        self._patterns: list[str] = []
        self._stored: list[ExcludedVariable] = []
        self._stored_when_built = False
        self.reasons: Mapping[int, str] = {}  # by position, of a built optimizer

    def add(self, target: Any, layer_types: Any = None) -> None:
        """Leaves out the variables of `target`; see `MomentumOptimizer.exclude`.

        Raises:
            ConfigurationError: `target` is of another kind, or nothing in it matches.
        """
        targets = target if isinstance(target, list | tuple) else [target]
        found = [pair for each in targets for pair in _variables_of(each, layer_types)]
        if not found:
            raise ConfigurationError(f"exclude() is given nothing to leave out: {target!r}.")
        self._given += found

    def add_patterns(self, patterns: Sequence[str]) -> None:
        """Leaves out variables in whose paths a pattern is found, as by `re.search`.

        Raises:
            ConfigurationError: one is not a pattern.
        """
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            try:
                re.compile(pattern)
            except (re.error, TypeError) as error:
                raise ConfigurationError(
                    f"var_names holds {pattern!r}, which is not a regular expression ({error}); "
                    "give parts of variables' paths, as 'embedding/'."
                ) from error
            self._patterns.append(pattern)

    def resolve(self, variables: Sequence[Any], key_of: Callable[[Any], Any]) -> None:
        """Finds what is left out among `variables`; from then on it is in `reasons`.

        Args:
            variables: those that the optimizer is built with.
            key_of: gives equal keys for the same variable.

        Raises:
            ConfigurationError: something given is not among them, or they are not those of the
                model that was saved.
        """
        reasons = {self._position_of(each, variables): each.reason for each in self._stored}
        positions = {key_of(variable): i for i, variable in enumerate(variables)}
        for variable, given in self._given:
            position = positions.get(key_of(variable))
            if position is None:
                raise ConfigurationError(
                    f"exclude() was given {given.path} {given.shape}, which is not among the "
                    f"{len(variables)} variables that the optimizer updates: it is frozen, or of "
                    "another model. Call exclude() with what this model trains."
                )
            reasons[position] = given.reason
        for pattern in self._patterns:
            matching = [i for i, each in enumerate(variables) if re.search(pattern, path_of(each))]
            if not matching:
                raise ConfigurationError(
                    f"var_names holds {pattern!r}, which is found in none of the paths of the "
                    f"{len(variables)} variables, as {path_of(variables[0])!r} and "
                    f"{path_of(variables[-1])!r}. Give a part of a path, or use "
                    "exclude(model, layer_types=...), which needs no names."
                )
            reasons.update((i, f"path matches {pattern!r}") for i in matching)
        self._given, self._patterns, self._stored_when_built = [], [], True
        self._stored = [_described(variables[i], reasons[i], variables) for i in sorted(reasons)]
        self.reasons = reasons

    def _position_of(self, stored: ExcludedVariable, variables: Sequence[Any]) -> int:
        """Where a variable of a stored configuration is among those of this model."""
        matching = [stored.position] if len(variables) == stored.num_variables else []
        if not (matching or self._stored_when_built):
            paths = [path_of(variable) for variable in variables]
            matching = [i for i, path in enumerate(paths) if path == stored.path]
            # A model that is loaded is built by another route, which may drop the first parts.
            matching = matching or [i for i, path in enumerate(paths) if _ends(path, stored.path)]
        if [tuple(variables[i].shape) for i in matching] == [stored.shape]:
            return matching[0]
        found = ", ".join(f"{path_of(variables[i])} {tuple(variables[i].shape)}" for i in matching)
        raise ConfigurationError(
            f"The stored optimizer leaves out {stored.path} {stored.shape}, number "
            f"{stored.position} of {stored.num_variables} variables; this model has "
            f"{len(variables)}, and there {found or 'none'}. For another model make a new "
            "optimizer, and call exclude() on it. If the model is the same, store the optimizer "
            "after optimizer.build(model.trainable_variables), which finds positions."
        )

    def get_config(self) -> dict[str, Any] | None:
        """What `from_config` makes equal exclusions from; None where there are none."""
        given = [given for _, given in self._given]
        if not (self._stored or given or self._patterns):
            return None
        entries = [dataclasses.asdict(each) for each in [*self._stored, *given]]
        return {
            "version": _VERSION,
            "built": self._stored_when_built,
            "variables": [{**entry, "shape": list(entry["shape"])} for entry in entries],
            "patterns": list(self._patterns),
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Exclusions:
        """Exclusions of a stored optimizer, to be found again when the new one is built."""
        if config["version"] != _VERSION:
            raise ConfigurationError(
                f"The optimizer's exclusions are stored in version {config['version']}, but this "
                f"tf_largebatch reads version {_VERSION}; use the version that stored them."
            )
        exclusions = cls()
        exclusions._stored_when_built = config["built"]
        exclusions._stored = [
            ExcludedVariable(**{**entry, "shape": tuple(entry["shape"])})
            for entry in config["variables"]
        ]
        exclusions._patterns = list(config["patterns"])
        return exclusions


def path_of(variable: Any) -> str:
    """A Keras variable's path, or the name of one of TensorFlow's."""
    return str(getattr(variable, "path", None) or variable.name)


def _ends(path: str, other: str) -> bool:
    """Whether one path is the end of the other."""
    return f"/{path}".endswith(f"/{other}") or f"/{other}".endswith(f"/{path}")


def _described(variable: Any, reason: str, among: Sequence[Any]) -> ExcludedVariable:
    place = next((i for i, each in enumerate(among) if each is variable), None)
    count = None if place is None else len(among)
    return ExcludedVariable(path_of(variable), tuple(variable.shape), reason, place, count)


def _variables_of(target: Any, layer_types: Any) -> list[tuple[Any, ExcludedVariable]]:
    """What `target` trains, in the layers of `layer_types` if given, and descriptions of it."""
    if not isinstance(target, keras.layers.Layer):
        if layer_types is not None or not hasattr(target, "shape"):
            wanted = "a model or layer" if layer_types is not None else "a layer or a variable"
            raise ConfigurationError(
                f"exclude() takes {wanted}, or a list of them, not {target!r}."
            )
        return [(target, _described(target, "given", ()))]
    # `model.layers` is public, but does not look into blocks that are layers of layers.
    below = list(target._flatten_layers(include_self=True, recursive=True))
    layers = [target] if layer_types is None else [x for x in below if isinstance(x, layer_types)]
    among = target.trainable_variables if isinstance(target, keras.Model) else ()
    found = [
        (variable, _described(variable, _named(layer), among))
        for layer in layers
        for variable in layer.trainable_variables
    ]
    if not found:
        kinds = ", ".join(sorted({type(x).__name__ for x in below if x.trainable_variables}))
        of_types = "" if layer_types is None else f" in layers of {layer_types}"
        raise ConfigurationError(
            f"exclude() finds no trainable variables of {_named(target)}{of_types}. Layers with "
            f"some: {kinds or 'none; build the model first, and freeze layers after'}."
        )
    return found


def _named(layer: Any) -> str:
    return f"{type(layer).__name__} {layer.name!r}"
