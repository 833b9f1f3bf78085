"""Gradual and constant warmup in front of a rate or of any Keras schedule."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tf_largebatch.core import scaling
from tf_largebatch.schedules._exact_schedule import (
    ExactSchedule,
    LearningRateSchedule,
    checked_rate,
    deserialized,
    exact_rate,
    serialized,
)


class _Warmup(ExactSchedule):
    """What the two warmups share: their arguments and how they are stored."""

    def __init__(
        self,
        after_warmup: float | LearningRateSchedule,
        *,
        warmup_steps: int,
        initial_learning_rate: float,
    ) -> None:
        super().__init__()
        self.after_warmup = checked_rate("after_warmup", after_warmup)
        self.warmup_steps = scaling.require_count("warmup_steps", warmup_steps, minimum=0)
        self.initial_learning_rate = scaling.require_number(
            "initial_learning_rate", initial_learning_rate, may_equal_minimum=True
        )

    def get_config(self) -> dict[str, Any]:
        return {
            "after_warmup": serialized(self.after_warmup),
            "warmup_steps": self.warmup_steps,
            "initial_learning_rate": self.initial_learning_rate,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> _Warmup:
        return cls(**{**config, "after_warmup": deserialized(config["after_warmup"])})


@keras.saving.register_keras_serializable(package="tf_largebatch")
class GradualWarmup(_Warmup):
    """Gradual warmup (Goyal et al. 2017, section 2.2), at optimizer update t, w = `warmup_steps`.

        rate(t) = initial + (after_warmup(w) - initial) * t / w    for t < w
                = after_warmup(t)                                  for t >= w

    t = 0 is the first update and has the initial rate; update w is the first one after warmup.
    `after_warmup` sees the step counted from the start of training, not from the end of warmup,
    so that decay epochs keep their meaning; the line ends where it takes over.

    Args:
        after_warmup: a rate, or any Keras schedule.
        warmup_steps: w, in optimizer updates; 0 is no warmup.
        initial_learning_rate: the rate at t = 0; the paper's is the reference rate, 0.1.

    Raises:
        ConfigurationError: a rate is negative or not finite, or `warmup_steps` is no integer of 0
            or more.
    """

    def exact_rate(self, step: tf.Tensor) -> tf.Tensor:
        return scaling.gradual_warmup(
            step,
            exact_rate(self.after_warmup, step),
            warmup_steps=self.warmup_steps,
            initial_learning_rate=exact_rate(self.initial_learning_rate, step),
            peak_learning_rate=exact_rate(
                self.after_warmup, tf.constant(self.warmup_steps, tf.int64)
            ),
            xp=tf,
        )


@keras.saving.register_keras_serializable(package="tf_largebatch")
class ConstantWarmup(_Warmup):
    """Constant warmup (Goyal et al. 2017, section 2.2), the comparison to `GradualWarmup`.

        rate(t) = initial            for t < w
                = after_warmup(t)    for t >= w

    Arguments and errors as in `GradualWarmup`.
    """

    def exact_rate(self, step: tf.Tensor) -> tf.Tensor:
        return scaling.constant_warmup(
            step,
            exact_rate(self.after_warmup, step),
            warmup_steps=self.warmup_steps,
            initial_learning_rate=exact_rate(self.initial_learning_rate, step),
            xp=tf,
        )
