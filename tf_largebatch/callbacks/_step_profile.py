"""Where the time of some training steps goes, and a trace of them."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tf_largebatch.callbacks._recorded_run import (
    NUM_STEPS,
    STEP_NAME,
    find_recording,
    read_recording,
)
from tf_largebatch.callbacks._trace_file import write_trace
from tf_largebatch.core.errors import ConfigurationError, ProgramOrderError
from tf_largebatch.core.scaling import require_count
from tf_largebatch.core.step_parts import StepReport, divide, parts_of

_OPERATIONS = 2  # the level at which the host's operations are recorded, also short ones
_QUIET_SECONDS = 0.5


class StepProfile(keras.callbacks.Callback):
    """Says what some steps of `fit` spend their time on, and leaves a trace of them.

    Each instant of a step, from its begin to that of the next one, counts once:

        compute                   an operation of the training step ran, whatever else did
        input_wait                else, the step waited for its batch: a faster input pipeline helps
        exposed_communication     else, collectives were under way: what communication costs, as
                                  opposed to what backward hides (`bucket_bytes`), and what this
                                  worker waits for slower ones
        other                     the rest: Python, callbacks, dispatch of operations

        profile = tlb.callbacks.StepProfile(first_step=20, steps=10, directory="profile")
        model.fit(..., callbacks=[..., profile])
        print(profile.report.describe())

    absl logs the same. It counts the steps of this `fit`, over all of its epochs; the last one of
    an epoch ends where validation or the epoch's end begins, of which it contains nothing. With
    `steps_per_execution` above 1 a call is measured as a whole, and divided by its steps.

    With `directory`, that of worker i of several is `directory/worker_i`. It gets `trace.json.gz`
    for ui.perfetto.dev (steps, parts and collectives on top, then all threads), `report.txt`, and
    below `plugins/` what TensorBoard's profile plugin reads.

    TensorFlow's profiler takes about a microsecond for each event, an operation or a part of one:
    of a ResNet-20 on two cores 2 % of the processor time. When the steps are done, training stands
    still while the recording is read, a second for each 50,000 events or so, which are eight steps
    of that ResNet: profile tens of steps, not thousands.

    It takes part in no collective: use it on every worker, or in `ChiefOnly`. Additions within a
    collective that TensorFlow runs as operations count as compute. On GPUs, compute is what their
    streams run, other than NCCL, and each profiled step waits for them to be done.

    Under TensorFlow's own MultiWorkerMirroredStrategy with slow links between workers its profiler
    has crashed processes, when it was stopped while they still served others. So, where there are
    several workers, it is stopped half a second after the last step. Under LargeBatchStrategy no
    crash was seen.

    Args:
        first_step: the first step to profile, counted from 0 in this `fit`. Tracing and what is
            slow only once should be over by then.
        steps: how many.
        directory: where files go; None keeps none.

    Attributes:
        report: a `StepReport` once the steps are done, with `steps`, the medians `seconds`,
            `compute`, `input_wait`, `exposed_communication` and `other`, `share(part)` and
            `describe()`. None before.

    Raises:
        ConfigurationError: when made, for a number that is no count. When training begins, if the
            model is compiled with `run_eagerly=True`, whose steps are no graphs.
        ProgramOrderError: TensorFlow's profiler, of which there is one a process, runs already.
    """

    def __init__(
        self,
        *,
        first_step: int = 10,
        steps: int = 10,
        directory: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        self.first_step = require_count("first_step", first_step, minimum=0)
        self.steps = require_count("steps", steps)
        self.directory = None if directory is None else Path(directory)
        self.report: StepReport | None = None
        self._done = self._profiled = 0  # steps of this fit
        self._folder: Path | None = None  # while the profiler runs: where it will write
        self._call: Any = None  # the annotation of the call that is under way
        self._first_of_call = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Counts from 0."""
        if self.model.run_eagerly:
            raise ConfigurationError(
                "StepProfile finds the parts of a step in its graph, but the model is compiled "
                "with run_eagerly=True. Compile it with run_eagerly=False."
            )
        if self._folder is not None:  # the last fit ended with an exception
            self._stop(save=False)
        self.report, self._call = None, None
        self._done = self._profiled = 0

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """A step ends where the next one begins."""
        self._end_call()
        self._first_of_call = batch
        if self.report is not None or self._done < self.first_step:
            return
        if self._folder is None:
            self._start()
        # `_r=1` marks the steps for TensorBoard.
        self._call = tf.profiler.experimental.Trace(STEP_NAME, step_num=self._done, _r=1)
        self._call.__enter__()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts the steps of the call."""
        num_steps = self._steps_of_call(batch)
        self._done += num_steps
        if self._call is not None:
            self._profiled += num_steps
            self._call.set_metadata(**{NUM_STEPS: num_steps})

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Validation is no part of the last step."""
        self._end_call()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """As for validation."""
        self._end_call()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Reports of fewer steps, if training was too short."""
        self._end_call()
        if self._folder is not None:
            self._finish()
        if self.report is None:
            warnings.warn(
                f"Training ended after {self._done} steps, none of which StepProfile(first_step="
                f"{self.first_step}) has seen. Use a smaller first_step.",
                stacklevel=2,
            )

    def _steps_of_call(self, last: int) -> int:
        if last == self._first_of_call:  # one step, or Keras 3.10, which tells the first one twice
            last += self.model.steps_per_execution - 1
            last = min(last, (self.params.get("steps") or math.inf) - 1)
        return int(last) + 1 - self._first_of_call

    def _start(self) -> None:
        self._folder = self._own_directory() or Path(tempfile.mkdtemp(prefix="step_profile_"))
        options = tf.profiler.experimental.ProfilerOptions(host_tracer_level=_OPERATIONS)
        try:
            tf.profiler.experimental.start(str(self._folder), options=options)
        except tf.errors.AlreadyExistsError as error:
            self._folder = None
            raise ProgramOrderError(
                f"StepProfile(first_step={self.first_step}) cannot start TensorFlow's profiler, "
                "which somebody else in this process has started, such as keras.callbacks."
                "TensorBoard(profile_batch=...). Profile other steps with one of them."
            ) from error

    def _end_call(self) -> None:
        if self._call is None:
            return
        if tf.config.list_logical_devices("GPU"):  # which are behind the host
            tf.test.experimental.sync_devices()
        self._call.__exit__(None, None, None)
        self._call = None
        if self._profiled >= self.steps:
            self._finish()

    def _finish(self) -> None:
        """Stops, reads what was recorded, says what it means."""
        folder, began = self._folder, time.perf_counter()
        assert folder is not None
        if self._num_workers() > 1:  # those that still need something of this one get it
            time.sleep(_QUIET_SECONDS)
        self._stop(save=True)
        run = read_recording(find_recording(folder))
        divisions = [divide(window, run.activity) for window in run.windows]
        self.report = StepReport(tuple(map(parts_of, run.windows, divisions)))
        logging.info("%s", self.report.describe())
        if self.directory is None:
            shutil.rmtree(folder)
            return
        write_trace(folder / "trace.json.gz", run, divisions)
        (folder / "report.txt").write_text(self.report.describe() + "\n")
        seconds = time.perf_counter() - began
        logging.info("The profile is in %s; reading it took %.1f s.", folder, seconds)

    def _stop(self, *, save: bool) -> None:
        tf.profiler.experimental.stop(save=save)
        self._folder = None

    def _own_directory(self) -> Path | None:
        if self.directory is None:
            return None
        if self._num_workers() == 1:
            return self.directory
        return self.directory / f"worker_{self.model.distribute_strategy.cluster_resolver.task_id}"

    def _num_workers(self) -> int:
        resolver = getattr(self.model.distribute_strategy, "cluster_resolver", None)
        spec = resolver and resolver.cluster_spec()
        return spec.num_tasks("worker") if spec and "worker" in spec.jobs else 1
