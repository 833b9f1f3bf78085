"""The models' parameters and multiply-adds, by the closed forms of their architecture.

Without TensorFlow: a layer is its weights and what a forward pass multiplies by each. Backward's
time is taken to be spread as the multiply-adds are, so batch norm, activations and pooling are
free, which they are not quite on any device.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_WIDTHS = (64, 128, 256, 512)
_BLOCKS = {  # of each stage, and whether they are bottlenecks
    "resnet18": ((2, 2, 2, 2), False),
    "resnet34": ((3, 4, 6, 3), False),
    "resnet50": ((3, 4, 6, 3), True),
    "resnet101": ((3, 4, 23, 3), True),
    "resnet152": ((3, 8, 36, 3), True),
}
_SMALL_WIDTHS = (16, 32, 64)
NAMES = (*_BLOCKS, "resnet_small")


@dataclass(frozen=True)
class Weights:
    """A trainable variable.

    Args:
        elements: of it.
        multiply_adds: of its layer, for an image.
    """

    elements: int
    multiply_adds: int = 0


@dataclass
class ModelProfile:
    """A model as its variables, in the order of a forward pass."""

    name: str
    weights: list[Weights] = field(default_factory=list)

    @property
    def parameters(self) -> int:
        return sum(each.elements for each in self.weights)

    @property
    def multiply_adds(self) -> int:
        return sum(each.multiply_adds for each in self.weights)

    def conv(self, side: int, inputs: int, outputs: int, kernel: int, stride: int) -> int:
        """A convolution without bias, and its batch norm; returns the side of what comes out."""
        side = -(-side // stride)
        elements = kernel * kernel * inputs * outputs
        self.weights += [Weights(elements, elements * side * side), Weights(outputs)]
        self.weights.append(Weights(outputs))
        return side

    def dense(self, inputs: int, outputs: int) -> None:
        self.weights += [Weights(inputs * outputs, inputs * outputs), Weights(outputs)]


def profile_of(
    name: str, *, num_classes: int = 1000, image_size: int = 224, depth: int = 8
) -> ModelProfile:
    """A model of `tf_largebatch.models`, by its name in lower case.

    Args:
        name: one of `NAMES`.
        num_classes: outputs of the classifier.
        image_size: pixels of a side; images have three channels.
        depth: of `resnet_small`, `6 d + 2`; others have it in their name.

    Raises:
        ValueError: an unknown name, or a depth that is not `6 d + 2`.
    """
    if name == "resnet_small":
        return _small(num_classes, image_size, depth)
    if name not in _BLOCKS:
        raise ValueError(f"{name!r} is no model; there are {', '.join(NAMES)}.")
    counts, is_bottleneck = _BLOCKS[name]
    model = ModelProfile(name)
    side = model.conv(image_size, 3, _WIDTHS[0], 7, 2)
    side, channels = -(-side // 2), _WIDTHS[0]  # pooled
    for stage, (width, count) in enumerate(zip(_WIDTHS, counts, strict=True)):
        for block in range(count):
            stride = 2 if stage > 0 and block == 0 else 1
            side, channels = _block(model, side, channels, width, stride, is_bottleneck)
    model.dense(channels, num_classes)
    return model


def _small(num_classes: int, image_size: int, depth: int) -> ModelProfile:
    if depth < 8 or depth % 6 != 2:
        raise ValueError(f"depth={depth}: must be 6 d + 2, as 8, 14, 20, 32, 44, 56 or 110.")
    model = ModelProfile(f"resnet_small_{depth}")
    channels = _SMALL_WIDTHS[0]
    side = model.conv(image_size, 3, channels, 3, 1)
    for stage, width in enumerate(_SMALL_WIDTHS):
        for block in range((depth - 2) // 6):
            stride = 2 if stage > 0 and block == 0 else 1
            side, channels = _block(model, side, channels, width, stride, False)
    model.dense(channels, num_classes)
    return model


def _block(
    model: ModelProfile, side: int, channels: int, width: int, stride: int, is_bottleneck: bool
) -> tuple[int, int]:
    """A residual block; returns the side and the channels of what comes out."""
    out = 4 * width if is_bottleneck else width
    if is_bottleneck:
        model.conv(side, channels, width, 1, 1)
        smaller = model.conv(side, width, width, 3, stride)
        model.conv(smaller, width, out, 1, 1)
    else:
        smaller = model.conv(side, channels, width, 3, stride)
        model.conv(smaller, width, out, 3, 1)
    if stride != 1 or channels != out:
        model.conv(side, channels, out, 1, stride)
    return smaller, out
