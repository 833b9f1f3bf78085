"""Squared norms of the gradients before and after they are averaged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_largebatch.optimizers._norms import joint_square


class GradientSquares:
    """Running means of squared gradient norms: of one replica's batch, and of a whole update.

    An optimizer of this package that has one (`optimizer.gradient_squares`) hands it each batch's
    gradients and each update's. What a replica adds up travels to the others as one more number
    beside the gradients. Costs two passes over the gradients' memory.

    Make it, and give it to the optimizer, in the model's strategy scope, before the step is traced.

    Args:
        decay: of the running means, `mean = decay * mean + (1 - decay) * value` an update, from 0.

    Attributes:
        local: running mean of the squared norm of a replica's mean gradient over one batch, on
            average over replicas and accumulated batches; float32 scalar variable.
        reduced: that of the gradient of an update, the mean over all of them.
    """

    def __init__(self, *, decay: float) -> None:
        self._decay = decay
        strategy = tf.distribute.get_strategy()
        self._replicas = strategy.num_replicas_in_sync
        self._batches = _replica_variable("batches")  # since the last update
        self._sum = _replica_variable("squares")  # of those
        self.local = _replica_variable("local_gradient_square")
        self.reduced = _replica_variable("reduced_gradient_square")

    @property
    def variables(self) -> list[tf.Variable]:
        """All of them."""
        return [self._batches, self._sum, self.local, self.reduced]

    def add_batch(self, gradients: Sequence[Any]) -> None:
        """Adds a batch's gradients, as this replica has them: its share of the global mean."""
        # Of a mean over R replicas a replica holds 1 / R.
        square = self._replicas**2 * joint_square([tf.convert_to_tensor(x) for x in gradients])
        self._sum.assign_add(square)
        self._batches.assign_add(1.0)

    def take_local(self) -> tf.Tensor:
        """This replica's part of the mean over replicas and batches; scalar, to be summed."""
        part = self._sum / (self._batches * self._replicas)
        with tf.control_dependencies([part]):
            self._sum.assign(0.0)
            self._batches.assign(0.0)
        return part

    def add_update(self, local_square: tf.Tensor, gradients: Sequence[Any]) -> None:
        """Adds an update: the sum of all replicas' `take_local`, and the reduced gradients."""
        for mean, value in ((self.local, local_square), (self.reduced, joint_square(gradients))):
            mean.assign(self._decay * mean + (1.0 - self._decay) * value)


def _replica_variable(name: str) -> tf.Variable:
    """Each replica's own, read as the first replica's: no collective."""
    return tf.Variable(
        0.0,
        trainable=False,
        name=name,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
    )
