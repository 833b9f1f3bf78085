"""The ImageNet networks: published sizes and costs, initial state, names, padding."""

from __future__ import annotations

import math

import keras
import numpy as np
import pytest

from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.models import ResNet18, ResNet34, ResNet50, ResNet101, ResNet152

# Trainable parameters and multiply-adds (1e9) at 224 x 224 with 1000 classes, as published with
# torchvision's pretrained weights, whose bottlenecks too have the stride in the 3x3.
PUBLISHED = {
    ResNet18: (11_689_512, 1.814),
    ResNet34: (21_797_672, 3.664),
    ResNet50: (25_557_032, 4.089),
    ResNet101: (44_549_160, 7.801),
    ResNet152: (60_192_808, 11.514),
}


@pytest.fixture(scope="module")
def basic() -> keras.Model:
    return ResNet18(10, input_shape=(64, 64, 3), seed=1)


@pytest.fixture(scope="module")
def bottleneck() -> keras.Model:
    return ResNet50(10, input_shape=(64, 64, 3), seed=1)


def images(count: int, side: int, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(count, side, side, channels)).astype("float32")


def multiply_adds(model: keras.Model) -> int:
    total = 0
    for layer in model.layers:
        if isinstance(layer, keras.layers.Conv2D):
            total += math.prod(layer.output.shape[1:3]) * math.prod(layer.kernel.shape)
        elif isinstance(layer, keras.layers.Dense):
            total += math.prod(layer.kernel.shape)
    return total


@pytest.mark.parametrize("build", PUBLISHED, ids=lambda build: build.__name__)
def test_parameters_multiply_adds_and_shapes_are_the_published_ones(build):
    parameters, giga_multiply_adds = PUBLISHED[build]
    # Shapes without values: 60 million weights need not be drawn to be counted.
    with keras.StatelessScope(initialize_variables=False):
        model = build(1000)
    assert sum(math.prod(v.shape) for v in model.trainable_variables) == parameters
    assert multiply_adds(model) / 1e9 == pytest.approx(giga_multiply_adds, abs=6e-4)
    ends = {layer.name: layer.output.shape for layer in model.layers}
    widen = 1 if build in (ResNet18, ResNet34) else 4
    assert ends["stem_pool"] == (None, 56, 56, 64)
    assert ends["stage1_block2_out"] == (None, 56, 56, 64 * widen)
    assert ends["stage2_block2_out"] == (None, 28, 28, 128 * widen)
    assert ends["stage3_block2_out"] == (None, 14, 14, 256 * widen)
    assert ends["stage4_block2_out"] == (None, 7, 7, 512 * widen)
    assert model.output.shape == (None, 1000)
    assert model.name == build.__name__.lower()


def test_stride_of_a_bottleneck_is_in_its_3x3(bottleneck):
    strides = {
        name: bottleneck.get_layer(f"stage2_block1_{name}").strides
        for name in ("conv1", "conv2", "conv3", "shortcut_conv")
    }
    assert strides == {"conv1": (1, 1), "conv2": (2, 2), "conv3": (1, 1), "shortcut_conv": (2, 2)}
    assert bottleneck.get_layer("stage2_block1_conv2").kernel_size == (3, 3)


@pytest.mark.parametrize(("fixture", "last"), [("basic", "bn2"), ("bottleneck", "bn3")])
def test_only_the_last_gamma_of_each_branch_starts_at_zero(fixture, last, request):
    model = request.getfixturevalue(fixture)
    norms = [x for x in model.layers if isinstance(x, keras.layers.BatchNormalization)]
    zero = {x.name for x in norms if not np.any(x.gamma.numpy())}
    one = {x.name for x in norms if np.all(x.gamma.numpy() == 1.0)}
    blocks = [x.name.removesuffix("_add") for x in model.layers if x.name.endswith("_add")]
    assert zero == {f"{block}_{last}" for block in blocks}
    assert one == {x.name for x in norms} - zero
    assert {(x.momentum, x.epsilon) for x in norms} == {(0.9, 1e-5)}


@pytest.mark.parametrize("fixture", ["basic", "bottleneck"])
def test_each_block_starts_as_its_shortcut(fixture, request):
    model = request.getfixturevalue(fixture)
    adds = [layer for layer in model.layers if layer.name.endswith("_add")]
    outs = [model.get_layer(layer.name.replace("_add", "_out")).output for layer in adds]
    shortcuts = [layer.input[0] for layer in adds]
    pairs = keras.Model(model.input, list(zip(outs, shortcuts, strict=True)))
    for out, shortcut in pairs(images(2, 64), training=True):
        np.testing.assert_array_equal(out, np.maximum(shortcut, 0.0))
        assert np.any(np.asarray(out) > 0.0)


