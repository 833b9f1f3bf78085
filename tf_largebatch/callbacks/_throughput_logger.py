"""Speed and learning rate of each epoch, in the logs."""

from __future__ import annotations

import math
import time
from typing import Any

import keras
import tensorflow as tf

from tf_largebatch.core.recipe import Recipe, checked_recipe
from tf_largebatch.optimizers._loss_scale_optimizer import innermost


class ThroughputLogger(keras.callbacks.Callback):
    """Adds "images_per_second" and "learning_rate" to the logs of each epoch.

    The speed is of all workers together, examples trained by the seconds of training alone: they
    end where validation begins. The rate is that of the epoch's last update, which a schedule keeps
    to itself (keras 16087), and `optimizer.learning_rate` no longer shows: it is one update ahead.
    Where the optimizer does not follow the recipe, it is the optimizer's own, of the next update;
    where a callback has logged one already, as `LearningRateWarmup` does, that stays.

    Put it before callbacks that write logs (`CSVLogger`, `TensorBoard`), on every worker or on the
    chief alone: it takes part in no collective. Each worker measures its own time.

    Args:
        recipe: the `Recipe` of the run.

    Raises:
        ConfigurationError: `recipe` is no `Recipe`.
    """

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = checked_recipe(recipe)
        self._started_at = 0.0
        self._seconds: float | None = None
        self._batches = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Starts the clock."""
        self._started_at = time.perf_counter()
        self._seconds = None
        self._batches = 0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts: Keras reports the last batch of each call."""
        self._batches = batch + 1

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Stops the clock, at the first evaluation of the epoch."""
        self._seconds = self._seconds or time.perf_counter() - self._started_at

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Logs both."""
        if logs is None:
            return
        seconds = self._seconds or time.perf_counter() - self._started_at
        rows = self.recipe.per_replica_batch_size * self.recipe.num_replicas
        logs["images_per_second"] = self._batches * rows / seconds
        logs.setdefault("learning_rate", self._last_learning_rate())

    def _last_learning_rate(self) -> float:
        optimizer = innermost(self.model.optimizer)
        updates = int(tf.convert_to_tensor(optimizer.iterations))
        next_rate = float(tf.convert_to_tensor(optimizer.learning_rate))
        follows = math.isclose(next_rate, self.recipe.learning_rate_at(updates), rel_tol=1e-5)
        return self.recipe.learning_rate_at(updates - 1) if follows and updates else next_rate
