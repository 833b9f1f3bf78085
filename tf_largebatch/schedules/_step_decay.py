"""Step decay of a rate or of any Keras schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_largebatch.core import scaling
from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.schedules._exact_schedule import (
    ExactSchedule,
    LearningRateSchedule,
    checked_rate,
    deserialized,
    exact_rate,
    serialized,
)


@keras.saving.register_keras_serializable(package="tf_largebatch")
class StepDecay(ExactSchedule):
    """`learning_rate(t) * decay_factor ** n` at optimizer update t, n the boundaries b <= t.

    t = 0 is the first update. Update b itself is the first one at the lower rate; Keras'
    `PiecewiseConstantDecay` lowers the rate one update later.

    Args:
        learning_rate: what is decayed: a rate, or any Keras schedule.
        boundaries: optimizer updates, 0 or more, in order; two equal ones decay twice at once.
        decay_factor: positive; the paper's is 0.1.

    Raises:
        ConfigurationError: a value breaks its rule.
    """

    def __init__(
        self,
        learning_rate: float | LearningRateSchedule,
        *,
        boundaries: Sequence[int],
        decay_factor: float = 0.1,
    ) -> None:
        super().__init__()
        self.learning_rate = checked_rate("learning_rate", learning_rate)
        self.boundaries = tuple(
            scaling.require_count("boundaries", boundary, minimum=0) for boundary in boundaries
        )
        if list(self.boundaries) != sorted(self.boundaries):
            raise ConfigurationError(f"boundaries={boundaries!r}: must be in increasing order.")
        self.decay_factor = scaling.require_number("decay_factor", decay_factor)

    def exact_rate(self, step: tf.Tensor) -> tf.Tensor:
        return scaling.step_decay(
            step,
            exact_rate(self.learning_rate, step),
            boundaries=self.boundaries,
            decay_factor=self.decay_factor,
            xp=tf,
        )

    def get_config(self) -> dict[str, Any]:
        return {
            "learning_rate": serialized(self.learning_rate),
            "boundaries": list(self.boundaries),
            "decay_factor": self.decay_factor,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> StepDecay:
        return cls(**{**config, "learning_rate": deserialized(config["learning_rate"])})
