"""A callback that writes, on one worker of many."""

from __future__ import annotations

from typing import Any

import keras

from tf_largebatch.callbacks._running_fit import callbacks_in_use
from tf_largebatch.callbacks._stop_together import StopTogether
from tf_largebatch.core.errors import ConfigurationError

_CHANGE_TRAINING = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.EarlyStopping,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.SwapEMAWeights,
    keras.callbacks.TerminateOnNaN,
)


class ChiefOnly(keras.callbacks.Callback):
    """Any Keras callback, run on the chief alone: for those that write files or print.

    `CSVLogger`, `TensorBoard`, `ModelCheckpoint` and their like would write one path from all
    workers (raydp 447, horovod 99):

        callbacks = [
            tlb.callbacks.ChiefOnly(keras.callbacks.CSVLogger("history.csv")),
            tlb.callbacks.ChiefOnly(keras.callbacks.ModelCheckpoint("best.keras", ...)),
        ]

    Logs are equal on all workers, so that nothing is lost. A callback that changes training, or
    that takes part in collectives, must run on every worker, or the others wait for ever or train
    another model (horovod 3140); those of Keras and of this package are refused, and another one
    that sets `model.stop_training` is found out when it does, unless there is a `StopTogether`.

    Args:
        callback: what is wrapped; also its attribute `callback`.

    Raises:
        ConfigurationError: `callback` is no Keras callback, or one that is needed on every worker.
            While training, if it stops the training on the chief alone.
    """

    def __init__(self, callback: keras.callbacks.Callback) -> None:
        super().__init__()
        if not isinstance(callback, keras.callbacks.Callback):
            raise ConfigurationError(
                f"callback={callback!r}: must be a keras.callbacks.Callback object."
            )
        if isinstance(callback, _CHANGE_TRAINING) or getattr(callback, "needs_every_worker", False):
            raise ConfigurationError(
                f"{type(callback).__name__} is needed on every worker, as it changes training or "
                "takes part in collectives. Give it to fit without ChiefOnly."
            )
        self.callback = callback
        self._is_chief = False

    def set_params(self, params: dict[str, Any]) -> None:
        """Passed on to the callback of the chief, as all that follows."""
        super().set_params(params)
        self.callback.set_params(params)

    def set_model(self, model: keras.Model) -> None:
        """Finds out whether this is the chief."""
        super().set_model(model)
        self._is_chief = model.distribute_strategy.extended.should_checkpoint
        if self._is_chief:
            self.callback.set_model(model)

    def _call(self, hook: str, *arguments: Any) -> None:
        if not self._is_chief:
            return
        before = getattr(self.model, "stop_training", False)
        getattr(self.callback, hook)(*arguments)
        if getattr(self.model, "stop_training", False) is not before:
            self._check_stop()

    def _check_stop(self) -> None:
        topology = getattr(self.model.distribute_strategy, "topology", None)
        alone = topology is None or topology.num_workers == 1
        if not alone and not any(isinstance(each, StopTogether) for each in callbacks_in_use()):
            raise ConfigurationError(
                f"{type(self.callback).__name__} stops the training on the chief alone, and the "
                "other workers would wait for it. Use it on every worker, without ChiefOnly, or "
                "put a StopTogether at the end of callbacks."
            )


def _passed_on(hook: str) -> Any:
    def call(self: ChiefOnly, *arguments: Any, **named: Any) -> None:
        self._call(hook, *arguments, *named.values())

    call.__name__ = hook
    call.__doc__ = f"See `keras.callbacks.Callback.{hook}`."
    return call


for _hook in [name for name in vars(keras.callbacks.Callback) if name.startswith("on_")]:
    setattr(ChiefOnly, _hook, _passed_on(_hook))
