"""Plain values to JSON and back, and what is refused on either way."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.core.state_text import from_text, to_text

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda of: st.lists(of, max_size=4) | st.dictionaries(TEXTS, of, max_size=4),
    max_leaves=12,
)
CONTENTS = st.dictionaries(TEXTS, VALUES, max_size=5)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(CONTENTS)
def test_values_come_back_with_type_sign_and_order(contents: dict[str, Any]) -> None:
    text = to_text(contents)
    assert "\n" not in text
    # repr tells 1 from True and 1.0, 0.0 from -0.0, and shows that not a number is one.
    assert repr(from_text(text)) == repr(contents)


def test_json_is_strict() -> None:
    text = to_text({"nan": math.nan, "inf": [-math.inf], "large": 2**80 + 1, "umlaut": "ü"})

    def refuse(name: str) -> None:
        raise AssertionError(name)

    assert json.loads(text, parse_constant=refuse) == {
        "nan": {"__float__": "nan"},
        "inf": [{"__float__": "-inf"}],
        "large": 1208925819614629174706177,
        "umlaut": "ü",
    }


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def circular() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ([1], r"mapping of names to values, but is \[1\] of type list"),
        ({"a": (1, 2)}, r"contents\['a'\] is \(1, 2\) of type tuple; .*list\(\)"),
        ({"a": [0, np.float64(1)]}, r"contents\['a'\]\[1\] is .* of type float64"),
        ({"a": {"b": np.int64(1)}}, r"contents\['a'\]\['b'\] is .* of type int64"),
        ({"a": b"x"}, "of type bytes"),
        ({"a": {1}}, "of type set"),
        ({"a": object}, "of type type"),
        ({1: 2}, "contents has the key 1 of type int; keys must be str"),
        ({"a": {"__float__": "nan"}}, r"contents\['a'\] has the key '__float__'"),
        ({"a": "\ud800"}, r"contents\['a'\] is '\\ud800' .*no valid Unicode"),
        ({"\udfff": 1}, "a key of contents is .*no valid Unicode"),
        ({"a": nested(101)}, "nested more than 100 deep"),
        ({"a": circular()}, "nested more than 100 deep"),
        ({"a": 10**5000}, "contents cannot be stored: Exceeds the limit"),
    ],
)
def test_other_contents_are_refused_with_their_place(contents: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        to_text(contents)


def test_nesting_below_the_limit_comes_back() -> None:
    assert from_text(to_text({"a": nested(99)})) == {"a": nested(99)}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "NaN",
        '{"a": -Infinity}',
        '{"__float__": "1.5"}',
        '{"__float__": []}',
        '{"__float__": "nan", "b": 1}',
        "[" * 100_000,
        '{"a":' * 100_000,
        "1" * 5000,
    ],
)
def test_other_texts_are_value_errors(text: str) -> None:
    with pytest.raises(ValueError):
        from_text(text)
