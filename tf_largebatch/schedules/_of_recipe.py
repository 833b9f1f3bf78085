"""The schedule of a recipe, put together from the parts beside this file."""

from __future__ import annotations

from tf_largebatch.core.recipe import Recipe
from tf_largebatch.schedules._accumulated_steps import AccumulatedSteps
from tf_largebatch.schedules._exact_schedule import LearningRateSchedule
from tf_largebatch.schedules._step_decay import StepDecay
from tf_largebatch.schedules._warmup import ConstantWarmup, GradualWarmup

_WARMUPS = {"gradual": GradualWarmup, "constant": ConstantWarmup}


def schedule_of_recipe(recipe: Recipe) -> LearningRateSchedule:
    """What `recipe.learning_rate_schedule()` returns: `recipe.learning_rate_at`, for Keras.

    The decay lies around the warmup, as in the recipe's formula, so that a decay within a long
    warmup has its effect there. With accumulation the whole counts updates instead of batches.
    """
    before_decay: float | LearningRateSchedule = recipe.peak_learning_rate
    if recipe.warmup != "none":
        before_decay = _WARMUPS[recipe.warmup](
            recipe.peak_learning_rate,
            warmup_steps=recipe.warmup_steps,
            initial_learning_rate=recipe.initial_learning_rate,
        )
    schedule = StepDecay(
        before_decay, boundaries=recipe.decay_steps, decay_factor=recipe.decay_factor
    )
    if recipe.accumulation_steps == 1:
        return schedule
    return AccumulatedSteps(schedule, accumulation_steps=recipe.accumulation_steps)
