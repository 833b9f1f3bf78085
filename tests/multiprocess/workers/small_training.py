"""A small training, and what happens in the midst of it, for clusters that fail."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from forked_cluster import Cluster

import tf_largebatch as tlb

# Where waits are not what is tested: enough for a machine that is busy with other tests.
LONG_SECONDS = 60.0
START_SECONDS = 3.0
WAIT_SECONDS = 5.0
ALL_REDUCE = "tensorflow"  # which measures nothing at start
Ends = dict[int, dict[str, Any]]

assert tlb.LargeBatchStrategy  # the package is lazy: imported here, once for all forks


def new_strategy(
    *,
    all_reduce: str = ALL_REDUCE,
    start_timeout_seconds: float = LONG_SECONDS,
    timeout_seconds: float = LONG_SECONDS,
) -> tlb.LargeBatchStrategy:
    strategy = tlb.LargeBatchStrategy(
        all_reduce=all_reduce,
        start_timeout_seconds=start_timeout_seconds,
        timeout_seconds=timeout_seconds,
    )
    print("STARTED", flush=True)
    return strategy


def join(*clusters: Cluster) -> list[Ends]:
    """Ends of clusters that run side by side, to wait once rather than one after the other."""
    return [cluster.join() for cluster in clusters]


class Acts(keras.callbacks.Callback):
    """Tells that training goes on, and calls `act` after the batch of that number."""

    def __init__(self, act: Callable[[], None], *, after_batch: int) -> None:
        super().__init__()
        self._act = act
        self._left = after_batch

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        self._left -= 1
        if self._left == 0:
            self._act()


def compiled_model(
    strategy: tlb.LargeBatchStrategy,
    *,
    widths: tuple[int, ...] = (4,),
    metrics: tuple[str, ...] = (),
    optimizer: str = "sgd",
) -> keras.Model:
    with strategy.scope():
        layers = [keras.layers.Dense(width) for width in (*widths, 1)]
        model = keras.Sequential([keras.Input((3,)), *layers])
        model.compile(optimizer, "mse", metrics=list(metrics))
    return model


def batches(rows: int = 32, batch_size: int = 8) -> tf.data.Dataset:
    x = np.linspace(0.0, 1.0, 3 * rows, dtype=np.float32).reshape(rows, 3)
    return tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(batch_size)


class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        time.sleep(0.02)
