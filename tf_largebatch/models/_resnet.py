"""The residual networks for ImageNet, as in Goyal et al. 2017."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from tf_largebatch.models import _checks
from tf_largebatch.models._blocks import Block, basic_block, bottleneck_block, stage
from tf_largebatch.models._layers import LayerFactory

_WIDTHS = (64, 128, 256, 512)


def ResNet18(
    num_classes: int,
    *,
    input_shape: Sequence[int | None] = (224, 224, 3),
    zero_init_residual: bool = True,
    weight_decay: float = 0.0,
    batch_norm_momentum: float = 0.9,
    batch_norm_epsilon: float = 1e-5,
    classifier_activation: Any = None,
    seed: int | None = None,
    name: str = "resnet18",
) -> keras.Model:
    """ResNet-18 for ImageNet: basic blocks (2, 2, 2, 2); all else as `ResNet50`."""
    layers = LayerFactory(
        zero_init_residual, weight_decay, batch_norm_momentum, batch_norm_epsilon, seed
    )
    return _assemble(
        layers, basic_block, (2, 2, 2, 2), num_classes, input_shape, classifier_activation, name
    )


def ResNet34(
    num_classes: int,
    *,
    input_shape: Sequence[int | None] = (224, 224, 3),
    zero_init_residual: bool = True,
    weight_decay: float = 0.0,
    batch_norm_momentum: float = 0.9,
    batch_norm_epsilon: float = 1e-5,
    classifier_activation: Any = None,
    seed: int | None = None,
    name: str = "resnet34",
) -> keras.Model:
    """ResNet-34 for ImageNet: basic blocks (3, 4, 6, 3); all else as `ResNet50`."""
    layers = LayerFactory(
        zero_init_residual, weight_decay, batch_norm_momentum, batch_norm_epsilon, seed
    )
    return _assemble(
        layers, basic_block, (3, 4, 6, 3), num_classes, input_shape, classifier_activation, name
    )


def ResNet50(
    num_classes: int,
    *,
    input_shape: Sequence[int | None] = (224, 224, 3),
    zero_init_residual: bool = True,
    weight_decay: float = 0.0,
    batch_norm_momentum: float = 0.9,
    batch_norm_epsilon: float = 1e-5,
    classifier_activation: Any = None,
    seed: int | None = None,
    name: str = "resnet50",
) -> keras.Model:
    """ResNet-50 for ImageNet (He et al. 2015; details of Goyal et al. 2017, section 5.1).

    A functional model of plain Keras layers: 7x7 convolution with stride 2, 3x3 max pooling with
    stride 2, four stages of bottleneck blocks (3, 4, 6, 3), global average, dense layer. The
    stride of a stage is in the 3x3 convolution of its first block. Convolutions have no bias.
    Strided ones are padded alike on all sides, so that weights trained elsewhere fit; Keras'
    "same" would pad at the bottom and the right only.

    Initial weights: convolutions are normal with variance `2 / fan_out`,
    `fan_out = height * width * output channels` (He et al. 2015, arXiv 1502.01852, in the form of
    the implementation that Goyal et al. start from; not Keras' `he_normal`, which is truncated and
    uses `fan_in`). The dense layer is normal with deviation 0.01; biases are zero.

    Layers have lasting names: `stem_conv`, `stage2_block1_conv2`, `stage2_block1_bn3`,
    `stage2_block1_shortcut_conv`, `stage2_block1_out` (a block's output), `classifier`.

    Args:
        num_classes: Outputs of the dense layer, 1 or more.
        input_shape: `(height, width, channels)`; both sides 32 or more, or None for any size.
        zero_init_residual: Whether gamma of the last batch norm of each residual branch starts at
            zero, so that each block starts as its shortcut. A shortcut's own gamma starts at one.
        weight_decay: The paper's lambda (1e-4 there): adds `lambda / 2 * sum(w ** 2)` over the
            weights of convolutions and the dense layer to the loss, so `lambda * w` to their
            gradient; biases, gamma and beta are left out. The default, 0.0, adds nothing: give
            the decay here or to the optimizer, not to both.
        batch_norm_momentum: Share of the old moving average that stays at a step, in [0, 1).
        batch_norm_epsilon: Added to the variance; positive.
        classifier_activation: None for logits; else what `keras.layers.Dense` takes.
        seed: With a number, each layer draws from a seed of its own, made from this number and the
            layer's name: equal in every process, whatever was built or drawn before. None leaves
            it to Keras' global seed.
        name: Name of the model.

    Returns:
        A model from `[batch, height, width, channels]` to `[batch, num_classes]`. Layers follow
        Keras' global dtype policy; under a mixed policy the dense layer computes in the dtype of
        its weights, so logits are float32.

    Raises:
        ConfigurationError: for a malformed argument, an image too small, or when Keras is set to
            `channels_first`.
    """
    layers = LayerFactory(
        zero_init_residual, weight_decay, batch_norm_momentum, batch_norm_epsilon, seed
    )
    return _assemble(
        layers,
        bottleneck_block,
        (3, 4, 6, 3),
        num_classes,
        input_shape,
        classifier_activation,
        name,
    )


def ResNet101(
    num_classes: int,
    *,
    input_shape: Sequence[int | None] = (224, 224, 3),
    zero_init_residual: bool = True,
    weight_decay: float = 0.0,
    batch_norm_momentum: float = 0.9,
    batch_norm_epsilon: float = 1e-5,
    classifier_activation: Any = None,
    seed: int | None = None,
    name: str = "resnet101",
) -> keras.Model:
    """ResNet-101 for ImageNet: bottleneck blocks (3, 4, 23, 3); all else as `ResNet50`."""
    layers = LayerFactory(
        zero_init_residual, weight_decay, batch_norm_momentum, batch_norm_epsilon, seed
    )
    return _assemble(
        layers,
        bottleneck_block,
        (3, 4, 23, 3),
        num_classes,
        input_shape,
        classifier_activation,
        name,
    )


def ResNet152(
    num_classes: int,
    *,
    input_shape: Sequence[int | None] = (224, 224, 3),
    zero_init_residual: bool = True,
    weight_decay: float = 0.0,
    batch_norm_momentum: float = 0.9,
    batch_norm_epsilon: float = 1e-5,
    classifier_activation: Any = None,
    seed: int | None = None,
    name: str = "resnet152",
) -> keras.Model:
    """ResNet-152 for ImageNet: bottleneck blocks (3, 8, 36, 3); all else as `ResNet50`."""
    layers = LayerFactory(
        zero_init_residual, weight_decay, batch_norm_momentum, batch_norm_epsilon, seed
    )
    return _assemble(
        layers,
        bottleneck_block,
        (3, 8, 36, 3),
        num_classes,
        input_shape,
        classifier_activation,
        name,
    )


def _assemble(
    layers: LayerFactory,
    block: Block,
    blocks_per_stage: tuple[int, int, int, int],
    num_classes: int,
    input_shape: Sequence[int | None],
    classifier_activation: Any,
    name: str,
) -> keras.Model:
    num_classes = _checks.whole_number(num_classes, "num_classes", 1)
    shape = _checks.image_shape(
        input_shape, 32, "the image is halved five times on its way; ResNetSmall takes less"
    )
    inputs = keras.Input(shape, name="image")
    x = layers.conv(inputs, 64, 7, 2, name="stem_conv")
    x = layers.norm(x, name="stem_bn")
    x = layers.relu(x, name="stem_relu")
    # After a rectifier, padding with zeros and padding with minus infinity give the same maximum.
    x = keras.layers.ZeroPadding2D(1, name="stem_pool_pad")(x)
    x = keras.layers.MaxPooling2D(3, strides=2, padding="valid", name="stem_pool")(x)
    for index, (width, count) in enumerate(zip(_WIDTHS, blocks_per_stage, strict=True), start=1):
        stride = 1 if index == 1 else 2
        x = stage(layers, x, block, width, stride, count, name=f"stage{index}")
    outputs = layers.classifier(x, num_classes, classifier_activation)
    return keras.Model(inputs, outputs, name=name)
