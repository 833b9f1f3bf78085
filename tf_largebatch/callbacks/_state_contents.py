"""What a state of a training run consists of, and the check that it does.

A state file proves that nothing was lost since it was written, not who wrote it, and what for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from tf_largebatch.core.errors import ConfigurationError, DataError

# To be raised with any change of the contents.
VERSION = 1
GROUPS = ("model", "optimizer", "metrics")  # and one for each callback with variables
_KINDS: dict[str, type | tuple[type, ...]] = {
    "version": int,
    "place": dict,  # of `Place`
    "data": (dict, type(None)),  # `GlobalShuffleSharder.state` of the next batch
    "variables": dict,  # {group: [name, dtype, shape] of each}
    "is_per_replica": list,  # of each variable, whether its array has one value a replica
    "facts": dict,  # layers, optimizer and loss with their settings
    "compiled_rate": (float, type(None)),  # what the rate was when the run began, if a number
    "callbacks": dict,  # {name: state}, with arrays as references
}


@dataclass(frozen=True)
class Place:
    """Where a run stands.

    Attributes:
        epoch, step: what is trained next, as `fit` counts.
        batches: trained since the very beginning, by all processes of the run.
        is_over: whether a callback has stopped the training.
    """

    epoch: int
    step: int
    batches: int
    is_over: bool = False


def checked_contents(
    contents: Mapping[str, Any], arrays: Sequence[npt.NDArray[Any]], where: str
) -> Place:
    """The place of a state that has all its parts.

    Raises:
        ConfigurationError: it is of another version.
        DataError: it is no state of a training run.
    """
    version = contents.get("version")
    if isinstance(version, int) and version != VERSION:
        raise ConfigurationError(
            f"{where} holds a state of version {version}, and this is version {VERSION}: resume "
            "with the tf_largebatch that saved it."
        )
    problem = _problem(contents, arrays)
    if problem is not None:
        raise DataError(f"{where} holds no state of a training run: {problem}.")
    return Place(**contents["place"])


def _problem(contents: Mapping[str, Any], arrays: Sequence[npt.NDArray[Any]]) -> str | None:
    if set(contents) != set(_KINDS):
        return f"it has {sorted(contents)}, not {sorted(_KINDS)}"
    for name, kind in _KINDS.items():
        if not isinstance(contents[name], kind):
            return f"its {name!r} is a {type(contents[name]).__name__}"
    if not _is_place(contents["place"]):
        return f"its place is {contents['place']}"
    groups = contents["variables"]
    if not set(groups) >= set(GROUPS):
        return f"its variables are those of {sorted(groups)}, without some of {list(GROUPS)}"
    for name, group in groups.items():
        if not isinstance(group, list) or not all(map(_is_description, group)):
            return f"its variables of {name!r} are {str(group)[:80]}"
    return _problem_of_arrays(
        [each for group in groups.values() for each in group], contents["is_per_replica"], arrays
    )


def _is_place(place: dict[str, Any]) -> bool:
    kinds = {"epoch": int, "step": int, "batches": int, "is_over": bool}
    return {name: type(value) for name, value in place.items()} == kinds and min(
        place["epoch"], place["step"], place["batches"]
    ) >= 0


def _is_description(described: Any) -> bool:
    return (
        isinstance(described, list)
        and list(map(type, described)) == [str, str, list]
        and all(type(size) is int for size in described[2])
    )


def _problem_of_arrays(
    described: list[Any], flags: list[Any], arrays: Sequence[npt.NDArray[Any]]
) -> str | None:
    if not len(described) == len(flags) <= len(arrays):
        return f"it has {len(described)} variables, {len(flags)} flags and {len(arrays)} arrays"
    for each, is_per_replica, array in zip(described, flags, arrays, strict=False):
        shape = list(array.shape)
        of_replicas = shape[:1] if is_per_replica is True else []
        expected = [array.dtype.name, shape[len(of_replicas) :]]
        is_flag = is_per_replica is False or (of_replicas and of_replicas[0] > 0)
        if not is_flag or each[1:] != expected:
            return f"its variable {each} has an array of {array.dtype.name}{shape}"
    return None
