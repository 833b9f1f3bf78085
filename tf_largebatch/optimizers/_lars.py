"""LARS: momentum SGD whose rate is adapted to each layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_largebatch.optimizers._momentum_optimizer import MomentumOptimizer, check_range
from tf_largebatch.optimizers._norms import joint_norms


@keras.saving.register_keras_serializable(package="tf_largebatch")
class LARS(MomentumOptimizer):
    """Layer-wise adaptive rate scaling (You et al. 2017, arXiv 1708.03888), for very large batches.

    At each update, for gradient `g` of the global batch, weights `w`, buffer `v` (zeros at first)
    and rate `lr`, with Euclidean norms over all elements of a variable:

        ratio = trust_coefficient * |w| / (|g| + weight_decay * |w| + epsilon)
        step = ratio * (g + weight_decay * w)
        v = momentum * v + step
        w = w - lr * v                  or, with nesterov, w - lr * (step + momentum * v)

    Where `|w|` or `|g|` is 0 the ratio is 1: with 0, weights that start as zeros would stay so. Its
    greatest value is that of float32. Norms neither overflow nor vanish, whatever the
    weights, and take one pass over weights and gradients.

    You et al. have the rate in the buffer, `v = momentum * v + lr * step; w = w - v`. At a constant
    rate that is the same; after a change, as in each step of a warmup, here the new rate acts at
    once on all of the buffer (Goyal et al. 2017, section 3, momentum correction).

    Variables of one dimension or none, which are biases and those of batch norm, have neither
    ratio nor decay: they are trained by momentum SGD with the global rate (Yamazaki et al. 2019).
    `exclude` leaves out others, as embeddings, and `exclusion_report` shows which.

    Clipping, accumulation, loss scaling and sparse gradients are as in `MomentumSGD`: the norms are
    those of the gradient after all of them, summed over the replicas.

    Args:
        learning_rate: A float, or a schedule over updates; 1 to 30 is usual, as the ratio is small.
        momentum: In [0, 1); with 0 there is no buffer.
        weight_decay: As in `MomentumSGD`, 0 or more. It is kept as `l2_weight_decay`.
        trust_coefficient: Above 0; how far a step of rate 1 may go, as a part of `|w|`.
        nesterov: Whether to look ahead; needs a momentum above 0.
        epsilon: Added to the divisor, 0 or more; 0 is the papers'.
        **keras_options: As in `MomentumSGD`.

    Raises:
        ConfigurationError: As `MomentumSGD`.
    """

    def __init__(
        self,
        learning_rate: Any,
        *,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        trust_coefficient: float = 0.001,
        nesterov: bool = False,
        epsilon: float = 0.0,
        **keras_options: Any,
    ) -> None:
        check_range(trust_coefficient, "trust_coefficient", "0.001 is usual", zero_is_allowed=False)
        check_range(epsilon, "epsilon", "0.0 is the papers'")
        super().__init__(
            learning_rate,
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
            **keras_options,
        )
        self.trust_coefficient = float(trust_coefficient)
        self.epsilon = float(epsilon)

    def step_scales(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The ratio of each variable; None where it is excluded."""
        adapted = [i for i, variable in enumerate(variables) if not self.is_excluded(variable)]
        if not adapted:
            return [None for _ in variables]
        tensors = [tf.convert_to_tensor(variables[i]) for i in adapted]
        tensors += [gradients[i] for i in adapted]
        weight_norms, gradient_norms = tf.split(joint_norms(tensors), 2)  # [adapted] each
        ratios = iter(tf.unstack(self._ratios(weight_norms, gradient_norms)))
        return [None if self.is_excluded(variable) else next(ratios) for variable in variables]

    def _ratios(self, weight_norms: tf.Tensor, gradient_norms: tf.Tensor) -> tf.Tensor:
        divisor = gradient_norms + self.l2_weight_decay * weight_norms + self.epsilon
        both = (weight_norms > 0) & (gradient_norms > 0)
        ratios = self.trust_coefficient * weight_norms / tf.where(both, divisor, 1)
        return tf.where(both, tf.minimum(ratios, tf.float32.max), 1)

    def _treatment(self) -> str:
        return "adapted and decayed" if self.l2_weight_decay else "adapted"

    def get_config(self) -> dict[str, Any]:
        """Arguments that make an equal optimizer, and what is excluded."""
        return {
            **super().get_config(),
            "trust_coefficient": self.trust_coefficient,
            "epsilon": self.epsilon,
        }
