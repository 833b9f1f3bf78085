"""The two residual blocks of He et al. 2015 (arXiv 1512.03385), and a stage of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from tf_largebatch.models._layers import LayerFactory

Block = Callable[..., Any]


def basic_block(layers: LayerFactory, x: Any, width: int, stride: int, *, name: str) -> Any:
    """Two 3x3 convolutions, the first with the stride; `width` channels out."""
    y = layers.conv(x, width, 3, stride, name=f"{name}_conv1")
    y = layers.norm(y, name=f"{name}_bn1")
    y = layers.relu(y, name=f"{name}_relu1")
    y = layers.conv(y, width, 3, 1, name=f"{name}_conv2")
    y = layers.norm(y, name=f"{name}_bn2", last_of_branch=True)
    return _join(layers, x, y, width, stride, name=name)


def bottleneck_block(layers: LayerFactory, x: Any, width: int, stride: int, *, name: str) -> Any:
    """1x1, 3x3 and 1x1 convolutions, the stride in the 3x3; `4 * width` channels out."""
    y = layers.conv(x, width, 1, 1, name=f"{name}_conv1")
    y = layers.norm(y, name=f"{name}_bn1")
    y = layers.relu(y, name=f"{name}_relu1")
    y = layers.conv(y, width, 3, stride, name=f"{name}_conv2")
    y = layers.norm(y, name=f"{name}_bn2")
    y = layers.relu(y, name=f"{name}_relu2")
    y = layers.conv(y, 4 * width, 1, 1, name=f"{name}_conv3")
    y = layers.norm(y, name=f"{name}_bn3", last_of_branch=True)
    return _join(layers, x, y, 4 * width, stride, name=name)


def stage(
    layers: LayerFactory, x: Any, block: Block, width: int, stride: int, count: int, *, name: str
) -> Any:
    """`count` blocks of one width; the first of them has the stride."""
    for index in range(1, count + 1):
        block_stride = stride if index == 1 else 1
        x = block(layers, x, width, block_stride, name=f"{name}_block{index}")
    return x


def _join(
    layers: LayerFactory, x: Any, branch: Any, channels: int, stride: int, *, name: str
) -> Any:
    """Shortcut plus branch, rectified; a 1x1 projection where the shape changes (option B)."""
    if stride != 1 or x.shape[-1] != channels:
        x = layers.conv(x, channels, 1, stride, name=f"{name}_shortcut_conv")
        x = layers.norm(x, name=f"{name}_shortcut_bn")
    return layers.relu(keras.layers.Add(name=f"{name}_add")([x, branch]), name=f"{name}_out")
