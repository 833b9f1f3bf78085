"""Which variables neither decay nor have a layer-wise rate: found, stored, reloaded, reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.optimizers._oracle import trained
from tf_largebatch.core.errors import ConfigurationError, ProgramOrderError
from tf_largebatch.optimizers import LARS, LossScaleOptimizer, MomentumSGD

LAYERS = keras.layers
RNG = np.random.default_rng(0)


@keras.saving.register_keras_serializable(package="test_exclusions")
class Block(LAYERS.Layer):
    """A layer of layers: an embedding, and a normalisation over two axes, with gamma of rank 2."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.embedding = LAYERS.Embedding(5, 3)
        self.norm = LAYERS.LayerNormalization(axis=(1, 2))
        self.dense = LAYERS.Dense(4)

    def build(self, input_shape: Any) -> None:
        self.embedding.build(input_shape)
        self.norm.build((None, 2, 3))
        self.dense.build((None, 2, 3))
        self.built = True

    def call(self, inputs: Any) -> Any:
        return self.dense(self.norm(self.embedding(inputs)))


@keras.saving.register_keras_serializable(package="test_exclusions")
class Subclassed(keras.Model):
    """A block within a model within a model."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.inner = keras.Sequential([keras.Input((2,)), Block()])
        self.head = LAYERS.Dense(1)

    def build(self, input_shape: Any) -> None:
        self.inner.build(input_shape)
        self.head.build((None, 2, 4))
        self.built = True

    def call(self, inputs: Any) -> Any:
        return self.head(self.inner(inputs))


ODD_ONES = (LAYERS.Embedding, LAYERS.LayerNormalization)
RANK_TWO = ("embeddings", "gamma", "beta")  # their variables


def nested_model() -> keras.Model:
    model = Subclassed()
    model.build((None, 2))
    return model


def gradients_of(model: keras.Model) -> list[Any]:
    return [RNG.normal(size=tuple(v.shape)).astype("float32") for v in model.trainable_variables]


def apply(optimizer: Any, model: keras.Model, gradients: list[Any]) -> list[Any]:
    optimizer.apply([tf.constant(g) for g in gradients], model.trainable_variables)
    return [variable.numpy() for variable in model.trainable_variables]


def positions(model: keras.Model) -> list[int]:
    names = [variable.name for variable in model.trainable_variables]
    return [i for i, name in enumerate(names) if name in RANK_TWO]


@pytest.mark.parametrize("kind", [LARS, MomentumSGD])
@pytest.mark.parametrize("way", ["types", "list of types", "layers", "variables", "names"])
def test_excluded_ones_are_trained_by_plain_momentum_sgd(kind, way):
    model = nested_model()
    block = model.inner.layers[-1]
    optimizer = kind(0.1, weight_decay=0.3)
    odd = [model.trainable_variables[i] for i in positions(model)]
    if way == "types":
        optimizer.exclude(model, layer_types=ODD_ONES)
    elif way == "list of types":
        optimizer.exclude(model, layer_types=list(ODD_ONES))
    elif way == "layers":
        optimizer.exclude([block.embedding, block.norm])
    elif way == "variables":
        optimizer.exclude(odd[0])
        optimizer.exclude_from_weight_decay(var_list=odd[1:])
    else:
        optimizer.exclude_from_weight_decay(var_names=["embedding", "/gamma$", "/beta$"])
    starts = [variable.numpy() for variable in model.trainable_variables]
    gradients = gradients_of(model)
    found = apply(optimizer, model, gradients)
    trust = 0.001 if kind is LARS else None
    settings = {"decay": 0.3, "trust": trust}
    expected = trained(starts, [gradients], [0.1], excluded=positions(model), **settings)
    assert len(positions(model)) == 3
    for ours, oracle in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, oracle, rtol=1e-5, atol=1e-6)


def test_the_report_names_all_variables_and_reasons():
    model = nested_model()
    block = model.inner.layers[-1]
    optimizer = LARS(0.1)
    optimizer.exclude(model, layer_types=LAYERS.Embedding)
    optimizer.exclude_from_weight_decay(var_names=["/gamma$"])
    optimizer.build(model.trainable_variables)
    first, *lines = optimizer.exclusion_report().splitlines()
    # beta (2, 3), kernels (3, 4) and (4, 1); beside them 15 + 6 + 4 + 1.
    assert first == "3 of 7 variables, 22 of 48 elements, are adapted and decayed:"
    by_name = {line.split()[1].split("/", 1)[-1]: line for line in lines}
    assert len(by_name) == 7
    (embedding,) = [line for line in lines if "embeddings" in line]
    assert embedding.split()[0] == "no" and f"Embedding {block.embedding.name!r}" in embedding
    (gamma,) = [line for line in lines if "/gamma" in line]
    assert gamma.split()[0] == "no" and "path matches '/gamma$'" in gamma
    (beta,) = [line for line in lines if "/beta" in line]
    assert beta.split()[0] == "yes" and "two or more dimensions" in beta
    assert [line.split()[0] for line in lines if "/bias" in line] == ["no", "no"]
    assert "one dimension or none" in next(line for line in lines if "/bias" in line)


def test_the_report_says_when_nothing_decays():
    model = nested_model()
    optimizer = MomentumSGD(0.1)
    optimizer.build(model.trainable_variables)
    assert "weight_decay is 0" in optimizer.exclusion_report().splitlines()[0]


# Keras warns that an optimizer which is not built has no state to load.
@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer")
@pytest.mark.parametrize("built", [True, False])
@pytest.mark.parametrize("scaled", [False, True])
def test_exclusions_are_saved_with_the_model(tmp_path: Path, built: bool, scaled: bool):
    model = nested_model()
    optimizer = LARS(0.1, weight_decay=0.3)
    optimizer.exclude(model, layer_types=ODD_ONES)
    model.compile(LossScaleOptimizer(optimizer) if scaled else optimizer, "mse")
    if built:
        model.optimizer.build(model.trainable_variables)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    paths = [[v.path for v in each.trainable_variables] for each in (model, loaded)]
    assert not set(paths[0]) & set(paths[1])  # Keras has counted up the names of layers
    inner = loaded.optimizer.inner_optimizer if scaled else loaded.optimizer
    assert inner.exclusion_report().count("excluded: ") == 3
    treated = [v for v in loaded.trainable_variables if not inner.is_excluded(v)]
    assert [v.name for v in treated] == ["kernel", "kernel"]


@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer")
def test_exclusions_of_one_layer_are_found_again_by_path(tmp_path: Path):
    # Saved before the optimizer is built, when nothing but paths is known; and loaded by a route
    # that drops the first part of them.
    model = keras.Sequential(
        [keras.Input((2,)), LAYERS.Embedding(4, 3, name="words"), LAYERS.Dense(3, name="words_out")]
    )
    optimizer = MomentumSGD(0.1, weight_decay=0.1)
    optimizer.exclude(model.layers[0])
    model.compile(optimizer, "mse")
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    excluded = [v.path for v in loaded.trainable_variables if loaded.optimizer.is_excluded(v)]
    assert [path.split("/")[-2:] for path in excluded] == [
        ["words", "embeddings"],
        ["words_out", "bias"],
    ]


def functional(*sizes: int) -> keras.Model:
    x = inputs = keras.Input((4,))
    for i, size in enumerate(sizes):
        x = LAYERS.Dense(size, name=f"dense_{i}")(x)
    return keras.Model(inputs, x)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((4, 4), r"dense_2/kernel \(4, 4\), number 4 of 6 variables; this model has 4, and .*none"),
        (
            (4, 4, 5),
            r"number 4 of 6 variables; this model has 6, and there dense_2/kernel \(4, 5\)",
        ),
    ],
)
@pytest.mark.parametrize("built", [True, False])
def test_another_models_exclusions_are_refused(sizes, words, built):
    model = functional(4, 4, 4)
    optimizer = LARS(0.1)
    optimizer.exclude(model.get_layer("dense_2") if built else model.layers[1:])
    if built:
        optimizer.build(model.trainable_variables)
    else:
        words = words.replace("number 4 of 6", "number None of None")
    again = LARS.from_config(optimizer.get_config())
    with pytest.raises(ConfigurationError, match=words):
        again.build(functional(*sizes).trainable_variables)


# Layers of equal shapes, so that only their places tell them apart.


def three_layers() -> keras.Model:
    return keras.Sequential([keras.Input((4,)), *(LAYERS.Dense(4) for _ in range(3))])


@keras.saving.register_keras_serializable(package="test_exclusions")
class Renamed(keras.Model):
    """Its layers have no names: a reloaded model's are counted on, and none of them is frozen."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.stack = [LAYERS.Dense(4) for _ in range(3)]

    def build(self, input_shape: Any) -> None:
        for layer in self.stack:
            layer.build((None, 4))
        self.built = True

    def call(self, inputs: Any) -> Any:
        for layer in self.stack:
            inputs = layer(inputs)
        return inputs


