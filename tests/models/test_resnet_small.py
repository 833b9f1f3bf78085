"""`ResNetSmall`: depth, size, decay, seeds, dtypes, training."""

from __future__ import annotations

import math

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.models import ResNetSmall

IMAGES = np.random.default_rng(0).normal(size=(16, 8, 8, 1)).astype("float32")


def tiny(**options) -> keras.Model:
    return ResNetSmall(10, input_shape=(8, 8, 1), **options)


def closed_form_parameters(depth: int, channels: int, classes: int) -> int:
    """Weights of `d` blocks a stage, projections in front of stages 2 and 3."""
    d = (depth - 2) // 6
    total = 9 * channels * 16 + 2 * 16 + d * (2 * 9 * 16**2 + 4 * 16)
    for width in (32, 64):
        total += 9 * width * width // 2 + 9 * width**2 + width * width // 2 + 6 * width
        total += (d - 1) * (2 * 9 * width**2 + 4 * width)
    return total + 64 * classes + classes


@pytest.mark.parametrize(("depth", "channels"), [(8, 3), (14, 1), (20, 3)])
def test_parameters_and_depth(depth, channels):
    model = ResNetSmall(7, depth=depth, input_shape=(28, 28, channels))
    parameters = sum(math.prod(v.shape) for v in model.trainable_variables)
    assert parameters == closed_form_parameters(depth, channels, 7)
    kernels = [v for v in model.trainable_variables if len(v.shape) > 1]
    assert len(kernels) == depth + 2  # the two projections are not counted
    shapes = [model.get_layer(f"stage{i}_block1_out").output.shape[1:] for i in (1, 2, 3)]
    assert shapes == [(28, 28, 16), (14, 14, 32), (7, 7, 64)]
    assert model.name == f"resnet_small_{depth}"


@pytest.mark.parametrize(
    ("depth", "nearest"),
    [
        (2, "nearest: 8"),
        (-4, "nearest: 8"),
        (9, "8 and 14"),
        (18, "14 and 20"),
        (111, "110 and 116"),
    ],
)
def test_other_depths_name_the_nearest(depth, nearest):
    with pytest.raises(ConfigurationError, match=f"depth={depth} .*{nearest}"):
        ResNetSmall(10, depth=depth)


@pytest.mark.parametrize("depth", [8.0, "8", None, True])
def test_a_depth_of_another_type_is_refused(depth):
    with pytest.raises(ConfigurationError, match="depth="):
        ResNetSmall(10, depth=depth)


def test_too_small_an_image_is_refused():
    with pytest.raises(ConfigurationError, match=r"\(3, 8, 1\) is too small.*4 or more"):
        ResNetSmall(10, input_shape=(3, 8, 1))


def test_decay_is_l2_on_kernels_alone():
    decay = 0.03
    model = tiny(weight_decay=decay, zero_init_residual=False)
    with tf.GradientTape() as tape:
        penalty = tf.add_n(model.losses)
    gradients = tape.gradient(penalty, [v.value for v in model.trainable_variables])
    decayed = []
    for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
        if gradient is not None:
            decayed.append(variable)
            np.testing.assert_allclose(gradient, decay * variable.numpy(), rtol=1e-6)
    assert [v.path for v in decayed] == [
        v.path for v in model.trainable_variables if v.name == "kernel"
    ]
    expected = decay / 2 * sum(np.sum(v.numpy().astype("float64") ** 2) for v in decayed)
    assert float(penalty) == pytest.approx(expected, rel=1e-5)


def test_without_decay_or_zero_gamma():
    model = tiny(zero_init_residual=False)
    assert model.losses == []
    gammas = [x.gamma for x in model.layers if isinstance(x, keras.layers.BatchNormalization)]
    assert all(np.all(gamma.numpy() == 1.0) for gamma in gammas)


def test_strided_convolution_is_centred_on_even_pixels():
    model = tiny()
    conv = model.get_layer("stage2_block1_conv1")
    centre = np.zeros(conv.kernel.shape, "float32")
    centre[1, 1, 2, 5] = 1.0
    conv.set_weights([centre])
    before = model.get_layer("stage1_block1_out").output
    x, y = (np.asarray(v) for v in keras.Model(model.input, [before, conv.output])(IMAGES))
    np.testing.assert_array_equal(y[..., 5], x[:, ::2, ::2, 2])


def test_a_seed_decides_all_weights_whatever_was_drawn_before():
    keras.utils.set_random_seed(1)
    first = tiny(seed=5).get_weights()
    keras.utils.set_random_seed(2)
    tiny()
    second = tiny(seed=np.int64(5), name="other").get_weights()
    other = tiny(seed=6).get_weights()
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)
    kernels = [i for i, weight in enumerate(first) if weight.ndim > 1]
    assert all(np.any(first[i] != other[i]) for i in kernels)
    flat = {weight.tobytes() for weight in (first[i] for i in kernels)}
    assert len(flat) == len(kernels)  # layers of one shape differ


def test_deeper_networks_share_the_weights_of_equal_names():
    shallow, deep = tiny(seed=5), tiny(seed=5, depth=14)
    for name in ("stem_conv", "stage3_block1_conv2", "classifier"):
        a, b = (model.get_layer(name).kernel.numpy() for model in (shallow, deep))
        np.testing.assert_array_equal(a, b)


def test_without_a_seed_the_global_one_decides():
    def draw(seed: int) -> np.ndarray:
        keras.utils.set_random_seed(seed)
        return tiny().get_layer("stage3_block1_conv2").kernel.numpy()

    np.testing.assert_array_equal(draw(1), draw(1))
    assert np.any(draw(1) != draw(2))


@pytest.mark.parametrize(
    ("policy", "conv", "logits"),
    [
        ("mixed_float16", "float16", "float32"),
        ("mixed_bfloat16", "bfloat16", "float32"),
        ("float64", "float64", "float64"),
    ],
)
def test_dtype_policy(policy, conv, logits):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        model = tiny(weight_decay=1e-4)
    finally:
        keras.config.set_dtype_policy(before)
    assert model.get_layer("stage1_block1_conv1").output.dtype == conv
    assert model(IMAGES).dtype == logits
    assert {v.dtype for v in model.variables} == {logits}
    assert tf.add_n(model.losses).dtype == logits


def test_learns_by_heart():
    labels = np.arange(16) % 4
    model = ResNetSmall(4, input_shape=(None, None, 1), seed=0)
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    losses = model.fit(IMAGES, labels, batch_size=16, epochs=25, verbose=0).history["loss"]
    assert losses[0] == pytest.approx(math.log(4), abs=0.1)
    assert losses[-1] < 0.2
