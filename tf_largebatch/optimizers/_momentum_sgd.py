"""SGD with the learning rate outside the momentum buffer, and weight decay as L2."""

from __future__ import annotations

from typing import Any

import keras

from tf_largebatch.optimizers._momentum_optimizer import MomentumOptimizer


@keras.saving.register_keras_serializable(package="tf_largebatch")
class MomentumSGD(MomentumOptimizer):
    """Momentum SGD that needs no momentum correction when the learning rate changes.

    At each update, for gradient `g`, weights `w`, buffer `v` (zeros at first) and rate `lr`:

        g = g + weight_decay * w        (only where w has two or more dimensions)
        v = momentum * v + g
        w = w - lr * v                  or, with nesterov, w - lr * (g + momentum * v)

    `keras.optimizers.SGD` keeps `lr * g` in its buffer, so after a change of rate the old one goes
    on acting for some `1 / (1 - momentum)` steps (Goyal et al. 2017, section 3, momentum
    correction). At a constant rate the two are the same.

    The decay is L2, part of the gradient, as in the paper (section 3, weight decay); Keras' own
    `weight_decay` subtracts `lr * weight_decay * w` from the weights beside the momentum.
    Variables of one dimension or none (biases, gamma and beta of batch norm) are not decayed
    (section 5.1); `exclude` leaves out others, `exclusion_report` shows which.

    Gradients are clipped after they are summed over the replicas (and averaged over accumulated
    batches), so that k replicas make the update of one with the same global batch; Keras' own
    optimizers clip each replica's. Decay follows clipping, and with `gradient_accumulation_steps`
    comes once an update. Sparse gradients, as of an embedding, are made dense: a row that was not
    looked up still decays and moves by its momentum, as it would with a dense gradient.

    Args:
        learning_rate: A float, or a schedule over updates.
        momentum: In [0, 1); with 0 there is no buffer.
        nesterov: Whether to look ahead; needs a momentum above 0.
        weight_decay: `lambda` of `lambda / 2 * sum(w ** 2)`, 0 or more; the paper's is 1e-4. It is
            kept as `l2_weight_decay`; the inherited attribute `weight_decay` stays None.
        **keras_options: `clipnorm`, `clipvalue`, `global_clipnorm`, `use_ema`, `ema_momentum`,
            `ema_overwrite_frequency`, `loss_scale_factor`, `gradient_accumulation_steps` and `name`
            of `keras.optimizers.Optimizer`.

    Raises:
        ConfigurationError: for a value out of range; when built, if a variable that is decayed here
            carries an L2 regulariser as well, or what was excluded is not there.
    """

    def __init__(
        self,
        learning_rate: Any,
        *,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        **keras_options: Any,
    ) -> None:
        super().__init__(
            learning_rate,
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
            **keras_options,
        )
