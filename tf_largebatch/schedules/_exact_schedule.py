"""The common shell of our schedules: int64 steps and float64 rates inside, Keras' float outside."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.core.scaling import require_number

LearningRateSchedule = keras.optimizers.schedules.LearningRateSchedule


class ExactSchedule(LearningRateSchedule):
    """A schedule whose steps are never rounded to float32, which ends at 2**24 updates.

    A subclass computes `exact_rate`; called by an optimizer, it hands out that rate rounded once,
    to `keras.config.floatx()`. A schedule within a schedule is not rounded in between.
    """

    def __call__(self, step: Any) -> tf.Tensor:
        """The rate at `step`, an integer or integer tensor, as a tensor of dtype `floatx`.

        Raises:
            ConfigurationError: `step` is no integer.
        """
        return tf.cast(self.exact_rate(_as_int64(step)), keras.config.floatx())

    def exact_rate(self, step: tf.Tensor) -> tf.Tensor:
        """The rate in float64 at an int64 `step`, of any shape."""
        raise NotImplementedError(f"{type(self).__name__} must override `exact_rate`.")


def _as_int64(step: Any) -> tf.Tensor:
    tensor = tf.convert_to_tensor(step, dtype_hint=tf.int64)
    if not tensor.dtype.is_integer:
        raise ConfigurationError(
            f"step has the dtype {tensor.dtype.name}: must be an integer, as float32 cannot tell "
            "2**24 updates from one more."
        )
    return tf.cast(tensor, tf.int64)


def exact_rate(rate: float | LearningRateSchedule, step: tf.Tensor) -> tf.Tensor:
    """The float64 rate at `step` of a number, of one of our schedules, or of any other one."""
    if isinstance(rate, ExactSchedule):
        return rate.exact_rate(step)
    if isinstance(rate, LearningRateSchedule):
        return tf.cast(rate(step), tf.float64)
    return tf.constant(rate, tf.float64)


def checked_rate(name: str, rate: Any) -> float | LearningRateSchedule:
    """`rate` as given if it is a schedule, else as a float of 0 or more."""
    if isinstance(rate, LearningRateSchedule):
        return rate
    return require_number(name, rate, may_equal_minimum=True)


def serialized(rate: float | LearningRateSchedule) -> Any:
    """What `get_config` holds for a number or a schedule."""
    if isinstance(rate, LearningRateSchedule):
        return keras.saving.serialize_keras_object(rate)
    return rate


def deserialized(rate: Any) -> Any:
    """The number or schedule that `serialized` was given."""
    return keras.saving.deserialize_keras_object(rate) if isinstance(rate, dict) else rate
