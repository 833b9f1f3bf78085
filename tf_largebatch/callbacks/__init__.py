"""Keras callbacks."""

from tf_largebatch.callbacks._batch_norm_sync import BatchNormSync
from tf_largebatch.callbacks._gradient_noise_scale import GradientNoiseScale
from tf_largebatch.callbacks._learning_rate_warmup import LearningRateWarmup
from tf_largebatch.callbacks._throughput_logger import ThroughputLogger

__all__ = ["BatchNormSync", "GradientNoiseScale", "LearningRateWarmup", "ThroughputLogger"]