def test_initial_weights(basic):
    convolutions = [x for x in basic.layers if isinstance(x, keras.layers.Conv2D)]
    assert not any(x.use_bias for x in convolutions)
    for layer in convolutions:
        height, width, _, out = layer.kernel.shape
        z = layer.kernel.numpy() / math.sqrt(2.0 / (height * width * out))
        assert z.mean() == pytest.approx(0.0, abs=5 / math.sqrt(z.size))
        assert z.std() == pytest.approx(1.0, abs=5 / math.sqrt(2 * z.size))
        assert np.abs(z).max() > 2.5  # a normal cut at two deviations and rescaled ends at 2.28
    classifier = basic.get_layer("classifier")
    assert classifier.kernel.numpy().std() == pytest.approx(0.01, rel=0.05)
    assert not np.any(classifier.bias.numpy())


def test_initial_loss_is_that_of_a_guess(basic):
    logits = basic(images(8, 64), training=True)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(np.arange(8), logits)
    assert float(loss) == pytest.approx(math.log(10), abs=0.1)


def test_stem_convolution_is_centred_on_even_pixels(basic):
    stem = basic.get_layer("stem_conv")
    trained = stem.get_weights()
    centre = np.zeros((7, 7, 3, 64), "float32")
    centre[3, 3, 1, 5] = 1.0
    x = images(2, 64)
    try:
        stem.set_weights([centre])
        y = keras.Model(basic.input, stem.output)(x).numpy()
    finally:
        stem.set_weights(trained)
    np.testing.assert_array_equal(y[..., 5], x[:, ::2, ::2, 1])


def test_stem_pool_takes_the_maximum_around_even_pixels(basic):
    relu, pool = basic.get_layer("stem_relu"), basic.get_layer("stem_pool")
    x, y = (
        np.asarray(v) for v in keras.Model(basic.input, [relu.output, pool.output])(images(1, 64))
    )
    padded = np.pad(x, [(0, 0), (1, 1), (1, 1), (0, 0)])
    windows = [padded[:, i : i + 31 : 2, j : j + 31 : 2] for i in range(3) for j in range(3)]
    np.testing.assert_array_equal(y, np.max(windows, axis=0))


def test_any_size_and_another_activation():
    model = ResNet18(1, input_shape=[None, None, 1], classifier_activation="sigmoid", name="mine")
    assert model.name == "mine"
    assert model.input.shape == (None, None, None, 1)
    y = model(images(2, 48, channels=1)).numpy()
    assert y.shape == (2, 1)
    assert np.all((y > 0.0) & (y < 1.0))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_classes": 0}, "num_classes=0"),
        ({"num_classes": 10.0}, "num_classes=10.0 is a float"),
        ({"num_classes": True}, "num_classes=True is a bool"),
        ({"input_shape": (224, 224)}, r"\(height, width, channels\)"),
        ({"input_shape": 224}, "input_shape=224"),
        ({"input_shape": (32, 31, 3)}, r"\(32, 31, 3\) is too small.*32 or more.*ResNetSmall"),
        ({"input_shape": (64, 64, None)}, "leaves the channels open"),
        ({"input_shape": (64, 64, 0)}, "input_shape channels=0"),
        ({"input_shape": (64.0, 64, 3)}, "input_shape height=64.0"),
        ({"weight_decay": -1e-4}, "weight_decay=-0.0001"),
        ({"weight_decay": math.nan}, "weight_decay=nan"),
        ({"weight_decay": "1e-4"}, "weight_decay='1e-4'"),
        ({"batch_norm_momentum": 1.0}, r"batch_norm_momentum=1.0 is not a number in \[0, 1\)"),
        ({"batch_norm_epsilon": 0.0}, "batch_norm_epsilon=0.0"),
        ({"seed": 0.5}, "seed=0.5"),
    ],
)
def test_refused(arguments, words):
    with pytest.raises(ConfigurationError, match=words):
        ResNet18(**{"num_classes": 10, **arguments})


def test_channels_first_is_refused():
    keras.config.set_image_data_format("channels_first")
    try:
        with pytest.raises(ConfigurationError, match=r"set_image_data_format\('channels_last'\)"):
            ResNet18(10)
    finally:
        keras.config.set_image_data_format("channels_last")