def denses(model: keras.Model) -> list[Any]:
    return model.stack if isinstance(model, Renamed) else model.layers


def freeze(model: keras.Model, marks: str) -> None:
    """Layers with a "-" are frozen, those with a "+" are not."""
    for layer, mark in zip(denses(model), marks, strict=True):
        layer.trainable = mark == "+"


FEWER = [  # marks, number of the excluded layer, marks when it is saved, whether it is found
    ("+++", 2, "-++", True),
    ("+++", 1, "-+-", True),
    ("+++", 2, "++-", False),
    ("+++", 0, "---", False),
]
OTHERS = [  # where the optimizer knows too few: only paths help
    ("-+-", 1, "+--", False),  # as many as before, of the same shapes
    ("-++", 1, "++-", True),
    ("--+", 2, "+++", True),
]


@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer")
@pytest.mark.parametrize(
    ("make", "built", "first", "excluded", "then", "found"),
    [
        *((three_layers, built, *case) for built in (True, False) for case in FEWER + OTHERS),
        *((Renamed, True, *case) for case in FEWER),
        (Renamed, True, "-++", 2, "-+-", False),
    ],
)
def test_freezing_moves_no_exclusion(
    tmp_path: Path, make, built, first, excluded, then, found, recwarn
):
    model = make()
    model.build((None, 4))
    freeze(model, first)
    optimizer = MomentumSGD(0.1, weight_decay=0.1)
    optimizer.exclude(denses(model)[excluded])
    if built:
        optimizer.build(model.trainable_variables)
    model.compile(optimizer, "mse")
    freeze(model, then)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    trained_ones = [layer for layer in denses(loaded) if layer.trainable]
    expected = [denses(loaded)[excluded]] if found else []
    assert [x for x in trained_ones if loaded.optimizer.is_excluded(x.kernel)] == expected
    assert sum("frozen by then" in str(each.message) for each in recwarn) == (not found)


