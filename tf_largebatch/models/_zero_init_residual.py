"""Gamma of the last batch norm of each residual branch set to zero, in any model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.models._residual_branches import last_norms_of_branches

_INSTEAD = (
    "Name them: zero_init_residual(model, layers=[block.last_norm for block in model.blocks]), "
    "the last batch norm of each residual branch and no shortcut's."
)


def zero_init_residual(
    model: keras.Model,
    *,
    layers: Sequence[keras.layers.Layer] | keras.layers.Layer | None = None,
) -> list[Any]:
    """Sets gamma to zero in the last batch norm of each residual branch of a new model.

    Each block then starts as its shortcut, and the signal passes by the shortcuts alone at first,
    which eases the start of training at high rates (Goyal et al. 2017, section 5.1). Gammas of
    shortcuts stay at one: a block that starts as zero passes nothing on (tensorpack 420).
    `tf_largebatch.models` are made like this already.

    In a functional model, or a sequential one, with all functional models nested in it, every sum
    (`keras.layers.Add`, `keras.ops.add` or `+`) of paths that part from one another before it is a
    residual block. The path with the fewest kernels is the shortcut, an identity or a projection.
    Each other path that ends in a batch norm, or in one followed by dropout, stochastic depth or a
    gate that multiplies it, has that one set. Paths that end in something else, as in
    pre-activation networks, are left alone.

    A subclassed model, or layers that hold batch norms within, have no graph to look at, and need
    `layers`.

    Args:
        model: built, and not trained yet; call this before `fit`, within the strategy's scope or
            not.
        layers: the batch norms to set, or the one, instead of looking for them.

    Returns:
        The batch norms whose gamma is zero now, in the order of the model.

    Raises:
        ConfigurationError: the model is not built or its graph does not tell which are meant (the
            message names where); a layer has no gamma, is not in the model, or does not hold its
            initial values (gamma all ones, or already all zeros; beta and moving mean zeros, moving
            variance ones): loaded and trained weights are never touched. Then nothing is changed.
    """
    if not model.built:
        raise ConfigurationError(
            f"Model {model.name} is not built, so it has no gammas yet. Call it on a batch first."
        )
    if layers is None:
        chosen = last_norms_of_branches(model, instead=_INSTEAD)
    else:
        chosen = [layers] if isinstance(layers, keras.layers.Layer) else list(layers)
    if not chosen:
        raise ConfigurationError(
            f"Model {model.name} has no residual branch that ends in a batch norm; pre-activation "
            f"networks have none. {_INSTEAD}"
        )
    inside = {id(layer) for layer in model._flatten_layers()}
    for layer in chosen:
        _check(layer, model, is_inside=id(layer) in inside)
    optimizer = getattr(model, "optimizer", None)
    updates = 0 if optimizer is None else int(optimizer.iterations.numpy())
    if updates > 0:
        raise ConfigurationError(
            f"Model {model.name} has been trained, by {updates} updates; gammas are set to zero at "
            "the start only."
        )
    for layer in chosen:
        layer.gamma.assign(np.zeros(layer.gamma.shape))
    return chosen


def _check(layer: Any, model: keras.Model, *, is_inside: bool) -> None:
    name = getattr(layer, "name", repr(layer))
    if not is_inside:
        raise ConfigurationError(f"{name} is not a layer of model {model.name}. {_INSTEAD}")
    if not isinstance(layer, keras.layers.BatchNormalization):
        raise ConfigurationError(
            f"{name} is a {type(layer).__name__}, not a BatchNormalization. {_INSTEAD}"
        )
    if layer.gamma is None:
        raise ConfigurationError(
            f"{name} has no gamma (scale=False), which is what starts at zero. Use scale=True in "
            "the last batch norm of a residual branch."
        )
    gamma = keras.ops.convert_to_numpy(layer.gamma)
    initial = [(layer.beta, 0.0), (layer.moving_mean, 0.0), (layer.moving_variance, 1.0)]
    if not (np.all(gamma == 1.0) or np.all(gamma == 0.0)) or any(
        weight is not None and np.any(keras.ops.convert_to_numpy(weight) != value)
        for weight, value in initial
    ):
        raise ConfigurationError(
            f"{name} does not hold its initial values, so it has loaded or trained weights, which "
            "setting gamma to zero would destroy. Set gammas before loading weights (which then "
            "replace them), or build the model with weights=None."
        )
