"""Formulas of batch norm's moving statistics: how long they remember, how parts become a whole."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.core.scaling import require_count

PAPER_MOMENTUM = 0.9  # Goyal et al. 2017
LARGEST_INITIAL_WEIGHT = 1e-3
_WINDOWS = 10  # of a moving average, that training should be long


def initial_weight(momentum: float, steps: int) -> float:
    """The share of its initial value that a moving average still holds: `momentum ** steps`.

    Batch norm's moving averages start at mean 0 and variance 1, which are nobody's statistics.

    Args:
        momentum: the share of the old average that stays at a step, in [0, 1].
        steps: how many batches the layer has seen.
    """
    return float(momentum) ** steps


def batch_norm_momentum_advice(steps: int) -> float:
    """The momentum of batch norm's moving averages for a training of `steps` steps.

        min(0.9, max(0, 1 - 10 / steps))

    An average with momentum m looks back over some `1 / (1 - m)` steps, its window. Two things
    must fit into training. The weights that the first value, mean 0 and variance 1, still has at
    the end, `m ** steps`, must vanish; and as weights change, old batches say nothing of them any
    more. With a window of a tenth of `steps`, m = 1 - 10 / steps, and `m ** steps` is at most
    `exp(-10)`, 5e-5. It is never longer than 10 steps, the paper's m = 0.9, which 100 steps or
    more allow; up to 10 steps, m = 0 keeps the last batch alone. Where the learning rate decays,
    the steps that count are those after the last decay (`Recipe.batch_norm_momentum`).

    Keras' default of 0.99 wants 1,000 steps; with few, evaluation stays at chance while training
    goes well (keras 7177, 3949).

    Args:
        steps: training steps (batches that a replica sees), 1 or more.

    Returns:
        The momentum, in [0, 0.9].

    Raises:
        ConfigurationError: `steps` is no integer of 1 or more.
    """
    return min(PAPER_MOMENTUM, max(0.0, 1.0 - _WINDOWS / require_count("steps", steps)))


def pooled_moments(
    means: npt.ArrayLike, variances: npt.ArrayLike, weights: npt.ArrayLike | None = None
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Mean and variance of all rows, from those of their parts.

        mean = sum_i w_i mean_i
        variance = sum_i w_i variance_i + sum_i w_i (mean_i - mean)^2

    with weights that sum to 1: the law of total variance. The second sum is what a mean of
    variances loses when the parts are shifted against each other.

    Args:
        means: `[parts, ...]`.
        variances: as `means`; biased ones, as batch norm's are (divided by the rows, not by one
            less).
        weights: `[parts]`, proportional to the rows of each part; None for parts of equal size.

    Returns:
        Mean and variance, each float64 of the shape of one part. The same numbers in the same
        order give the same bits in every process; parts that are equal come back as they are.

    Raises:
        ConfigurationError: there are no parts, or no part has any weight.
    """
    means, variances = np.asarray(means, np.float64), np.asarray(variances, np.float64)
    sizes = np.ones(len(means)) if weights is None else np.asarray(weights, np.float64)
    total = math.fsum(sizes.tolist())
    if not total > 0:
        raise ConfigurationError(
            f"weights={sizes.tolist()}: no part has any rows, so there is nothing to pool."
        )
    mean = _weighted_sum(means, sizes) / total
    variance = _weighted_sum(variances + np.square(means - mean), sizes) / total
    return mean, variance


def _weighted_sum(parts: npt.NDArray[np.float64], sizes: npt.NDArray[np.float64]) -> Any:
    """One part after the other: the order of `np.sum` may depend on the processor."""
    result = np.zeros(parts.shape[1:])
    for part, size in zip(parts, sizes, strict=True):
        if size:  # a part without rows has no mean, not even a number
            result = result + part * size
    return result
