"""Keras callbacks."""

from tf_largebatch.callbacks._batch_norm_sync import BatchNormSync
from tf_largebatch.callbacks._chief_only import ChiefOnly
from tf_largebatch.callbacks._gradient_noise_scale import GradientNoiseScale
from tf_largebatch.callbacks._learning_rate_warmup import LearningRateWarmup
from tf_largebatch.callbacks._step_profile import StepProfile
from tf_largebatch.callbacks._stop_together import StopTogether
from tf_largebatch.callbacks._throughput_logger import ThroughputLogger
from tf_largebatch.callbacks._training_state import TrainingState

__all__ = [
    "BatchNormSync",
    "ChiefOnly",
    "GradientNoiseScale",
    "LearningRateWarmup",
    "StepProfile",
    "StopTogether",
    "ThroughputLogger",
    "TrainingState",
]
