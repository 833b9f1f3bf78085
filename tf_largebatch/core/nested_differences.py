"""Where two nested configurations differ, leaf by leaf."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_LONGEST_SHOWN = 80


def nested_differences(first: Any, second: Any, path: str = "") -> Iterator[tuple[str, str, str]]:
    """(path, first's, second's) of each leaf that differs, as texts; of dicts, lists and plain
    values. A leaf that one side lacks is "none"; paths are as `.learning_rate.decay_steps[1]`.
    """
    if isinstance(first, dict) and isinstance(second, dict):
        for key in sorted({*first, *second}):
            yield from nested_differences(
                first.get(key, _ABSENT), second.get(key, _ABSENT), f"{path}.{key}"
            )
    elif isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        for place, (one, other) in enumerate(zip(first, second, strict=True)):
            yield from nested_differences(one, other, f"{path}[{place}]")
    # NaN is like itself here; True is not like 1.
    elif repr(first) != repr(second):
        yield path, _shown(first), _shown(second)


class _Absent:
    def __repr__(self) -> str:
        return "none"


_ABSENT = _Absent()


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 3]}..."
