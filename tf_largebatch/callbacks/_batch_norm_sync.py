"""Batch norm's moving statistics, averaged over all replicas before anybody uses them."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tf_largebatch.callbacks._running_fit import callbacks_in_use, inner_callback
from tf_largebatch.core.batch_norm import (
    LARGEST_INITIAL_WEIGHT,
    batch_norm_momentum_advice,
    initial_weight,
)
from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.core.scaling import require_count
from tf_largebatch.normalization._moving_statistics import (
    components,
    layers_with_moving_statistics,
    pool_over_workers,
    read_statistics,
    write_statistics,
)

_SAVERS = tuple(
    getattr(keras.callbacks, name)
    for name in ("ModelCheckpoint", "BackupAndRestore", "OrbaxCheckpoint")
    if hasattr(keras.callbacks, name)  # the last only in newer versions of Keras
)


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
    for, and at the end of training; each time only if a batch was trained since the last, or Keras
    has just been given this callback, for `fit` or an evaluation of its own. That is one collective
    of the workers each time, whatever the number of layers. Training itself is not changed, as it
    does not use moving statistics. Layers: every one with `moving_mean` and `moving_variance`,
    however deep. With one replica there is nothing to do.

    Keras calls callbacks in the order of the list, so this one must stand before those that save or
    evaluate; it is needed on every worker.

    When the first epoch begins it also warns of a momentum that is too high for the number of
    steps: when moving averages that still are the initial ones, mean 0 and variance 1, will hold
    more than a thousandth of those at the end (keras 7177, 3949). Steps are the batches of this
    `fit`. See `Recipe.batch_norm_momentum`, `recalibrate_batch_norm`.

    Args:
        every_steps: also after so many batches, counted as `ModelCheckpoint(save_freq=...)` counts
            them, for callbacks that save within an epoch. Default None: not within an epoch. With
            `steps_per_execution` above 1 at the first call that reaches the number.

    Raises:
        ConfigurationError: `every_steps` is no integer of 1 or more. When training begins, if a
            callback of Keras that saves, or keeps the best weights (`EarlyStopping` with
            `restore_best_weights=True`), stands before this one, or a layer has `renorm=True`. When
            statistics are pooled, if the model has replicas on other workers under another strategy
            than `LargeBatchStrategy`.
    """

    def __init__(self, *, every_steps: int | None = None) -> None:
        super().__init__()
        self.every_steps = (
            None if every_steps is None else require_count("every_steps", every_steps)
        )
        self._differ = True  # as far as is known
        self._batches = 0
        self._last_batch = -1
        self._momentum_is_checked = False

    needs_every_worker = True

    def get_state(self) -> dict[str, Any]:
        """What `TrainingState` saves of it: the batches since the last time, for `every_steps`."""
        return {"batches": self._batches}

    def set_state(self, state: dict[str, Any]) -> None:
        """See `get_state`."""
        self._batches = state["batches"]

    def set_model(self, model: keras.Model) -> None:
        """The model, which may be another one, or may have been trained without this callback."""
        super().set_model(model)
        self._differ = True

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Checks the order of callbacks, and for layers that cannot be pooled."""
        _refuse_savers_in_front(self, callbacks_in_use())
        layers_with_moving_statistics(self.model)
        self._momentum_is_checked = False

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Checks the momentum in the first epoch of a `fit`, which Keras tells of nowhere else."""
        self._last_batch = -1
        steps, epochs = self.params.get("steps"), self.params.get("epochs")
        if steps and epochs and not self._momentum_is_checked:
            _warn_of_momentum(layers_with_moving_statistics(self.model), steps * (epochs - epoch))
        self._momentum_is_checked = True

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
        inner = inner_callback(other)
        if isinstance(inner, _SAVERS) or getattr(inner, "restore_best_weights", False):
            raise ConfigurationError(
                f"{type(inner).__name__} stands before BatchNormSync in callbacks, and would save "
                "moving statistics of one replica alone. Put BatchNormSync first."
            )


def _warn_of_momentum(layers: Sequence[Any], steps: int) -> None:
    """One warning for each momentum that is too high."""
    by_momentum: dict[float, int] = defaultdict(int)
    for layer in layers:
        momentum = getattr(layer, "momentum", None)
        if layer.trainable and isinstance(momentum, float) and _holds_initial_values(layer):
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


def _holds_initial_values(layer: Any) -> bool:
    return all(
        np.all(component.numpy() == value)
        for variable, value in ((layer.moving_mean, 0), (layer.moving_variance, 1))
        for component in components(variable)
    )
