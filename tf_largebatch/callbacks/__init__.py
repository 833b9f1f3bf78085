"""Keras callbacks."""

from tf_largebatch.callbacks._learning_rate_warmup import LearningRateWarmup

__all__ = ["LearningRateWarmup"]
