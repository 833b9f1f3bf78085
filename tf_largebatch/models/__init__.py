"""Residual networks with the details that large-minibatch training depends on."""

from tf_largebatch.models._resnet import ResNet18, ResNet34, ResNet50, ResNet101, ResNet152
from tf_largebatch.models._resnet_small import ResNetSmall
from tf_largebatch.models._zero_init_residual import zero_init_residual

__all__ = [
    "ResNet18",
    "ResNet34",
    "ResNet50",
    "ResNet101",
    "ResNet152",
    "ResNetSmall",
    "zero_init_residual",
]
