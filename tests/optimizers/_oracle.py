"""Momentum SGD and LARS in NumPy, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


def lars_ratio(w: Any, g: Any, *, trust: float, decay: float, epsilon: float) -> float:
    """The papers' formula, and 1 where a norm is 0."""
    weight_norm, gradient_norm = (float(np.sqrt(np.sum(np.square(x)))) for x in (w, g))
    if weight_norm == 0.0 or gradient_norm == 0.0:
        return 1.0
    return trust * weight_norm / (gradient_norm + decay * weight_norm + epsilon)


def trained(
    starts: Sequence[npt.NDArray[Any]],
    gradients: Sequence[Sequence[npt.NDArray[Any]]],
    rates: Sequence[float],
    *,
    momentum: float = 0.9,
    nesterov: bool = False,
    decay: float = 0.0,
    trust: float | None = None,
    epsilon: float = 0.0,
    excluded: Sequence[int] = (),
) -> list[npt.NDArray[np.float64]]:
    """The variables after all updates.

    Args:
        starts: [variable].
        gradients: [update][variable].
        rates: [update].
        momentum, nesterov, decay: of the optimizer.
        trust, epsilon: of LARS; a trust of None is momentum SGD.
        excluded: positions of variables that are left out; those of one dimension are anyway.
    """
    weights = [start.astype(np.float64) for start in starts]
    buffers = [np.zeros_like(w) for w in weights]
    for gradients_now, rate in zip(gradients, rates, strict=True):
        for i, gradient in enumerate(gradients_now):
            w, g, treated = weights[i], gradient.astype(np.float64), i not in excluded
            step = g
            if treated and w.ndim > 1:
                step = g + decay * w
                if trust is not None:
                    step = step * lars_ratio(w, g, trust=trust, decay=decay, epsilon=epsilon)
            buffers[i] = momentum * buffers[i] + step
            move = step + momentum * buffers[i] if nesterov else buffers[i]
            weights[i] = w - rate * move
    return weights
