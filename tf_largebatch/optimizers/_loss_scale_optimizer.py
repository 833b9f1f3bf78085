"""Loss scaling for float16 training whose replicas decide together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf


def innermost(optimizer: Any) -> Any:
    """The optimizer that holds rate and momentum: within a `LossScaleOptimizer`, the inner one."""
    return getattr(optimizer, "inner_optimizer", optimizer)


@keras.saving.register_keras_serializable(package="tf_largebatch")
class LossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
    """Keras' `LossScaleOptimizer`, with one decision for all replicas.

    The loss is multiplied by a scale `s`, the gradients divided by it. When any gradient of any
    replica is not finite, all replicas skip the update and halve `s`; after
    `dynamic_growth_steps` finite updates all double it. Keras' own class decides on each replica
    alone, so that replicas would part ways, or wait for one another for ever (keras 21366).

    Costs one all-reduce of a scalar a step. Compile the model with it: Keras adds no second one.

    Args and errors: as `keras.optimizers.LossScaleOptimizer`.
    """

    def check_finite(self, grads: Sequence[Any]) -> Any:
        """Whether all gradients on all replicas are finite; bool scalar."""
        finite = super().check_finite(grads)
        context = tf.distribute.get_replica_context()
        if context is None or context.num_replicas_in_sync == 1:
            return finite
        replicas_finite = context.all_reduce("SUM", tf.cast(finite, tf.float32))
        return replicas_finite > context.num_replicas_in_sync - 0.5
