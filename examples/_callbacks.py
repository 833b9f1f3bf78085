"""What is recorded at the end of each epoch."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

import tf_largebatch as tlb


class EpochLog(keras.callbacks.Callback):
    """Adds `learning_rate`, as applied in the epoch's last update, and `images_per_second`.

    The time is that of training alone: it ends where validation begins. Runs on every worker, in
    front of the callbacks that write, so that they see both.
    """

    def __init__(self, recipe: tlb.Recipe) -> None:
        super().__init__()
        self._recipe = recipe
        self._started_at = 0.0
        self._seconds: float | None = None

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._started_at = time.perf_counter()
        self._seconds = None

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._seconds = time.perf_counter() - self._started_at

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        seconds = self._seconds or time.perf_counter() - self._started_at
        images = self._recipe.steps_per_epoch * self._recipe.global_batch_size
        updates = int(tf.convert_to_tensor(self.model.optimizer.iterations))
        if logs is not None:
            logs["learning_rate"] = self._recipe.learning_rate_at(updates - 1)
            logs["images_per_second"] = images / seconds


def epoch_callbacks(
    recipe: tlb.Recipe, run_dir: Path, *, is_chief: bool
) -> list[keras.callbacks.Callback]:
    """Returns the callbacks of one worker; only the chief's write.

    BatchNormSync takes part in a collective, so all have it; none of those that write does.
    """
    callbacks: list[keras.callbacks.Callback] = [tlb.callbacks.BatchNormSync(), EpochLog(recipe)]
    if is_chief:
        callbacks += [
            keras.callbacks.CSVLogger(str(run_dir / "history.csv")),
            keras.callbacks.TensorBoard(str(run_dir / "tensorboard"), write_graph=False),
        ]
    return callbacks
