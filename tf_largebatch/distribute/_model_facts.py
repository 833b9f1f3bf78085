"""What must be equal on all workers that train a model, as plain data that can be compared.

Workers that differ in it would run the same collectives, and train to something that nobody has
asked for: with two learning rates, for one. Names are left out, as Keras counts them up in each
process.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from typing import Any

import keras
import numpy as np

# Of layers' settings. What comes of seeds is in variables, which workers make equal.
_TOLD_OTHERWISE = ("dtype", "trainable", "seed")


def model_facts(model: keras.Model) -> dict[str, Any]:
    """Layers, variables, optimizer with its learning rate, loss, and how the model is run.

    A configuration that cannot be had, or cannot be written as JSON, is the name of its type.
    """
    return {
        "layers": {str(place): facts for place, facts in enumerate(_layers(model))},
        "variables": {
            str(place): f"{variable.dtype}{tuple(variable.shape)}"
            + (" trainable" if variable.trainable else "")
            for place, variable in enumerate(model.variables)
        },
        "optimizer": plain(getattr(model, "optimizer", None)),
        "loss": plain(getattr(model, "loss", None)),
        "metrics": [_metric(each) for each in model.metrics],
        "steps_per_execution": plain(getattr(model, "steps_per_execution", None)),
        "run_eagerly": plain(getattr(model, "run_eagerly", None)),
        "dtype_policy": model.dtype_policy.name,
    }


def _layers(model: keras.Model) -> Iterator[dict[str, Any]]:
    """Classes, dtype policies and settings of all layers within."""
    for layer in model._flatten_layers(include_self=False):
        # The configuration of a model within is that of its layers, which come by themselves.
        facts = {} if isinstance(layer, keras.Model) else plain(layer)
        if not isinstance(facts, dict):  # a user's layer without a configuration
            facts = {}
        yield {
            **_without(facts, _TOLD_OTHERWISE),
            "class": type(layer).__name__,
            "dtype_policy": layer.dtype_policy.name,
        }


def _without(facts: Any, names: Container[str]) -> Any:
    if not isinstance(facts, dict):
        return facts
    return {key: _without(each, names) for key, each in facts.items() if key not in names}


def _metric(metric: keras.metrics.Metric) -> str:
    """Class and name, without what Keras has counted up."""
    return f"{type(metric).__name__} {re.sub(r'_[0-9]+$', '', metric.name)}"


def plain(value: Any) -> Any:
    """`value` as numbers, texts, lists and mappings by text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return _plain_mapping(value)
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if hasattr(value, "get_config") and not isinstance(value, type):
        return _configured(value)
    return _name_of(value)


def _plain_mapping(mapping: Mapping[Any, Any]) -> dict[str, Any]:
    if {"class_name", "config"} <= set(mapping):  # as Keras serialises an object
        return _described(mapping["class_name"], mapping["config"])
    return {str(name): plain(each) for name, each in mapping.items()}


def _configured(value: Any) -> Any:
    name = type(value).__name__
    # Of some of Keras' losses, as Huber, the configuration lacks the arguments.
    arguments = getattr(value, "_fn_kwargs", {})
    try:
        return _described(name, {**arguments, **value.get_config()})
    except Exception:  # whatever a user's get_config raises
        return name


def _described(class_name: str, config: Any) -> dict[str, Any]:
    if not isinstance(config, Mapping):
        return {"class": class_name, "config": plain(config)}
    rest = {name: each for name, each in config.items() if name != "name"}
    return {"class": class_name, **_plain_mapping(rest)}


def _name_of(value: Any) -> str:
    """A function's name, or that of a value's type."""
    name = getattr(value, "__name__", None)
    return name if isinstance(name, str) else type(value).__name__
