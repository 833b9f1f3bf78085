"""Batch norm over n rows at a time, whatever a device takes."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.core.scaling import require_count


@keras.saving.register_keras_serializable(package="tf_largebatch")
class GhostBatchNormalization(keras.layers.BatchNormalization):
    """Batch norm whose statistics are those of n = `virtual_batch_size` rows, as on small workers.

    In training a replica's batch of G * n rows is cut into G groups of n consecutive rows, and
    each is normalised by its own mean and (biased) variance over rows and places:

        y[g] = gamma * (x[g] - mean(x[g])) / sqrt(variance(x[g]) + epsilon) + beta

    So one device with 512 rows computes, and differentiates, what 16 workers of 32 rows do with
    `keras.layers.BatchNormalization` (Hoffer et al. 2017, arXiv 1705.08741). Statistics over n = 32
    are a part of the loss that is optimised, which the linear scaling rule must not change
    (Goyal et al. 2017, section 2.3); batches of any other size would change it.

    Moving statistics advance once a step, as those of one such worker do:

        moving_mean     <- momentum * moving_mean     + (1 - momentum) * mean_g(mean(x[g]))
        moving_variance <- momentum * moving_variance + (1 - momentum) * mean_g(variance(x[g]))

    These are exactly the averages over G workers of the moving statistics that each would have: by
    such variances rows were normalised in training. `BatchNormSync` over real workers adds the
    variance between their moving means, to keep a shift between their data. Groups of one batch
    have no shift, and would have added noise alone: `(1 - momentum) / (1 + momentum)` of the
    variance of a group's mean, a twentieth of it for 0.9, and next to nothing of the rows'.

    In inference, and frozen by `trainable = False`, it is `keras.layers.BatchNormalization`. The
    weights have the same names, shapes and order, so that `model.set_weights(other.get_weights())`
    takes them from a model with the one to a model with the other (`.weights.h5` files name layers
    by their class). Statistics of float16 and bfloat16 inputs are computed in float32. Inputs have
    any rank, and sizes that may be unknown when traced, also under a strategy; on a CPU the layer
    takes about as long as that of Keras (`tools/benchmark_ghost_batch_norm.py`).

    Args:
        virtual_batch_size: n. It must divide the rows that a replica gets in training; the default
            is the paper's 32.
        **options: those of `keras.layers.BatchNormalization`: `axis=-1`, `momentum=0.99`,
            `epsilon=1e-3`, `center=True`, `scale=True` and so on; not `synchronized`, not `renorm`.

    Shapes: `[rows, ..., channels]`, or channels at `axis`; the output is as the input.

    Raises:
        ConfigurationError: for a size that is no integer of 1 or more, `synchronized=True`,
            `renorm=True`, or `axis` at the rows or beyond the inputs; in training, for rows that n
            does not divide, or a mask.
        tf.errors.InvalidArgumentError: in training, where the number of rows is known only when
            the step runs, and n does not divide it.
    """

    def __init__(self, virtual_batch_size: int = 32, **options: Any) -> None:
        for name, reason in (
            ("synchronized", "it takes statistics over all replicas, this layer over n rows"),
            ("renorm", "it corrects a group's statistics towards the moving ones"),
        ):
            if options.get(name):
                raise ConfigurationError(
                    f"{name}=True cannot be had together with GhostBatchNormalization: {reason}. "
                    f"Leave it out, or use keras.layers.BatchNormalization({name}=True)."
                )
        super().__init__(**options)
        self.virtual_batch_size = require_count("virtual_batch_size", virtual_batch_size)

    def build(self, input_shape: Any) -> None:
        rank = len(input_shape)
        if not -rank <= self.axis < rank:
            raise ConfigurationError(
                f"axis={self.axis} of inputs of shape {tuple(input_shape)}: there are {rank} axes. "
                "Use that of the channels: -1, or 1 for channels_first."
            )
        if self.axis % rank == 0:
            raise ConfigurationError(
                f"axis={self.axis} of inputs of shape {tuple(input_shape)} is that of the rows, "
                "which are cut into groups. Use the axis of the channels: -1, or 1 for "
                "channels_first."
            )
        super().build(input_shape)

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        if not (training and self.trainable):
            return super().call(inputs, training=training, mask=mask)
        if mask is not None:
            raise ConfigurationError(
                f"{self.name} got a mask in training, and GhostBatchNormalization counts all "
                "places of a group alike. Take the mask off in front of it, or use "
                "keras.layers.BatchNormalization, which leaves masked places out."
            )
        # [group, row, ...], in float32 at least, as Keras does it
        groups = self._in_groups(keras.ops.cast(inputs, self._statistics_dtype(inputs.dtype)))
        channels = self.axis % inputs.shape.rank + 1
        axes = [axis for axis in range(1, groups.shape.rank) if axis != channels]
        mean, variance = tf.nn.moments(groups, axes, keepdims=True)  # [group, 1, ..., channel, ...]
        self._update(self.moving_mean, mean)
        self._update(self.moving_variance, variance)
        shape = [1] * groups.shape.rank
        shape[channels] = inputs.shape[self.axis]
        outputs = tf.nn.batch_normalization(
            groups,
            mean,
            variance,
            offset=self._shaped(self.beta, groups.dtype, shape),
            scale=self._shaped(self.gamma, groups.dtype, shape),
            variance_epsilon=self.epsilon,
        )
        outputs = tf.ensure_shape(tf.reshape(outputs, tf.shape(inputs)), inputs.shape)
        return keras.ops.cast(outputs, self.compute_dtype)

    def _in_groups(self, inputs: tf.Tensor) -> tf.Tensor:
        """`[rows, ...]` as `[group, n, ...]`."""
        rows, *places = inputs.shape
        shape = keras.ops.shape(inputs)
        checks = []
        if rows is None:
            message = self._uneven_message(None)
            checks = [tf.debugging.assert_equal(shape[0] % self.virtual_batch_size, 0, message)]
        elif rows % self.virtual_batch_size:
            raise ConfigurationError(self._uneven_message(rows))
        with tf.control_dependencies(checks):
            groups = tf.reshape(inputs, [-1, self.virtual_batch_size, *shape[1:]])
        return tf.ensure_shape(groups, [None, self.virtual_batch_size, *places])

    def _uneven_message(self, rows: int | None) -> str:
        size = self.virtual_batch_size
        message = f"{self.name}: virtual_batch_size={size} does not divide "
        if rows is None:
            message += "the rows that a replica got in this training step."
        elif rows < size:
            message += (
                f"the {rows} rows of a replica, which are fewer. Use virtual_batch_size={rows}, "
                "or batch norm as it is: so few rows are one group."
            )
        else:
            below = rows - rows % size
            message += f"the {rows} rows of a replica; {below} and {below + size} would do."
        return (
            f"{message} A last batch that is smaller can be left out: "
            "dataset.batch(..., drop_remainder=True), or GlobalShuffleSharder."
        )

    def _update(self, moving: Any, of_groups: tf.Tensor) -> None:
        value = tf.reshape(tf.reduce_mean(of_groups, axis=0), [-1])
        old = keras.ops.cast(moving, value.dtype)
        moving.assign(old * self.momentum + value * (1.0 - self.momentum))

    @staticmethod
    def _statistics_dtype(dtype: Any) -> str:
        return str(keras.backend.result_type(dtype, "float32"))

    @staticmethod
    def _shaped(weight: Any, dtype: Any, shape: list[int]) -> Any:
        return None if weight is None else tf.reshape(keras.ops.cast(weight, dtype), shape)

    def get_config(self) -> dict[str, Any]:
        """Arguments that make an equal layer."""
        return {"virtual_batch_size": self.virtual_batch_size, **super().get_config()}
