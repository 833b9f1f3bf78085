"""`ResNetSmall`: the residual network for images of about 32 x 32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.models import _checks
from tf_largebatch.models._blocks import basic_block, stage
from tf_largebatch.models._layers import LayerFactory

_WIDTHS = (16, 32, 64)


def ResNetSmall(
    num_classes: int,
    *,
    depth: int = 8,
    input_shape: Sequence[int | None] = (32, 32, 3),
    zero_init_residual: bool = True,
    weight_decay: float = 0.0,
    batch_norm_momentum: float = 0.9,
    batch_norm_epsilon: float = 1e-5,
    classifier_activation: Any = None,
    seed: int | None = None,
    name: str | None = None,
) -> keras.Model:
    """The residual network for small images (He et al. 2015, section 4.2), as a functional model.

    A 3x3 convolution of 16 channels, then three stages of `d` blocks of two 3x3 convolutions,
    with 16, 32 and 64 channels, the last two stages starting with stride 2; global average, dense
    layer. `depth = 6 d + 2` counts the convolutions on the main path and the dense layer: 8, 14,
    20, 32, 44, 56, 110 and so on. Where the shape changes the shortcut is a 1x1 convolution with
    batch norm (option B); the paper pads with zeros there (option A), which has no weights.

    Args:
        num_classes: Outputs of the dense layer, 1 or more.
        depth: `6 d + 2` for `d` of 1 or more.
        input_shape: `(height, width, channels)`, both sides 4 or more, or None for any size.
        zero_init_residual: See `ResNet50`, as for all arguments below.
        weight_decay: L2 of convolution and dense weights; 0.0, the default, adds no loss term.
        batch_norm_momentum: Share of the old moving average that stays at a step.
        batch_norm_epsilon: Added to the variance.
        classifier_activation: None for logits.
        seed: None for Keras' global seed.
        name: Name of the model; `resnet_small_<depth>` by default.

    Returns:
        A model from `[batch, height, width, channels]` to `[batch, num_classes]`.

    Raises:
        ConfigurationError: for another depth (the nearest are named), or as for `ResNet50`.
    """
    depth = _checks.whole_number(depth, "depth")
    blocks_per_stage = _blocks_per_stage(depth)
    num_classes = _checks.whole_number(num_classes, "num_classes", 1)
    shape = _checks.image_shape(input_shape, 4, "the image is halved twice on its way")
    layers = LayerFactory(
        zero_init_residual, weight_decay, batch_norm_momentum, batch_norm_epsilon, seed
    )
    inputs = keras.Input(shape, name="image")
    x = layers.conv(inputs, _WIDTHS[0], 3, 1, name="stem_conv")
    x = layers.norm(x, name="stem_bn")
    x = layers.relu(x, name="stem_relu")
    for index, width in enumerate(_WIDTHS, start=1):
        stride = 1 if index == 1 else 2
        x = stage(layers, x, basic_block, width, stride, blocks_per_stage, name=f"stage{index}")
    outputs = layers.classifier(x, num_classes, classifier_activation)
    return keras.Model(inputs, outputs, name=name or f"resnet_small_{depth}")


def _blocks_per_stage(depth: int) -> int:
    if depth >= 8 and depth % 6 == 2:
        return (depth - 2) // 6
    below = (depth - 2) // 6 * 6 + 2
    nearest = "8" if depth < 8 else f"{below} and {below + 6}"
    raise ConfigurationError(
        f"depth={depth} is not 6 d + 2 for a whole d of 1 or more; the nearest: {nearest}."
    )
