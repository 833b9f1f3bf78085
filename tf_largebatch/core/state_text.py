"""Plain values to JSON and back, each as it was: nothing is rounded, converted or executed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from tf_largebatch.core.errors import ConfigurationError

# JSON has no numbers for these.
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_FLOAT = "__float__"
# Far below where json gives up, so that what was written can be read from anywhere.
_DEEPEST = 100


def to_text(contents: Mapping[str, Any]) -> str:
    """One line of JSON, from which `from_text` makes the same again, key for key.

    Values may be None, bool, int, float (also infinite, or not a number), str, and lists and
    dicts of such, of these very types: a NumPy number or a tuple would come back as another type.
    The keys of dicts are text; `__float__` is reserved.

    Raises:
        ConfigurationError: there is something else in it, with the place of it.
    """
    if not isinstance(contents, Mapping):
        raise ConfigurationError(
            f"contents must be a mapping of names to values, but is {_shown(contents)}."
        )
    encoded = _encoded(dict(contents), "contents", 0)
    try:
        return json.dumps(encoded, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError as error:  # an integer of more than 4,300 digits
        raise ConfigurationError(f"contents cannot be stored: {error}.") from error


def from_text(text: str) -> Any:
    """What `to_text` was given.

    Raises:
        ValueError: the text is nothing that `to_text` could have made.
    """
    try:
        return json.loads(text, object_hook=_decoded, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _encoded(value: Any, place: str, depth: int) -> Any:
    if depth > _DEEPEST:
        raise ConfigurationError(
            f"{place[:200]}... is nested more than {_DEEPEST} deep; contents must be flatter."
        )
    kind = type(value)
    if kind is dict:
        for key in value:
            if type(key) is not str or key == _FLOAT:
                raise ConfigurationError(
                    f"{place} has the key {_shown(key)}; keys must be str, and other than "
                    f"{_FLOAT!r}."
                )
            _check_text(key, f"a key of {place}")
        return {key: _encoded(of, f"{place}[{key!r}]", depth + 1) for key, of in value.items()}
    if kind is list:
        return [_encoded(of, f"{place}[{index}]", depth + 1) for index, of in enumerate(value)]
    if kind is float:
        return value if math.isfinite(value) else {_FLOAT: repr(value)}
    if kind is str:
        _check_text(value, place)
        return value
    if value is None or kind is bool or kind is int:
        return value
    raise ConfigurationError(
        f"{place} is {_shown(value)}; it must be None, bool, int, float, str, list or dict. "
        "Convert it, as by int(), float() or list(), or give it as an array."
    )


def _check_text(text: str, place: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigurationError(
            f"{place} is {_shown(text)}, which is no valid Unicode: {error.reason}."
        ) from error


def _decoded(read: dict[str, Any]) -> Any:
    if _FLOAT not in read:
        return read
    name = read[_FLOAT]
    if len(read) > 1 or not isinstance(name, str) or name not in _FLOATS:
        raise ValueError(f"it has a {_FLOAT!r} that is none")
    return _FLOATS[name]


def _refuse_constant(name: str) -> None:
    raise ValueError(f"it has the constant {name}, which is no JSON")


def _shown(value: Any) -> str:
    text = repr(value)
    shown = text if len(text) <= 80 else f"{text[:77]}..."
    return f"{shown} of type {type(value).__name__}"
