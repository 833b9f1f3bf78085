"""Saves all that a training run consists of, and takes it up again at the very step."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tf_largebatch.callbacks._callback_states import open_files
from tf_largebatch.callbacks._run_state import SavedRun, rate_of, take_state
from tf_largebatch.callbacks._run_variables import Replicas
from tf_largebatch.callbacks._running_fit import (
    EPOCH_IS_OVER,
    InitialEpoch,
    callbacks_in_use,
    inner_callback,
    running_fit,
)
from tf_largebatch.callbacks._state_agreement import agree_on_state
from tf_largebatch.callbacks._state_contents import Place
from tf_largebatch.callbacks._state_writer import StateWriter, wait_for_all_writers
from tf_largebatch.callbacks._terminate_signal import TerminateSignal
from tf_largebatch.callbacks._trained_data import TrainedData
from tf_largebatch.callbacks._worker_wishes import WorkerWishes
from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.core.scaling import require_count, require_number
from tf_largebatch.core.state_directory import StateDirectory

INTERRUPTED_EXIT_CODE = 143  # 128 + SIGTERM: schedulers start such a job again


class TrainingState(keras.callbacks.Callback):
    """Saves the whole state of a training, and resumes from it at the very step.

    Run the same script again with the same `directory`, and `fit` goes on where the newest state
    stands, however the run had ended. Where operations are deterministic, as they are on CPU, all
    that follows is the same bit by bit as if it had never been broken off: weights, learning
    rates, order of rows, logs.

        state = tlb.callbacks.TrainingState("runs/7/state", save_every_steps=500)
        model.fit(sharder.train_dataset(strategy), epochs=90, callbacks=[..., state])

    A state holds weights, optimizer (all slots, iterations, loss scale, what is accumulated),
    epoch and step, the position of the `GlobalShuffleSharder`, the metrics of the epoch so far, the
    seeds of layers such as dropout, batch norm's moving statistics of every replica, History, and
    what other callbacks remember: those of this package, Keras' `EarlyStopping`,
    `ReduceLROnPlateau`, `ModelCheckpoint`, and callbacks of your own with `get_state() -> dict` and
    `set_state(dict)`. Files of `CSVLogger` and `TensorBoard` are put back as they were, so that no
    epoch is missing or there twice (wrap both in `ChiefOnly`).

    When: at the first step of each process, so that a disk that cannot be written is found; then
    every `save_every_steps` batches or `save_every_seconds`, or, with neither, before each epoch;
    and at the end of training, after which there is nothing left to train. The chief writes, in the
    background, each state as a new file: a process killed at any moment leaves the last good one.
    Training waits while values are copied (`stall_seconds`), and for the file before, if that is
    not written yet.

    On the start all workers agree on the newest state that any of them can read. A directory of
    the chief's alone is enough, as it sends the state to the others; on a shared file system all
    read it. A state is taken only for the model, optimizer, recipe and data that it was saved
    with. The number of workers may differ, with the same global batch; then the run goes on at the
    same step, but not bit by bit.

    SIGTERM during `fit`, which SLURM and Kubernetes send before they kill: all workers save after
    the step they are in, and leave with exit code 143 (`SystemExit`), also if only one of them got
    it. During an evaluation it waits for the end of that. A second SIGTERM ends the process.

    States within epochs need a `steps_per_execution` that divides the steps of an epoch. Without
    `GlobalShuffleSharder` states are saved between epochs only, and such data must have an order
    that does not depend on what was read before, which `shuffle` and `repeat` have not. Random
    numbers of TensorFlow's global generator (`tf.random.normal` in a layer) are not saved. A
    training that is stopped within an epoch, as by a clock, is resumed there; one that is stopped
    at the end of one is over. More `epochs` than before go on from the end, thus from
    `EarlyStopping`'s best weights where it restored those. In the rest of an epoch that is resumed
    callbacks see batches numbered from 0. It may stand anywhere in the list of callbacks, on every
    worker.

    Args:
        directory: for the states, of this run alone.
        save_every_steps: batches from one state to the next.
        save_every_seconds: by the chief's clock.
        keep: how many states stay.

    Attributes:
        saves: states saved by this object.
        stall_seconds: how long they held training up, all together.

    Raises:
        ConfigurationError: an argument is out of range. When training begins, if the state is of
            another run (with both sides), if states are to be saved within epochs of data that
            were not made by a sharder, if `steps_per_epoch` is not the sharder's, or beside
            `BackupAndRestore`.
        DataError: when training begins, if there are states of which none can be read.
        StateWriteError: the disk is full, or cannot be written; older states stay.
    """

    needs_every_worker = True
    ends_epochs_early = True  # as `StopTogether` has to know

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        save_every_steps: int | None = None,
        save_every_seconds: float | None = None,
        keep: int = 2,
    ) -> None:
        super().__init__()
        self.save_every_steps = (
            None
            if save_every_steps is None
            else require_count("save_every_steps", save_every_steps)
        )
        self.save_every_seconds = (
            None
            if save_every_seconds is None
            else require_number("save_every_seconds", save_every_seconds)
        )
        self.stall_seconds = 0.0
        self.saves = 0
        self._directory = StateDirectory(directory, keep=keep)
        self._signal = TerminateSignal(self)
        self._writer = StateWriter(self._directory)

    def set_params(self, params: dict[str, Any]) -> None:
        """The last thing before training begins: takes up the newest state, if there is one.

        Here, as a state of another run must be refused before other callbacks open their files.
        """
        super().set_params(params)
        self._has_begun = False
        if running_fit(self.model) is not None:
            self._begin()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """For a list of callbacks that was put together before `fit`."""
        if not self._has_begun:
            self._begin()

    def _begin(self) -> None:
        fit = running_fit(self.model)
        if fit is None:
            raise ConfigurationError(
                "TrainingState works within fit, which it has begin at the saved step. In a loop "
                "of your own, save GlobalShuffleSharder.state() with the weights."
            )
        self._fit = fit
        self._replicas = Replicas(self.model)
        self._wishes = WorkerWishes(self.model.distribute_strategy)
        self._data = TrainedData(
            fit,
            steps=self.params["steps"],
            steps_per_execution=self.model.steps_per_execution,
        )
        _refuse_backup(callbacks_in_use())
        self._data.check(
            within_epochs=(self.save_every_steps, self.save_every_seconds) != (None, None)
        )
        self._build()
        self._epoch, self._first_step, self._step, self._batches = -1, 0, 0, 0
        self._saved_run: SavedRun | None = None
        self._last_saved: Place | None = None
        self._last_saved_at = time.monotonic()
        self._save_is_due = True  # also at once, so that a disk that is full is found at once
        self._leaves = self._stopped_within = False
        self._compiled_rate = rate_of(self.model)
        self._signal.install()
        wait_for_all_writers()
        state = agree_on_state(self._directory, self._replicas)
        if state is not None:
            self._take_up(SavedRun(state, self.model, self._data.position, self._replicas))
        self._has_begun = True

    def _take_up(self, saved: SavedRun) -> None:
        place = saved.place
        self._data.check_rest(place.step)
        if saved.compiled_rate != self._compiled_rate:
            logging.warning(
                "The learning rate is %s here, and was %s when the run began; the run goes on with "
                "what has become of that.",
                self._compiled_rate,
                saved.compiled_rate,
            )
        saved.restore_model()
        self._saved_run, self._batches = saved, place.batches
        self._compiled_rate = saved.compiled_rate
        epoch = self.params["epochs"] if place.is_over else place.epoch
        self.model._initial_epoch = InitialEpoch.of(self, epoch)
        # Not to be missed in a log, where the level of others is often not shown.
        logging.warning(
            "Resumed from %s, before step %d of epoch %d, both counted from 0.",
            saved.where,
            place.step,
            place.epoch,
        )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Finds where in the epoch training begins."""
        if self._first_step:  # the epoch before this one was a rest
            self._fit.begin_pass()
        if self._epoch < 0:
            self._data.begin(epoch)
        self._first_step = self._saved_run.place.step if self._saved_run else 0
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Saves if it is time to: here all callbacks are done with what came before."""
        self._step = self._first_step + batch
        is_first = self._last_saved is None
        if self._saved_run is not None:
            self._saved_run.restore_rest(callbacks_in_use(), with_metrics=self._step > 0)
            self._saved_run = None
        if is_first and self._replicas.is_chief:
            open_files(callbacks_in_use(), validates=self._fit.validates)
        if self._is_due():
            self._save(self._place())
        if is_first:  # before anything is written into files that it must know of
            self._writer.wait()
        if self._leaves:
            self._leave()
        self._writer.check()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Agrees with the other workers on what is to be done before the next batch."""
        steps = self.model.steps_per_execution
        self._step += steps
        self._batches += steps
        seconds = time.monotonic() - self._last_saved_at
        is_time = self.save_every_seconds is not None and seconds >= self.save_every_seconds
        if is_time and self._replicas.is_chief:
            self._wishes.wish("save")
        if self._signal.received:
            self._wishes.wish("leave")
        self._save_is_due |= self._wishes.take("save")
        self._leaves |= self._wishes.take("leave")
        if self._stops_within_epoch():
            self._stopped_within = True
            if math.isfinite((logs or {}).get("loss", 0.0)) and self._data.can_be_resumed(
                self._step
            ):
                self._save(self._place())
        # Keras would read on, as it counts the steps of a whole epoch.
        is_rest = self._first_step > 0 and self._step >= self._data.steps_per_epoch
        if is_rest and not self.model.stop_training:
            self.model.stop_training = EPOCH_IS_OVER

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Lets `fit` go on behind a resumed epoch."""
        if self.model.stop_training is EPOCH_IS_OVER:
            self.model.stop_training = False

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Likewise, where there was no validation."""
        self.on_test_begin()
        self._stopped_within |= self._stops_within_epoch()
        self._epoch, self._step = epoch + 1, 0

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Saves the end, after which a run that is started again has nothing to train.

        A training that was stopped within an epoch is taken up from there.
        """
        if self._saved_run is not None:
            self._saved_run.restore_rest(callbacks_in_use(), with_metrics=False)
            self._saved_run = None
            logging.warning("Nothing was left to train: the state is that of the end of a run.")
        elif not self._stopped_within and self._last_saved != self._place():
            self._save(self._place())
        self._writer.wait()
        self._leaves = self._wishes.any_worker(
            self._leaves or self._signal.received, purpose="end of training: leave?"
        )
        self._signal.remove()
        logging.info(
            "Saving %d states held training up for %.2f s.", self.saves, self.stall_seconds
        )
        if self._leaves:
            self._leave()

    def _stops_within_epoch(self) -> bool:
        """Whether somebody stops the training before the epoch is complete."""
        stops = self.model.stop_training
        steps = self.params["steps"]
        return bool(stops) and stops is not EPOCH_IS_OVER and (steps is None or self._step < steps)

    def _is_due(self) -> bool:
        place, last = self._place(), self._last_saved
        if not self._data.can_be_resumed(place.step) or place == last:
            return False
        if self._save_is_due or self._leaves or last is None:
            return True
        if self.save_every_steps is not None:
            every = self.save_every_steps
            return place.batches // every > last.batches // every
        return self.save_every_seconds is None and place.step == 0

    def _place(self) -> Place:
        is_over = bool(self.model.stop_training) and self._step == 0
        return Place(max(self._epoch, 0), self._step, self._batches, is_over=is_over)

    def _save(self, place: Place) -> None:
        began = time.perf_counter()
        data = self._data.state(epoch=place.epoch, step=place.step)
        state = take_state(
            self.model, callbacks_in_use(), place, data, self._compiled_rate, self._replicas
        )
        if state is not None:
            self._writer.write(place.batches, *state)
        self._last_saved, self._last_saved_at = place, time.monotonic()
        self._save_is_due = False
        self.saves += 1
        self.stall_seconds += time.perf_counter() - began

    def _leave(self) -> None:
        """Ends the process; on all workers, once the chief's file is safe."""
        self._writer.wait()
        self._wishes.any_worker(True, purpose="leaving after SIGTERM")
        self._signal.remove()
        place = self._last_saved
        logging.warning(
            "Leaves with code %d, told to by SIGTERM; saved before step %d of epoch %d.",
            INTERRUPTED_EXIT_CODE,
            place.step if place else 0,
            place.epoch if place else 0,
        )
        raise SystemExit(INTERRUPTED_EXIT_CODE)

    def _build(self) -> None:
        """Makes the variables, which Keras makes by now only where the model has a strategy."""
        data = self._fit.data if self._fit else None
        with self.model.distribute_strategy.scope():
            if isinstance(data, tf.data.Dataset):
                self.model._symbolic_build(data_batch=data.element_spec)
            elif self._fit and not self.model.built:
                self.model._symbolic_build(data_batch=self._fit.batch_spec)
            elif self.model.built and not self.model.optimizer.built:
                self.model.optimizer.build(self.model.trainable_variables)


def _refuse_backup(in_use: Sequence[Any]) -> None:
    for other in in_use:
        if isinstance(inner_callback(other), keras.callbacks.BackupAndRestore):
            raise ConfigurationError(
                "BackupAndRestore and TrainingState both take a run up again. Keep TrainingState."
            )
