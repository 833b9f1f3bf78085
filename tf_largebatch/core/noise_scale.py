"""The gradient noise scale: how large a minibatch still pays (McCandlish et al. 2018)."""

from __future__ import annotations

import math
from typing import NamedTuple


class GradientMoments(NamedTuple):
    """`|G|^2` of the true gradient and `tr(S)`, the variance of one example's, over all weights."""

    squared_norm: float
    variance: float


def gradient_moments(
    *, small_square: float, large_square: float, small_batch_size: int, large_batch_size: int
) -> GradientMoments:
    """Unbiased estimates from the squared norms of mean gradients over two sizes of batch.

    The squared norm of a mean over B examples is `|G|^2 + tr(S) / B` on average, so with b < B

        |G|^2 = (B * |G_B|^2 - b * |G_b|^2) / (B - b)
        tr(S) = (|G_b|^2 - |G_B|^2) / (1 / b - 1 / B)

    (arXiv 1812.06162, appendix A.1). Either may come out below zero by chance.

    Args:
        small_square: `|G_b|^2`, a mean over batches of `small_batch_size`.
        large_square: `|G_B|^2`.
        small_batch_size: b.
        large_batch_size: B, above b.
    """
    small, large = small_batch_size, large_batch_size
    squared_norm = (large * large_square - small * small_square) / (large - small)
    variance = (small_square - large_square) / (1 / small - 1 / large)
    return GradientMoments(squared_norm, variance)


def noise_scale(moments: GradientMoments) -> float:
    """`tr(S) / |G|^2`, in examples.

    0 where no noise was seen; infinite where no gradient stands out from the noise; not a number
    where gradients were not finite.
    """
    if not all(map(math.isfinite, moments)):
        return math.nan
    if moments.variance <= 0:
        return 0.0
    return moments.variance / moments.squared_norm if moments.squared_norm > 0 else math.inf


def example_efficiency(batch_size: int, noise_scale: float) -> float:
    """The share of a batch's examples that is not wasted: `1 / (1 + B / noise scale)`.

    To come as far, steps of B examples take `1 + noise scale / B` times the fewest possible steps,
    and `1 + B / noise scale` times the fewest possible examples (section 2.2 there): at B = noise
    scale twice either, at a tenth of it 1.1 times the examples.
    """
    return 1.0 if math.isinf(noise_scale) else noise_scale / (noise_scale + batch_size)


def gain_of_doubling(batch_size: int, noise_scale: float) -> float:
    """How many times as far a step comes with twice the examples: from 2 down to 1."""
    if math.isinf(noise_scale):
        return 2.0
    return 2 * (batch_size + noise_scale) / (2 * batch_size + noise_scale)
