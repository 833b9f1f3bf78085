"""A schedule over optimizer updates, for an optimizer that accumulates gradients."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tf_largebatch.core import scaling
from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.schedules._exact_schedule import (
    ExactSchedule,
    LearningRateSchedule,
    deserialized,
    exact_rate,
    serialized,
)


@keras.saving.register_keras_serializable(package="tf_largebatch")
class AccumulatedSteps(ExactSchedule):
    """`schedule(batches // accumulation_steps)`: counts optimizer updates instead of batches.

    A Keras optimizer with `gradient_accumulation_steps=a` makes one update for a batches, yet
    hands a schedule the number of batches. This undoes it: update t has `schedule(t)`. Wrap the
    outermost schedule only.

    Args:
        schedule: any Keras schedule over optimizer updates.
        accumulation_steps: a, the optimizer's `gradient_accumulation_steps`.

    Raises:
        ConfigurationError: `schedule` is no schedule, or a is no positive integer.
    """

    def __init__(self, schedule: LearningRateSchedule, *, accumulation_steps: int) -> None:
        super().__init__()
        if not isinstance(schedule, LearningRateSchedule):
            raise ConfigurationError(
                f"schedule={schedule!r}: must be a Keras LearningRateSchedule; a constant rate "
                "needs no wrapping."
            )
        self.schedule = schedule
        self.accumulation_steps = scaling.require_count("accumulation_steps", accumulation_steps)

    def exact_rate(self, step: tf.Tensor) -> tf.Tensor:
        return exact_rate(self.schedule, step // self.accumulation_steps)

    def get_config(self) -> dict[str, Any]:
        return {
            "schedule": serialized(self.schedule),
            "accumulation_steps": self.accumulation_steps,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> AccumulatedSteps:
        return cls(**{**config, "schedule": deserialized(config["schedule"])})
