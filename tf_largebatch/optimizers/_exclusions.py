"""Which variables an optimizer leaves out of weight decay and of layer-wise rates."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from tf_largebatch.core.errors import ConfigurationError

_VERSION = 2


@dataclasses.dataclass(frozen=True)
class ExcludedVariable:
    """One variable that is left out, as it is stored.

    Args:
        path: where it is, as `"block/embedding/embeddings"`.
        shape: its sizes.
        reason: why it is left out.
        trainable: whether it can be trained, or has been frozen since it was left out.
        place: its number, and of how many, among the optimizer's variables that can be trained
            when it is stored; before the optimizer is built, among those of the model that was
            given. None where that is unknown.
        first_place: the same, among those that could be trained when it was left out.
    """

    path: str
    shape: tuple[int, ...]
    reason: str
    trainable: bool = True
    place: tuple[int, int] | None = None
    first_place: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class _Excluded:
    """One variable that is left out, and the variables that it is one of."""

    variable: Any
    reason: str
    among: Sequence[Any] = ()

    def described(self) -> ExcludedVariable:
        """As it is now: what is saved is built again with what can be trained, and counts those.

        But a subclassed model's layers are made anew, and Keras does not store which were frozen.
        """
        trainable = _is_trainable(self.variable)
        among = self.among if trainable else ()
        return ExcludedVariable(
            path_of(self.variable),
            tuple(self.variable.shape),
            self.reason,
            trainable,
            _place(self.variable, [each for each in among if _is_trainable(each)]),
            _place(self.variable, among),
        )


class Exclusions:
    """Variables that the user leaves out, from the call that names them to a reloaded model.

    They are given as layers, variables or patterns, found among the optimizer's variables when it
    is built, and stored by position from then on: Keras counts up the names of layers in each
    process, so a reloaded model's paths may be others, while its variables come in the same order.
    Other variables than those when it was stored are told from them by their number; then paths
    are used.
    """

    def __init__(self) -> None:
        self._excluded: list[_Excluded] = []
        self._patterns: list[str] = []
        self._stored: list[ExcludedVariable] = []
        self.reasons: Mapping[int, str] = {}  # by position, of a built optimizer

    def add(self, target: Any, layer_types: Any = None) -> None:
        """Leaves out the variables of `target`; see `MomentumOptimizer.exclude`.

        Raises:
            ConfigurationError: `target` is of another kind, or nothing in it matches.
        """
        layer_types = _checked_types(layer_types)
        targets = target if isinstance(target, list | tuple) else [target]
        found = [one for each in targets for one in _variables_of(each, layer_types)]
        if not found:
            raise ConfigurationError(f"exclude() is given nothing to leave out: {target!r}.")
        self._excluded += found

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

        Warns:
            UserWarning: a variable of a stored configuration had been frozen, and is forgotten.

        Raises:
            ConfigurationError: something given is not among them, or they are not those of the
                model that was saved.
        """
        found = [(each, _position_of(each, variables)) for each in self._stored]
        _warn_of_frozen([each.path for each, position in found if position is None])
        reasons = {position: each.reason for each, position in found if position is not None}
        positions = {key_of(variable): i for i, variable in enumerate(variables)}
        for each in self._excluded:
            position = positions.get(key_of(each.variable))
            if position is None:
                given = each.described()
                raise ConfigurationError(
                    f"exclude() was given {given.path} {given.shape}, which is not among the "
                    f"{len(variables)} variables that the optimizer updates: it is frozen, or of "
                    "another model. Call exclude() with what this model trains."
                )
            reasons[position] = each.reason
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
        self._stored, self._patterns = [], []
        self._excluded = [_Excluded(variables[i], reasons[i], variables) for i in sorted(reasons)]
        self.reasons = reasons

    def get_config(self) -> dict[str, Any] | None:
        """What `from_config` makes equal exclusions from; None where there are none."""
        stored = [*self._stored, *(each.described() for each in self._excluded)]
        if not (stored or self._patterns):
            return None
        entries = [dataclasses.asdict(each) for each in stored]
        return {
            "version": _VERSION,
            "variables": [
                {name: list(x) if isinstance(x, tuple) else x for name, x in entry.items()}
                for entry in entries
            ],
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
        exclusions._stored = [
            ExcludedVariable(
                **{name: tuple(x) if isinstance(x, list) else x for name, x in entry.items()}
            )
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


def _is_trainable(variable: Any) -> bool:
    return bool(getattr(variable, "trainable", True))


def _warn_of_frozen(paths: Sequence[str]) -> None:
    if paths:
        warnings.warn(
            f"The stored optimizer left out {', '.join(paths)}, frozen by then, and forgets that. "
            "To train what was frozen, make a new optimizer, and call exclude() on it.",
            stacklevel=2,
        )


def _place(variable: Any, among: Sequence[Any]) -> tuple[int, int] | None:
    return next(((i, len(among)) for i, each in enumerate(among) if each is variable), None)


def _position_of(stored: ExcludedVariable, variables: Sequence[Any]) -> int | None:
    """Where a variable of a stored configuration is among those of this model; None if frozen."""
    at, at_first = (
        [place[0]] if place is not None and place[1] == len(variables) else []
        for place in (stored.place, stored.first_place)
    )
    paths = [path_of(variable) for variable in variables]
    same = [i for i, path in enumerate(paths) if path == stored.path]
    # A model that is loaded is built by another route, which may drop the first parts.
    matching = at or same or [i for i, path in enumerate(paths) if _ends(path, stored.path)]
    matching = matching or at_first
    if [tuple(variables[i].shape) for i in matching] == [stored.shape]:
        return matching[0]
    if not stored.trainable:
        return None
    number, count = stored.place or (None, None)
    found = ", ".join(f"{paths[i]} {tuple(variables[i].shape)}" for i in matching)
    raise ConfigurationError(
        f"The stored optimizer leaves out {stored.path} {stored.shape}, number {number} of {count} "
        f"variables; this model has {len(variables)}, and there {found or 'none'}. For another "
        "model make a new optimizer, and call exclude() on it. If the model is the same, store the "
        "optimizer after optimizer.build(model.trainable_variables), which finds positions."
    )


def _checked_types(layer_types: Any) -> Any:
    """What `isinstance` takes, or None."""
    types = tuple(layer_types) if isinstance(layer_types, list | set) else layer_types
    try:
        isinstance(None, () if types is None else types)
    except TypeError:
        raise ConfigurationError(
            f"layer_types={layer_types!r}: must be a class of layers, as keras.layers.Embedding, "
            "or several in a list."
        ) from None
    return types


def _variables_of(target: Any, layer_types: Any) -> list[_Excluded]:
    """What `target` trains, in the layers of `layer_types` if given."""
    if not isinstance(target, keras.layers.Layer):
        if layer_types is not None or not hasattr(target, "shape"):
            wanted = "a model or layer" if layer_types is not None else "a layer or a variable"
            raise ConfigurationError(
                f"exclude() takes {wanted}, or a list of them, not {target!r}."
            )
        return [_Excluded(target, "given")]
    # `model.layers` is public, but does not look into blocks that are layers of layers.
    below = list(target._flatten_layers(include_self=True, recursive=True))
    layers = [target] if layer_types is None else [x for x in below if isinstance(x, layer_types)]
    among = target.trainable_variables if isinstance(target, keras.Model) else ()
    found = [
        _Excluded(variable, _named(layer), among)
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
