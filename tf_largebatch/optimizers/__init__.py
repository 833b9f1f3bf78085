"""Optimizers whose learning rate may change at any step, and loss scaling for many replicas."""

from tf_largebatch.optimizers._lars import LARS
from tf_largebatch.optimizers._loss_scale_optimizer import LossScaleOptimizer
from tf_largebatch.optimizers._momentum_sgd import MomentumSGD

__all__ = ["LARS", "LossScaleOptimizer", "MomentumSGD"]