def test_a_version_to_come_is_refused():
    optimizer = LARS(0.1)
    optimizer.exclude(functional(4))
    config = optimizer.get_config()
    config["exclusions"]["version"] = 3
    with pytest.raises(ConfigurationError, match=r"version 3.* reads version 2"):
        LARS.from_config(config)


def test_patterns_and_layers_survive_a_configuration_before_build():
    model = nested_model()
    optimizer = MomentumSGD(0.1, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["gamma"])
    optimizer.exclude(model, layer_types=LAYERS.Embedding)
    config = optimizer.get_config()
    again = MomentumSGD.from_config(config)
    assert again.get_config() == config
    again.build(model.trainable_variables)
    assert again.exclusion_report().count("excluded: ") == 2


def exclude(target: Any, **options: Any) -> Any:
    return lambda optimizer: optimizer.exclude(target, **options)


def from_decay(**options: Any) -> Any:
    return lambda optimizer: optimizer.exclude_from_weight_decay(**options)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (exclude(LAYERS.Dense(3)), "no trainable variables of Dense 'dense.*build the model first"),
        (
            exclude(functional(4), layer_types=LAYERS.Embedding),
            "Embedding.*Layers with some: Dense",
        ),
        (exclude([]), r"nothing to leave out: \[\]"),
        (exclude("dense"), "takes a layer or a variable.*not 'dense'"),
        (exclude(tf.Variable(1.0), layer_types=LAYERS.Dense), "takes a model or layer"),
        (exclude(functional(4), layer_types=[]), r"in layers of \(\)\. Layers with some: Dense"),
        (
            exclude(functional(4), layer_types=["Dense"]),
            r"layer_types=\['Dense'\]: must be a class",
        ),
        (exclude(functional(4), layer_types=LAYERS.Dense(1)), r"layer_types=<Dense .*a class"),
        (from_decay(), "neither var_list nor var_names"),
        (from_decay(var_list=[], var_names=[]), "neither var_list nor var_names"),
        (from_decay(var_names=["("]), r"'\(', which is not a regular expression"),
        (from_decay(var_names=[3]), "3, which is not a regular expression"),
    ],
)
def test_what_matches_nothing_is_refused_at_once(call, words):
    with pytest.raises(ConfigurationError, match=words):
        call(MomentumSGD(0.1, weight_decay=0.1))


@pytest.mark.parametrize("kind", [LARS, MomentumSGD])
def test_what_is_not_trained_is_refused_when_built(kind):
    model, other = functional(4), functional(4)
    optimizer = kind(0.1)
    optimizer.exclude(other)
    with pytest.raises(ConfigurationError, match=r"dense_0/kernel \(4, 4\), which is not among"):
        optimizer.build(model.trainable_variables)
    optimizer = kind(0.1)
    optimizer.exclude_from_weight_decay(var_names=["dense", "embedding"])
    with pytest.raises(ConfigurationError, match="'embedding', which is found in none of"):
        optimizer.build(model.trainable_variables)


def test_calls_at_the_wrong_time_are_refused():
    model = functional(4)
    optimizer = LARS(0.1)
    with pytest.raises(ProgramOrderError, match="needs an optimizer that is built"):
        optimizer.exclusion_report()
    optimizer.build(model.trainable_variables)
    for call in (exclude(model), from_decay(var_names=["bias"])):
        with pytest.raises(ProgramOrderError, match=r"comes too late: .* with 2 variables"):
            call(optimizer)


def test_a_regulariser_of_an_excluded_variable_is_left_alone():
    layer = LAYERS.Dense(3, kernel_regularizer=keras.regularizers.L2(1e-4))
    layer.build((None, 4))
    optimizer = LARS(0.1)
    optimizer.exclude(layer)
    optimizer.build(layer.trainable_variables)
    with pytest.raises(ConfigurationError, match="weight_decay of LARS would decay 1 variables"):
        LARS(0.1).build(layer.trainable_variables)
