"""Numbered rows, a model that records which of them it is trained on, a stand-in strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_largebatch.data import ArraySource


def numbered_rows(count: int) -> ArraySource:
    """Row `i` is `(i, i % 2)`."""
    rows = np.arange(count, dtype=np.float32)[:, None]
    return ArraySource((rows, rows % 2))


class RecordRows(keras.layers.Layer):
    """Hands its input on, and appends the row numbers of each training batch to `batches`."""

    def __init__(self, batches: list[list[int]]) -> None:
        super().__init__()
        self._append = batches.append  # Keras would replace a list by a tracked copy

    def call(self, inputs, training=False):
        if not training:
            return inputs

        def record(rows: np.ndarray) -> np.ndarray:
            self._append(rows[:, 0].astype(int).tolist())
            return rows

        recorded = tf.numpy_function(record, [inputs], tf.float32)
        recorded.set_shape(inputs.shape)
        return recorded


def recording_model(
    *, built: bool, steps_per_execution: int = 1
) -> tuple[keras.Model, list[list[int]]]:
    """A model that returns its input, at a learning rate of 0, and the batches it trains on."""
    batches: list[list[int]] = []
    layers = [RecordRows(batches), keras.layers.Dense(1, kernel_initializer="ones")]
    if built:
        layers.insert(0, keras.Input([1]))
    model = keras.Sequential(layers)
    model.compile(
        optimizer=keras.optimizers.SGD(0.0),
        loss="mse",
        jit_compile=False,
        steps_per_execution=steps_per_execution,
    )
    return model, batches


class OneWorkerOf:
    """Calls the function of a distributed data set as worker `index` of several would."""

    def __init__(self, *, index: int, workers: int, local_replicas: int) -> None:
        self.num_replicas_in_sync = workers * local_replicas
        self._context = tf.distribute.InputContext(workers, index, self.num_replicas_in_sync)

    def distribute_datasets_from_function(self, dataset_fn: Callable[..., Any]) -> Any:
        return dataset_fn(self._context)
