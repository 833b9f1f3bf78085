"""Checks of what a caller asks a model to be."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import keras

from tf_largebatch.core.errors import ConfigurationError


def whole_number(value: Any, name: str, at_least: int | None = None) -> int:
    """`value` as an `int`; NumPy integers pass, floats and booleans do not."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise ConfigurationError(
            f"{name}={value!r} is a {type(value).__name__}; {name} must be a whole number"
            f"{'' if at_least is None else f' of {at_least} or more'}, as an int."
        )
    if at_least is not None and number < at_least:
        raise ConfigurationError(
            f"{name}={number} is too small; the smallest that works is {at_least}."
        )
    return number


def number_in_range(
    value: Any, name: str, low: float, high: float, *, low_is_allowed: bool, hint: str
) -> float:
    """`value` as a `float` between `low` and `high`; `high` itself is never allowed."""
    try:
        number = math.nan if isinstance(value, bool | str) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if (low <= number if low_is_allowed else low < number) and number < high:
        return number
    interval = f"{'[' if low_is_allowed else '('}{low:g}, {high:g})"
    raise ConfigurationError(f"{name}={value!r} is not a number in {interval}; {hint}.")


def image_shape(shape: Any, smallest_side: int, advice: str) -> tuple[int | None, int | None, int]:
    """`(height, width, channels)` after checks; height and width may be `None` (any size)."""
    rule = "input_shape must be (height, width, channels), as (224, 224, 3), without the batch"
    if isinstance(shape, str) or not isinstance(shape, Sequence) or len(shape) != 3:
        raise ConfigurationError(f"input_shape={shape!r} does not fit; {rule}.")
    height, width = (
        None if side is None else whole_number(side, f"input_shape {axis}", 1)
        for axis, side in zip(("height", "width"), shape[:2], strict=True)
    )
    if shape[2] is None:
        raise ConfigurationError(
            f"input_shape={tuple(shape)} leaves the channels open; the first convolution's weights "
            "need their number: 3 for colour, 1 for grey."
        )
    channels = whole_number(shape[2], "input_shape channels", 1)
    if min(side for side in (height, width, smallest_side) if side is not None) < smallest_side:
        raise ConfigurationError(
            f"input_shape={tuple(shape)} is too small; both sides must be {smallest_side} or more: "
            f"{advice}."
        )
    return height, width, channels


def require_channels_last() -> None:
    """Refuse `channels_first`, which TensorFlow cannot train on a CPU."""
    if keras.config.image_data_format() != "channels_last":
        raise ConfigurationError(
            "keras.config.image_data_format() is 'channels_first'; these models take (height, "
            "width, channels). Call keras.config.set_image_data_format('channels_last') first; on "
            "a GPU TensorFlow itself chooses the layout in which its kernels run."
        )
