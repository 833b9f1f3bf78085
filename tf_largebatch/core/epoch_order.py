"""Which places of an epoch's order are read in which step, by which shard: pure NumPy.

Everything here is a function of its arguments alone, so any worker, at any time, can compute the
rows of any step of any epoch: nothing is consumed, nothing has to be replayed. Which row lies at
a place is `EpochPermutation`'s part.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from tf_largebatch.core.errors import ConfigurationError

Remainder = Literal["drop", "wrap"]
RowNumbers = npt.NDArray[np.int64]


def checked_integer(value: object, name: str, *, minimum: int, maximum: int | None = None) -> int:
    """`value` as an `int`; `ConfigurationError` unless it is a whole number inside the range.

    `bool` and `float` are refused, even where they hold a whole number: they are nearly always
    the wrong argument. NumPy integers are accepted.
    """
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise ConfigurationError(
            f"{name} must be an integer, but is {value!r} of type {type(value).__name__}."
        )
    number = int(value)
    if number < minimum or (maximum is not None and number > maximum):
        limits = f"at least {minimum}" if maximum is None else f"in [{minimum}, {maximum}]"
        nearest = minimum if number < minimum else maximum
        raise ConfigurationError(
            f"{name} must be {limits}, but is {number}; the nearest is {nearest}."
        )
    return number


def steps_in_epoch(
    num_rows: int,
    *,
    global_batch_size: int,
    accumulation_steps: int = 1,
    remainder: Remainder = "drop",
) -> int:
    """Steps of an epoch, the same on every worker: whole updates, of `accumulation_steps` each.

    With `A = global_batch_size * accumulation_steps`, the rows of an update, there are
    `num_rows // A` updates with `"drop"`; the `num_rows % A` rows at the end of the epoch's order
    are left out, and as the order changes, so do they. With `"wrap"` there are
    `ceil(num_rows / A)`; see `EpochRows`.

    Raises:
        ConfigurationError: a count below 1, an unknown `remainder`, or no whole update in an epoch.
    """
    num_rows = checked_integer(num_rows, "num_rows", minimum=1)
    batch = checked_integer(global_batch_size, "global_batch_size", minimum=1)
    accumulated = checked_integer(accumulation_steps, "accumulation_steps", minimum=1)
    if remainder not in get_args(Remainder):
        raise ConfigurationError(f"remainder must be 'drop' or 'wrap', but is {remainder!r}.")
    if remainder == "wrap":
        return -(-num_rows // (batch * accumulated)) * accumulated
    if batch > num_rows:
        raise ConfigurationError(
            f"global_batch_size={batch} is larger than the {num_rows} rows, and remainder='drop' "
            f"leaves no step in an epoch; use at most {num_rows}, or remainder='wrap'."
        )
    if batch * accumulated > num_rows:
        raise ConfigurationError(
            f"accumulation_steps={accumulated} batches of {batch} rows are more than the "
            f"{num_rows} rows, and remainder='drop' leaves no update in an epoch; accumulate at "
            f"most {num_rows // batch}, or use remainder='wrap'."
        )
    return num_rows // (batch * accumulated) * accumulated


def shard_part(global_batch_size: int, *, shard_index: int, shard_count: int) -> slice:
    """The contiguous part of each step that a shard owns: `[i * B // k : (i + 1) * B // k]`.

    Raises:
        ConfigurationError: `shard_count` does not divide the batch (with the nearest sizes that
            it divides), or `shard_index` is not below `shard_count`.
    """
    batch = checked_integer(global_batch_size, "global_batch_size", minimum=1)
    count = checked_integer(shard_count, "shard_count", minimum=1)
    index = checked_integer(shard_index, "shard_index", minimum=0, maximum=count - 1)
    check_divides(batch, parts=count, parts_name="shards")
    return slice(index * batch // count, (index + 1) * batch // count)


def check_divides(global_batch_size: int, *, parts: int, parts_name: str) -> None:
    """Refuses a global batch that cannot be cut into `parts` equal parts.

    Raises:
        ConfigurationError: names the nearest global batch sizes that can.
    """
    if global_batch_size % parts:
        below = global_batch_size // parts * parts
        nearest: Iterable[int] = filter(None, (below, below + parts))
        raise ConfigurationError(
            f"global_batch_size={global_batch_size} cannot be divided equally among {parts} "
            f"{parts_name}; the nearest that can: {' and '.join(map(str, nearest))}."
        )
