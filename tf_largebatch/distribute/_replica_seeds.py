"""Random layers, such as dropout, draw other numbers on each replica.

Keras keeps the state of a layer's generator in a variable, which a strategy makes equal on all
replicas; so all would drop the same units of their different rows (transformers 31412, timm 1519).
Here replica r adds r times a constant to the seed: its own stream, the same in every run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

_NAME = "seed_generator_state"  # of Keras
# 2**32 over the golden ratio; odd, so that no two of 2**31 replicas have one seed.
_SEED_STEP = 0x9E3779B1
_SEEDS = 2**31


def is_seed_state(creation: Mapping[str, Any]) -> bool:
    """Whether a variable that is made with these arguments is the state of a generator."""
    return creation.get("name") == _NAME


def spread_seeds(variable: Any, *, first_replica: int) -> None:
    """Gives each of this worker's replicas, of which `first_replica` is the first, its own state.

    Args:
        variable: `[2]`, seed and count; equal on all replicas. Replica 0 keeps it.
    """
    for place, component in enumerate(getattr(variable, "values", (variable,))):
        replica = first_replica + place
        if replica:
            seed, count = component.numpy().tolist()
            value = [(seed + replica * _SEED_STEP) % _SEEDS, count]
            component.assign(tf.constant(value, component.dtype))
