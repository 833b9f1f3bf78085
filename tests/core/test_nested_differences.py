from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_largebatch.core.nested_differences import nested_differences

NAN = float("nan")
PLAIN = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5))
NESTED = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=12,
)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (1, 2, [("", "1", "2")]),
        ({"a": 1}, {"a": 1}, []),
        ({"b": 1, "a": 2}, {"a": 3, "b": 4}, [(".a", "2", "3"), (".b", "1", "4")]),
        ({"a": None}, {}, [(".a", "None", "none")]),
        ({}, {"a": 0}, [(".a", "none", "0")]),
        (
            {"rate": {"steps": [1, 2], "values": [0.1, 0.2]}},
            {"rate": {"steps": [1, 3], "values": [0.1, 0.2]}},
            [(".rate.steps[1]", "2", "3")],
        ),
        # Lists of other lengths are other as a whole: which entry is missing, nobody knows.
        ([1, 2], [1], [("", "[1, 2]", "[1]")]),
        ([{"a": [1]}], [{"a": [2]}], [("[0].a[0]", "1", "2")]),
        ({"a": {"b": 1}}, {"a": 1}, [(".a", "{'b': 1}", "1")]),
        ({"a": True}, {"a": 1}, [(".a", "True", "1")]),
        ({"a": 1}, {"a": 1.0}, [(".a", "1", "1.0")]),
        ({"a": NAN}, {"a": float("nan")}, []),
        ({"a": 0.0}, {"a": -0.0}, [(".a", "0.0", "-0.0")]),
    ],
)
def test_where_two_differ(first: Any, second: Any, expected: list[tuple[str, str, str]]) -> None:
    assert list(nested_differences(first, second)) == expected
    swapped = [(path, right, left) for path, left, right in expected]
    assert list(nested_differences(second, first)) == swapped


def test_long_values_are_cut() -> None:
    ((_, first, second),) = nested_differences("x" * 500, "y")
    assert first == "'" + "x" * 76 + "..." and len(first) == 80
    assert second == "'y'"


@given(NESTED)
def test_equal_to_its_copy(value: Any) -> None:
    assert list(nested_differences(value, copy.deepcopy(value))) == []


@given(NESTED, NESTED)
def test_nothing_differs_only_where_all_is_equal(first: Any, second: Any) -> None:
    assert bool(list(nested_differences(first, second))) == (_sorted(first) != _sorted(second))


def _sorted(value: Any) -> str:
    """Told apart by their types, whatever the order of keys."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key!r}:{_sorted(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_sorted, value)) + "]"
    return repr(value)
