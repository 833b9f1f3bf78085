"""Small trainings that may be broken off by an exception, and what came of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tf_largebatch as tlb

ROWS, BATCH, STEPS = 24, 6, 4  # steps of an epoch
_RANDOM = np.random.default_rng(7)
X = _RANDOM.normal(size=(ROWS, 3)).astype(np.float32)
Y = _RANDOM.normal(size=(ROWS, 1)).astype(np.float32)


class BrokenOff(Exception):
    """What the trainings end by."""


class BreaksOff(keras.callbacks.Callback):
    """Raises after so many batches of a `fit`, or does something else instead."""

    needs_every_worker = True  # may stand behind `StopTogether`

    def __init__(self, after: int, act: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.left, self.act = after, act

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.left -= self.model.steps_per_execution
        if self.left != 0:
            return
        if self.act is None:
            raise BrokenOff
        self.act()


def momentum_sgd() -> keras.optimizers.Optimizer:
    return tlb.optimizers.MomentumSGD(0.05, weight_decay=1e-3)


def layered_model() -> keras.Model:
    """With what a replica keeps for itself: moving statistics, and a dropout's seed."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((3,)),
            layers.Dense(4, activation="relu"),
            layers.BatchNormalization(momentum=0.8),
            layers.Dropout(0.4, seed=3),
            layers.Dense(1),
        ]
    )


def noisy(seed: Any, x: Any, y: Any) -> Any:
    return x + tf.random.stateless_normal(tf.shape(x), seed), y


@dataclass(frozen=True)
class Run:
    """What is trained.

    Attributes:
        place: of the `TrainingState` among the callbacks; None is the last.
        data: made once for each `fit`, `x` or `(x, y)`; None is a sharder's data set.
    """

    epochs: int = 2
    initial_epoch: int = 0
    batch: int = BATCH
    seed: int = 2
    rows: int = ROWS
    validation: bool = False
    given_steps: bool = False
    steps_per_execution: int = 1
    accumulation_steps: int = 1
    eagerly: bool = True
    model: Callable[[], keras.Model] = layered_model
    optimizer: Callable[[], Any] = momentum_sgd
    callbacks: Callable[[Path], Sequence[Any]] = lambda folder: ()
    state: dict[str, Any] = field(default_factory=lambda: {"save_every_steps": 1})
    place: int | None = None
    data: Callable[[], Any] | None = None
    strategy: tf.distribute.Strategy | None = None


@dataclass(frozen=True)
class Outcome:
    """What a training has come to, and the objects that were used."""

    model: keras.Model
    state: Any
    callbacks: Sequence[Any]
    history: dict[str, list[float]]
    epochs: list[int]

    @property
    def values(self) -> list[np.ndarray]:
        """Of all variables, on each replica."""
        variables = [*self.model.variables, *self.model.optimizer.variables]
        return [
            component.numpy()
            for variable in variables
            for component in getattr(variable.value, "values", (variable.value,))
        ]


def compiled_model(run: Run) -> keras.Model:
    keras.utils.set_random_seed(11)
    with run.strategy.scope() if run.strategy else nullcontext():
        model = run.model()
        model.compile(
            run.optimizer(),
            "mse",
            metrics=["mae"],
            steps_per_execution=run.steps_per_execution,
            run_eagerly=run.eagerly,
            jit_compile=False,
        )
    return model


def sharder_of(run: Run) -> tlb.data.GlobalShuffleSharder:
    return tlb.data.GlobalShuffleSharder(
        tlb.data.ArraySource((X[: run.rows], Y[: run.rows])),
        global_batch_size=run.batch,
        accumulation_steps=run.accumulation_steps,
        seed=run.seed,
        row_fn=noisy,
    )


def train(
    run: Run,
    folder: Path,
    *,
    break_after: int | None = None,
    act: Callable[[], None] | None = None,
    model: keras.Model | None = None,
) -> Outcome | None:
    """Trains on new objects, as a process does that is started; None if it was broken off.

    Args:
        folder: of the run; the states go into `state`.
        break_after: so many batches.
        act: what is done then, instead of raising.
        model: a compiled one; None makes it.
    """
    folder.mkdir(exist_ok=True)
    model = model or compiled_model(run)
    state = tlb.callbacks.TrainingState(folder / "state", **run.state)
    callbacks = list(run.callbacks(folder))
    callbacks.insert(len(callbacks) if run.place is None else run.place, state)
    if break_after is not None:
        callbacks.append(BreaksOff(break_after, act))
    sharder = sharder_of(run)
    data = run.data() if run.data else sharder.train_dataset(run.strategy)
    arrays = data if isinstance(data, tuple) else (data,)
    try:
        history = model.fit(
            *arrays,
            batch_size=run.batch if len(arrays) > 1 else None,
            epochs=run.epochs,
            initial_epoch=run.initial_epoch,
            steps_per_epoch=sharder.steps_per_epoch if run.given_steps else None,
            validation_data=(X[:6], Y[:6]) if run.validation else None,
            shuffle=False,
            verbose=0,
            callbacks=callbacks,
        )
    except BrokenOff:
        history = None
    if history is None:
        return None
    return Outcome(model, state, callbacks, history.history, history.epoch)


def resumed(run: Run, folder: Path, *break_after: int) -> Outcome:
    """What the training comes to when it is broken off so many times."""
    for batches in break_after:
        assert train(run, folder, break_after=batches) is None
    outcome = train(run, folder)
    assert outcome is not None
    return outcome


def assert_same(outcome: Outcome, expected: Outcome) -> None:
    """Bit by bit."""
    assert outcome.epochs == expected.epochs
    assert outcome.history == expected.history
    for value, other in zip(outcome.values, expected.values, strict=True):
        np.testing.assert_array_equal(value, other, strict=True)
