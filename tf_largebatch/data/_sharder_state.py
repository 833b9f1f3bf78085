"""What the saved position of a sharder belongs to, and the check that it still does."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tf_largebatch.core.epoch_order import checked_integer
from tf_largebatch.core.epoch_rows import EpochRows
from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.data._sources import RandomAccessSource

# To be raised whenever the same settings come to mean another order of rows.
_VERSION = 1


def state_of(source: RandomAccessSource, epoch_rows: EpochRows) -> dict[str, Any]:
    """What a position belongs to, for JSON."""
    return {
        "version": _VERSION,
        "num_rows": epoch_rows.num_rows,
        "source_fingerprint": source_fingerprint(source),
        "seed": epoch_rows.seed,
        "global_batch_size": epoch_rows.global_batch_size,
        "remainder": epoch_rows.remainder,
    }


def position_in(
    state: Mapping[str, Any], identity: Mapping[str, Any], *, steps_per_epoch: int
) -> tuple[int, int]:
    """`(epoch, step)` of a state, once it is seen to belong to `identity` (of `state_of`).

    Raises:
        ConfigurationError: it does not, or it is no state.
    """
    names = {"epoch", "step", *identity}
    if not isinstance(state, Mapping) or set(state) != names:
        given = sorted(state) if isinstance(state, Mapping) else type(state).__name__
        raise ConfigurationError(
            f"state must be what GlobalShuffleSharder.state() returned, with {sorted(names)}, but "
            f"is given as {given}."
        )
    different = [name for name in identity if state[name] != identity[name]]
    if different:
        sides = "\n".join(f"  {name}: {state[name]!r}, {identity[name]!r}" for name in different)
        raise ConfigurationError(
            "The state belongs to another sharder. In the state, and here:\n"
            f"{sides}\nMake the sharder with the source and settings that the state was saved with."
        )
    epoch = checked_integer(state["epoch"], "the epoch of the state", minimum=0)
    step = checked_integer(
        state["step"], "the step of the state", minimum=0, maximum=steps_per_epoch - 1
    )
    return epoch, step


def source_fingerprint(source: RandomAccessSource) -> str:
    """A hash of the kind of rows and, where the source offers `fingerprint`, of what they are."""
    kinds = [
        [spec.dtype.name, spec.shape.as_list()] for spec in tf.nest.flatten(source.element_spec)
    ]
    described = json.dumps([kinds, getattr(source, "fingerprint", None)])
    return hashlib.sha256(described.encode()).hexdigest()[:16]
