"""Contents of a state whose file is whole, and which yet may be anything."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_largebatch.callbacks._state_contents import Place, checked_contents
from tf_largebatch.core.errors import ConfigurationError, DataError

ARRAYS = [np.zeros((2, 3), np.float32), np.ones((4, 5), np.int64), np.zeros(7)]
CONTENTS: dict[str, Any] = {
    "version": 1,
    "place": {"epoch": 2, "step": 3, "batches": 45, "is_over": False},
    "data": None,
    "variables": {
        "model": [["kernel", "float32", [2, 3]]],
        "optimizer": [["count", "int64", [5]]],  # one of each of four replicas
        "metrics": [],
    },
    "is_per_replica": [False, True],
    "facts": {"loss": "mse"},
    "compiled_rate": 0.1,
    "callbacks": {"History 0": {"epoch": [0, 1]}},
}
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Of everything within."""
    children = value.items() if isinstance(value, dict) else ()
    children = enumerate(value) if isinstance(value, list) else children
    return [path, *(each for key, child in children for each in paths(child, (*path, key)))]


def test_whole_contents_give_the_place() -> None:
    assert checked_contents(CONTENTS, ARRAYS, "here") == Place(2, 3, 45)


def test_another_version_is_named() -> None:
    with pytest.raises(ConfigurationError, match="version 2, and this is version 1"):
        checked_contents({**CONTENTS, "version": 2}, ARRAYS, "here")


@pytest.mark.parametrize("name", list(CONTENTS))
def test_a_part_that_is_missing_is_found(name: str) -> None:
    rest = {key: value for key, value in CONTENTS.items() if key != name}
    with pytest.raises(DataError, match="here holds no state of a training run: it has"):
        checked_contents(rest, ARRAYS, "here")


@pytest.mark.parametrize(
    "arrays",
    [
        ARRAYS[:1],
        [np.zeros((3, 2), np.float32), ARRAYS[1]],
        [ARRAYS[0].astype(np.float64), ARRAYS[1]],
        [ARRAYS[0], np.ones(5, np.int64)],
        [ARRAYS[0], np.ones((0, 5), np.int64)],
    ],
)
def test_arrays_of_another_kind_are_found(arrays: list[Any]) -> None:
    with pytest.raises(DataError, match="no state of a training run: it"):
        checked_contents(CONTENTS, arrays, "here")


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.data())
def test_anything_else_is_refused_or_of_no_consequence(data: st.DataObject) -> None:
    contents = copy.deepcopy(CONTENTS)
    path = data.draw(st.sampled_from(paths(contents)[1:]))
    holder = contents
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = data.draw(PLAIN)
    try:
        place = checked_contents(contents, ARRAYS, "here")
    except (ConfigurationError, DataError):
        return
    assert min(place.epoch, place.step, place.batches) >= 0
    if contents != CONTENTS:  # what may be anything, or only names it
        assert path[0] in ("place", "data", "facts", "compiled_rate", "callbacks") or path[-1] == 0
