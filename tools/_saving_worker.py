"""The workers of `benchmark_saving.py`; see `_forks.py` for how they start."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
from _forks import run_forks
from absl import app, flags

import tf_largebatch as tlb

_RESULT_DIR = flags.DEFINE_string("result_dir", None, "See _forks.py.", required=True)
_PARAMETERS = flags.DEFINE_integer("parameters", None, "See benchmark_saving.py.", required=True)
_REPEATS = flags.DEFINE_integer("repeats", None, "See benchmark_saving.py.", required=True)
_TIMEOUT = flags.DEFINE_float("timeout_seconds", None, "For each wait.", required=True)

_WIDTH = 1024
_POLL_SECONDS = 0.002


def build(seed: int) -> keras.Model:
    """Dense layers of about as many weights, with momentum slots, compiled."""
    keras.utils.set_random_seed(seed)
    width = min(_WIDTH, int(_PARAMETERS.value**0.5))
    layers = [keras.layers.Dense(width) for _ in range(round(_PARAMETERS.value / (width + 1) ** 2))]
    model = keras.Sequential([keras.Input((width,)), *layers])
    # At a rate of 0 the weights stay finite; the slots are filled all the same.
    model.compile(keras.optimizers.SGD(0.0, momentum=0.9), "mse")
    return model


class Saves(keras.callbacks.Callback):
    """Times each save of the `TrainingState` before it in the list, and Keras' own beside it."""

    def __init__(self, state: Any, folder: Path, *, is_chief: bool) -> None:
        super().__init__()
        self._state, self._folder, self._is_chief = state, folder, is_chief
        self._stalled = 0.0
        self.seconds: dict[str, list[float]] = {
            "training_state": [], "written": [], "backup_and_restore": [], "save_weights": []
        }  # fmt: skip

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._backup = keras.callbacks.BackupAndRestore(self._folder / "backup")
        self._backup.set_model(self.model)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        stalled = self._state.stall_seconds
        self.seconds["training_state"].append(stalled - self._stalled)
        self._stalled = stalled
        if not self._is_chief:
            return
        self._time("written", lambda: self._wait_for(batch))
        self._time("backup_and_restore", lambda: self._backup.on_epoch_end(0))
        self._time("save_weights", lambda: self.model.save_weights(self._folder / "m.weights.h5"))

    def _wait_for(self, update: int) -> None:
        while not (self._folder / "state" / f"state_{update:012d}.tlb").exists():
            time.sleep(_POLL_SECONDS)

    def _time(self, name: str, save: Any) -> None:
        began = time.perf_counter()
        save()
        self.seconds[name].append(time.perf_counter() - began)


def values_of(model: keras.Model, *, with_slots: bool) -> list[np.ndarray]:
    variables = [*model.variables, *(model.optimizer.variables if with_slots else ())]
    return [keras.ops.convert_to_numpy(variable) for variable in variables]


def problems_of(
    name: str, found: keras.Model, model: keras.Model, *, with_slots: bool
) -> list[str]:
    pairs = zip(
        values_of(found, with_slots=with_slots),
        values_of(model, with_slots=with_slots),
        strict=True,
    )
    differing = sum(not np.array_equal(value, other) for value, other in pairs)
    return [f"{name}: {differing} variables are not as they were"] if differing else []


def measure(rank: int) -> dict[str, Any]:
    """Trains one epoch, with a save before each step; then loads what was saved."""
    folder = Path(_RESULT_DIR.value)
    strategy = tlb.LargeBatchStrategy(
        start_timeout_seconds=_TIMEOUT.value, timeout_seconds=_TIMEOUT.value
    )
    workers = strategy.num_replicas_in_sync
    steps = _REPEATS.value + 1  # the first save is not counted: memory is taken for it
    with strategy.scope():
        model = build(1)
    rows = np.ones((steps * workers, model.input_shape[1]), np.float32)
    sharder = tlb.data.GlobalShuffleSharder(
        tlb.data.ArraySource((rows, rows)), global_batch_size=workers, seed=1
    )

    def fit(trained: keras.Model, *more: Any) -> Any:
        state = tlb.callbacks.TrainingState(folder / "state", save_every_steps=1)
        saves = [make(state) for make in more]
        data = sharder.train_dataset(strategy)
        trained.fit(data, epochs=1, verbose=0, callbacks=[state, *saves])
        return saves

    (saves,) = fit(model, lambda state: Saves(state, folder, is_chief=rank == 0))
    with strategy.scope():
        found = build(2)
    fit(found)  # nothing is left to train: the end is loaded
    problems = problems_of("training_state", found, model, with_slots=True)
    if rank == 0:
        found = build(3)  # outside of the strategy: on this worker alone
        found.load_weights(folder / "m.weights.h5")
        problems += problems_of("save_weights", found, model, with_slots=False)
    states = sorted((folder / "state").iterdir())
    strategy.barrier()
    return {
        "seconds": {name: times[1:] for name, times in saves.seconds.items()},
        "megabytes": sum(value.nbytes for value in values_of(model, with_slots=True)) / 1e6,
        "file_megabytes": states[-1].stat().st_size / 1e6,
        "problems": problems,
    }


def main(_: Sequence[str]) -> int:
    return run_forks(Path(_RESULT_DIR.value), measure)


if __name__ == "__main__":
    app.run(main)
