"""A training that one worker wants to stop, stopped on all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from tf_largebatch.callbacks._running_fit import EPOCH_IS_OVER, callbacks_in_use
from tf_largebatch.callbacks._worker_wishes import WorkerWishes
from tf_largebatch.core.errors import ConfigurationError


class StopTogether(keras.callbacks.Callback):
    """Stops training on all workers, after the same step, when any of them asks for it.

    Callbacks that decide by the logs (`EarlyStopping`, `TerminateOnNaN`) come to the same decision
    on all workers, as the logs are equal, and need this not. One that decides by what its own
    worker alone knows, such as the time, a file or a signal, sets `model.stop_training` there, and
    the others would wait for that worker in the next step (horovod 3140). With this callback, last
    in the list on every worker, all stop: one step later, or, where it was asked for at the end of
    an epoch, at once.

    It costs nothing within an epoch (the question travels with the step's metrics), and one
    collective at the end of each.

    Raises:
        ConfigurationError: when training begins, if a callback that may set `stop_training` stands
            behind this one, or `TrainingState` before it.
    """

    needs_every_worker = True

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Checks its place in the list."""
        _refuse_callbacks_behind(self, callbacks_in_use())
        self._wishes = WorkerWishes(self.model.distribute_strategy)
        self._waits = False  # for the next step, to tell the others

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Takes a wish to stop back until the next step has carried it to all."""
        if self._is_asked_for():
            self._wishes.wish("stop")
            self._waits = True
            self.model.stop_training = False
        if self._wishes.take("stop"):
            self._waits = False
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Asks all."""
        stops = self._waits or self._is_asked_for()
        self.model.stop_training = self._wishes.any_worker(
            stops, purpose="end of an epoch: stop training?"
        )
        self._waits = False
        self._wishes.withdraw("stop")

    def _is_asked_for(self) -> bool:
        stop = self.model.stop_training
        return bool(stop) and stop is not EPOCH_IS_OVER


def _refuse_callbacks_behind(mine: StopTogether, in_use: Sequence[Any]) -> None:
    harmless = (keras.callbacks.History, keras.callbacks.ProgbarLogger)
    place = in_use.index(mine) if mine in in_use else len(in_use)
    for other in in_use[place + 1 :]:
        if not (isinstance(other, harmless) or getattr(other, "needs_every_worker", False)):
            raise ConfigurationError(
                f"{type(other).__name__} stands behind StopTogether, which would not see that it "
                "stops the training. Put StopTogether last, with only TrainingState behind it."
            )
    for other in in_use[:place]:
        if getattr(other, "ends_epochs_early", False):
            raise ConfigurationError(
                f"{type(other).__name__} ends a resumed epoch where it is complete, which "
                f"StopTogether behind it would undo. Put {type(other).__name__} last."
            )
