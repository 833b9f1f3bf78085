"""The network of a run, compiled."""

from __future__ import annotations

import keras
import numpy as np
from _config import TrainConfig
from _datasets import Dataset

import tf_largebatch as tlb

_BUILDERS = {
    "resnet_small": tlb.models.ResNetSmall,
    "resnet18": tlb.models.ResNet18,
    "resnet34": tlb.models.ResNet34,
    "resnet50": tlb.models.ResNet50,
    "resnet101": tlb.models.ResNet101,
    "resnet152": tlb.models.ResNet152,
}


def build_model(config: TrainConfig, recipe: tlb.Recipe, dataset: Dataset) -> keras.Model:
    """Returns the network, compiled with an optimizer on the recipe's learning rates.

    Weight decay is the optimizer's, so the models get none.
    """
    options = {"depth": config.depth} if config.model == "resnet_small" else {}
    model = _BUILDERS[config.model](
        dataset.num_classes, input_shape=dataset.image_shape, seed=config.seed, **options
    )
    if dataset.pixel_mean is not None:
        model = _normalising(model, dataset)
    model.compile(
        optimizer=_optimizer(config, recipe),
        loss=tlb.losses.SparseCategoricalCrossentropy(
            from_logits=True, label_smoothing=config.label_smoothing
        ),
        metrics=["accuracy"],
    )
    return model


def _optimizer(config: TrainConfig, recipe: tlb.Recipe) -> keras.optimizers.Optimizer:
    accumulated = recipe.accumulation_steps
    options = {
        "momentum": config.momentum,
        "weight_decay": config.weight_decay,
        "gradient_accumulation_steps": accumulated if accumulated > 1 else None,
    }
    schedule = recipe.learning_rate_schedule()
    if config.optimizer == "lars":
        return tlb.optimizers.LARS(schedule, **options)
    return tlb.optimizers.MomentumSGD(schedule, nesterov=config.momentum > 0, **options)


def _normalising(model: keras.Model, dataset: Dataset) -> keras.Model:
    """The network behind a layer that takes uint8, so that a quarter of the bytes travel to it."""
    images = keras.Input(dataset.image_shape, dtype="uint8")
    pixels = keras.layers.Normalization(
        mean=dataset.pixel_mean, variance=np.square(dataset.pixel_std)
    )(images)
    return keras.Model(images, model(pixels))
