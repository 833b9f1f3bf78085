"""Which gammas start at zero: our own networks, Keras' and made-up graphs."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers as kl

from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.models import ResNet50, ResNetSmall, zero_init_residual
from tf_largebatch.normalization import GhostBatchNormalization


def zero_norms(model: keras.Model) -> list[str]:
    return [
        layer.name
        for layer in model._flatten_layers()
        if isinstance(layer, kl.BatchNormalization)
        and layer.scale
        and not layer.gamma.numpy().any()
    ]


@pytest.mark.parametrize("build", [ResNet50, ResNetSmall], ids=lambda x: x.__name__)
def test_the_choice_is_that_of_our_own_networks(build: Any) -> None:
    ours = build(2, input_shape=(32, 32, 3), seed=1)
    model = build(2, input_shape=(32, 32, 3), seed=1, zero_init_residual=False)
    touched = zero_init_residual(model)
    assert sorted(layer.name for layer in touched) == sorted(zero_norms(ours)) != []
    for weight, expected in zip(model.get_weights(), ours.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, expected)
    assert zero_init_residual(model) == touched  # once more changes nothing


def test_resnet50_of_keras() -> None:
    model = keras.applications.ResNet50(weights=None, input_shape=(32, 32, 3), classes=2)
    names = [layer.name for layer in zero_init_residual(model)]
    counts = {2: 3, 3: 4, 4: 6, 5: 3}
    assert names == [
        f"conv{stage}_block{block}_3_bn"
        for stage, count in counts.items()
        for block in range(1, count + 1)
    ]
    assert sorted(zero_norms(model)) == sorted(names)


def unit(x: Any, name: str, *, norm: Any = kl.BatchNormalization) -> Any:
    return norm(name=name)(kl.Dense(4)(x))


def built(make: Any) -> keras.Model:
    """A model around `make(x)`, `x` with a kernel and a norm before it."""
    inputs = keras.Input((4,))
    return keras.Model(inputs, make(kl.ReLU()(unit(inputs, "stem"))))


def two_units(x: Any, first: str = "first", last: str = "last") -> Any:
    return unit(kl.ReLU()(unit(x, first)), last)


class StochasticDepth(keras.layers.Layer):
    def call(self, inputs: Any) -> Any:
        return inputs


def nested(make: Any, name: str) -> Any:
    inputs = keras.Input((4,))
    return keras.Model(inputs, make(inputs), name=name)


def ghost(name: str) -> GhostBatchNormalization:
    return GhostBatchNormalization(4, name=name)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda x: kl.Add()([two_units(x), x]), ["last"]),
        (lambda x: x + two_units(x), ["last"]),
        (lambda x: keras.ops.add(two_units(x), x), ["last"]),
        (lambda x: kl.Add()([unit(x, "shortcut"), two_units(x)]), ["last"]),
        (lambda x: x + kl.Dropout(0.5)(two_units(x)), ["last"]),
        (lambda x: x + StochasticDepth()(two_units(x)), ["last"]),
        (lambda x: x + unit(unit(x, "first"), "last", norm=ghost), ["last"]),
        (lambda x: kl.Add()([x, unit(x, "a"), two_units(x)]), ["a", "last"]),
        # The gate of squeeze-and-excitation hangs on the branch itself.
        (
            lambda x: x + (lambda y: y * kl.Dense(4, activation="sigmoid")(y))(two_units(x)),
            ["last"],
        ),
        # The branch, the block, or both, as models of their own.
        (lambda x: x + nested(two_units, "branch")(x), ["last"]),
        (lambda x: nested(lambda y: y + two_units(y), "block")(x), ["last"]),
        (
            lambda x: (
                x
                + keras.Sequential(
                    [kl.Dense(4), kl.BatchNormalization(name="last"), kl.Dropout(0.1)]
                )(x)
            ),
            ["last"],
        ),
        # A branch that ends in something else has none; its neighbour has.
        (lambda x: (y := x + two_units(x)) + kl.ReLU()(two_units(y, "b", "c")), ["last"]),
        # The projection ends in a norm and the branch does not.
        (
            lambda x: (lambda y: unit(y, "p") + kl.Dense(4)(kl.Dense(4)(y)))(x + two_units(x)),
            ["last"],
        ),
    ],
)
def test_made_up_graphs(make: Any, expected: list[str]) -> None:
    model = built(make)
    assert [layer.name for layer in zero_init_residual(model)] == expected
    assert sorted(zero_norms(model)) == sorted(expected)


class Block(keras.layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.last_norm = kl.Dense(4), kl.BatchNormalization(name="last_norm")

    def call(self, x: Any) -> Any:
        return x + self.last_norm(self.dense(x))


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = [Block(), Block()]

    def call(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


def test_a_subclassed_model_names_its_layers() -> None:
    model, x = Subclassed(), np.ones((2, 4), "float32")
    norms = [block.last_norm for block in model.blocks]
    with pytest.raises(ConfigurationError, match="not built"):
        zero_init_residual(model, layers=norms)
    model(x)
    with pytest.raises(ConfigurationError, match=r"layers=\[block.last_norm for block"):
        zero_init_residual(model)
    assert zero_init_residual(model, layers=norms) == norms
    np.testing.assert_array_equal(model(x), x)  # each block is its shortcut


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: unit(x, "a") + unit(x, "b"), "not clear which path is the shortcut"),
        (lambda x: Block()(x), "has batch norms within and no graph"),
        (lambda x: two_units(x), "no residual branch"),
        (lambda x: x + kl.ReLU()(two_units(x)), "no residual branch"),
        (lambda x: x + kl.Dense(4)(kl.ReLU()(unit(x, "pre"))), "no residual branch"),
        (
            lambda x: x + kl.BatchNormalization(scale=False, name="bare")(kl.Dense(4)(x)),
            "bare has no gamma",
        ),
    ],
)
def test_graphs_that_do_not_tell(make: Any, message: str) -> None:
    model = built(make)
    with pytest.raises(ConfigurationError, match=message):
        zero_init_residual(model)
    assert zero_norms(model) == []


@pytest.mark.parametrize("weight", ["gamma", "beta", "moving_mean", "moving_variance"])
def test_loaded_weights_are_not_touched(weight: str) -> None:
    model = built(lambda x: (y := x + two_units(x)) + two_units(y, "third", "fourth"))
    getattr(model.get_layer("fourth"), weight).assign([1.0, 0.5, 1.0, 1.0])
    before = model.get_weights()
    with pytest.raises(ConfigurationError, match="fourth does not hold its initial values"):
        zero_init_residual(model)
    for value, old in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, old)


def test_a_model_that_was_trained_is_not_touched() -> None:
    """A frozen batch norm keeps its initial values; the model is not new all the same."""
    model = built(lambda x: x + two_units(x))
    model.get_layer("last").trainable = False
    model.compile("sgd", "mse")
    model.fit(np.ones((4, 4)), np.ones((4, 4)), verbose=0)
    with pytest.raises(ConfigurationError, match="by 1 updates"):
        zero_init_residual(model)


def test_a_single_layer_can_be_named() -> None:
    model = built(lambda x: x + two_units(x))
    assert zero_init_residual(model, layers=model.get_layer("first")) == [model.get_layer("first")]
    assert zero_norms(model) == ["first"]


def test_layers_that_cannot_be_named() -> None:
    model = built(lambda x: x + two_units(x))
    stranger = kl.BatchNormalization(name="stranger")
    with pytest.raises(ConfigurationError, match="stranger is not a layer of model"):
        zero_init_residual(model, layers=[stranger])
    with pytest.raises(ConfigurationError, match="not a BatchNormalization"):
        zero_init_residual(model, layers=[model.layers[1]])
    with pytest.raises(ConfigurationError, match="'last' is not a layer"):
        zero_init_residual(model, layers=["last"])
