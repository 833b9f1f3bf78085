"""Accurate large-minibatch distributed training for Keras 3 on TensorFlow.

    import tf_largebatch as tlb

Names are loaded on first use. `Recipe`, the scaling rules, `ClusterTopology` and the errors need
no TensorFlow, so that a tool which plans or launches a run starts at once; the others import it.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

from wrapt import when_imported

if TYPE_CHECKING:
    from tf_largebatch import (
        callbacks,
        data,
        losses,
        models,
        normalization,
        optimizers,
        schedules,
    )
    from tf_largebatch.core.errors import (
        ConfigurationError,
        DataError,
        LargeBatchError,
        MismatchError,
        PeerTimeoutError,
        ProgramOrderError,
        StateWriteError,
        TopologyError,
        UnsupportedVersionError,
    )
    from tf_largebatch.core.recipe import Recipe
    from tf_largebatch.core.scaling import linear_scaling_rule, sqrt_scaling_rule
    from tf_largebatch.core.topology import ClusterTopology
    from tf_largebatch.distribute import AllReduceOptions, LargeBatchStrategy

__version__ = "0.1.0"

__all__ = [
    "AllReduceOptions",
    "ClusterTopology",
    "ConfigurationError",
    "DataError",
    "LargeBatchError",
    "LargeBatchStrategy",
    "MismatchError",
    "PeerTimeoutError",
    "ProgramOrderError",
    "Recipe",
    "StateWriteError",
    "TopologyError",
    "UnsupportedVersionError",
    "callbacks",
    "data",
    "linear_scaling_rule",
    "losses",
    "models",
    "normalization",
    "optimizers",
    "schedules",
    "sqrt_scaling_rule",
]

_SUBPACKAGES = (
    "callbacks",
    "data",
    "losses",
    "models",
    "normalization",
    "optimizers",
    "schedules",
)
_HOMES = {
    **dict.fromkeys(
        (
            "ConfigurationError",
            "DataError",
            "LargeBatchError",
            "MismatchError",
            "PeerTimeoutError",
            "ProgramOrderError",
            "StateWriteError",
            "TopologyError",
            "UnsupportedVersionError",
        ),
        "tf_largebatch.core.errors",
    ),
    "AllReduceOptions": "tf_largebatch.distribute",
    "ClusterTopology": "tf_largebatch.core.topology",
    "LargeBatchStrategy": "tf_largebatch.distribute",
    "Recipe": "tf_largebatch.core.recipe",
    "linear_scaling_rule": "tf_largebatch.core.scaling",
    "sqrt_scaling_rule": "tf_largebatch.core.scaling",
}


def __getattr__(name: str) -> Any:
    """Loads a public name when it is first asked for (PEP 562)."""
    if name in _SUBPACKAGES:
        value = importlib.import_module(f"{__name__}.{name}")
    elif name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


@when_imported("keras")
def _register_saved_classes(_: ModuleType) -> None:
    """Makes the classes that `.keras` files may name known to Keras, as soon as there is Keras.

    `keras.models.load_model` finds only classes whose module has been imported, and imports none
    by itself.
    """
    for name in ("losses", "normalization", "optimizers", "schedules"):
        importlib.import_module(f"{__name__}.{name}")
