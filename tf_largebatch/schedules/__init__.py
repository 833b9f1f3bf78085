"""Keras learning rate schedules: warmup, step decay, and a recipe's whole schedule."""

from tf_largebatch.schedules._accumulated_steps import AccumulatedSteps
from tf_largebatch.schedules._of_recipe import schedule_of_recipe
from tf_largebatch.schedules._step_decay import StepDecay
from tf_largebatch.schedules._warmup import ConstantWarmup, GradualWarmup

__all__ = [
    "AccumulatedSteps",
    "ConstantWarmup",
    "GradualWarmup",
    "StepDecay",
    "schedule_of_recipe",
]
