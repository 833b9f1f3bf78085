"""Batch norm's moving statistics, averaged over all replicas before anybody uses them."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_largebatch.callbacks._callbacks_in_use import callbacks_in_use
from tf_largebatch.core.batch_norm import (
    LARGEST_INITIAL_WEIGHT,
    batch_norm_momentum_advice,
    initial_weight,
)
from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.core.scaling import require_count
from tf_largebatch.normalization._moving_statistics import (
    layers_with_moving_statistics,
    pool_over_workers,
    read_statistics,
    write_statistics,
)

_SAVERS = (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore)


class BatchNormSync(keras.callbacks.Callback):
    """Makes batch norm's moving statistics equal on all replicas before evaluation and saving.

    In training each replica normalises by the statistics of its own n rows and keeps moving ones of
    its own (Goyal et al. 2017, section 2.3, who say nothing of which are evaluated), so evaluation
    and the saved model would depend on the rank (pytorch 13711, horovod 151). Here, over the R
    replicas of all workers, bit by bit the same everywhere:

        moving_mean     <- mean_r(mean_r)
        moving_variance <- mean_r(variance_r) + mean_r((mean_r - moving_mean)^2)

    the variance of all replicas' rows, by the law of total variance. The second term is the shift
    between the replicas' means, which a mean of variances loses: where replicas read different
    data, inputs in evaluation vary by it too. Without such a shift it is small. It is not counted
    twice when this is done again: after t more steps with momentum m, m^t of the pooled variance
    and of the common mean are left, so that the term stays at `(1 - m^t)` times the shift's
    variance: all of it, for epochs that are longer than a few times `1 / (1 - m)` steps.

    When: at the start of an evaluation, at the end of an epoch, every `every_steps` steps if asked
    for, and at the end of training; each time only if a batch was trained since the last. That is
    one collective of the workers each time, whatever the number of layers. Training itself is not
    changed, as it does not use moving statistics. Layers: every one with `moving_mean` and
    `moving_variance`, however deep. With one replica there is nothing to do.

    Keras calls callbacks in the order of the list, so this one must stand before those that save or
    evaluate; it is needed on every worker.

    When training begins it also warns of a momentum that is too high for the number of steps: when
    the moving averages will still hold more than a thousandth of their initial values at the end
    (keras 7177, 3949). See `Recipe.batch_norm_momentum`, `recalibrate_batch_norm`.

    Args:
        every_steps: also after so many batches, counted as `ModelCheckpoint(save_freq=...)` counts
            them, for callbacks that save within an epoch. Default None: not within an epoch. With
            `steps_per_execution` above 1 at the first call that reaches the number.

    Raises:
        ConfigurationError: `every_steps` is no integer of 1 or more. When training begins, if a
            callback of Keras that saves stands before this one, or a layer has `renorm=True`.
            When statistics are pooled, if the model has replicas on other workers under another
            strategy than `LargeBatchStrategy`.
    """

    def __init__(self, *, every_steps: int | None = None) -> None:
        super().__init__()
        self.every_steps = (
            None if every_steps is None else require_count("every_steps", every_steps)
        )
        self._differ = True  # as far as is known
        self._batches = 0
        self._last_batch = -1

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Checks the order of callbacks, and the momentum against the steps to come."""
        _refuse_savers_in_front(self, callbacks_in_use())
        layers = layers_with_moving_statistics(self.model)
        steps, epochs = self.params.get("steps"), self.params.get("epochs")
        if steps and epochs:
            done = int(tf.convert_to_tensor(self.model.optimizer.iterations))
            _warn_of_momentum(layers, done + steps * epochs)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._last_batch = -1

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts batches, of which Keras reports the last of each call."""
        self._differ = True
        self._batches += batch - self._last_batch
        self._last_batch = batch
        if self.every_steps is not None and self._batches >= self.every_steps:
            self._batches = 0
            self._synchronise()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Before callbacks further down the list save; validation has been before."""
        self._synchronise()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Before validation, or an evaluation of its own."""
        self._synchronise()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """For a training that was stopped within an epoch."""
        self._synchronise()

    def _synchronise(self) -> None:
        strategy = self.model.distribute_strategy
        # All workers train the same batches, and so come to the same answer.
        if not self._differ or strategy.num_replicas_in_sync == 1:
            return
        layers = layers_with_moving_statistics(self.model)
        if layers:
            parts = read_statistics(layers)
            write_statistics(layers, *pool_over_workers(strategy, parts, np.ones(len(parts))))
        self._differ = False


def _refuse_savers_in_front(mine: BatchNormSync, in_use: Sequence[Any]) -> None:
    for other in in_use:
        if other is mine:
            return
        # Within a callback that wraps another, such as one for the chief alone, it is that.
        inner = getattr(other, "callback", other)
        if isinstance(inner, _SAVERS):
            raise ConfigurationError(
                f"{type(inner).__name__} stands before BatchNormSync in callbacks, and would save "
                "moving statistics of one replica alone. Put BatchNormSync first."
            )


def _warn_of_momentum(layers: Sequence[Any], steps: int) -> None:
    """One warning for each momentum that is too high."""
    by_momentum: dict[float, int] = defaultdict(int)
    for layer in layers:
        momentum = getattr(layer, "momentum", None)
        if layer.trainable and isinstance(momentum, float):
            by_momentum[momentum] += 1
    for momentum, count in sorted(by_momentum.items()):
        share = initial_weight(momentum, steps)
        if share > LARGEST_INITIAL_WEIGHT:
            warnings.warn(
                f"Training ends after {steps} steps, and the moving statistics of {count} "
                f"batch-norm layers with momentum={momentum:g} will still hold {share:.1%} of "
                "their initial values, so that evaluation is far from training. Use "
                f"momentum={batch_norm_momentum_advice(steps):.3g}, or call "
                "tf_largebatch.normalization.recalibrate_batch_norm when training is over.",
                stacklevel=2,
            )
