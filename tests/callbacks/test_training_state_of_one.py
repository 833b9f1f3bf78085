"""A training of one process, broken off and started again, is the undisturbed one bit by bit."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_largebatch as tlb
from tests.callbacks._training_runs import (
    BATCH,
    ROWS,
    STEPS,
    BreaksOff,
    Outcome,
    Run,
    X,
    Y,
    assert_same,
    compiled_model,
    layered_model,
    momentum_sgd,
    resumed,
    sharder_of,
    train,
)
from tests.processes import json_from_replicas

kinds = keras.callbacks
BETWEEN_EPOCHS: dict[str, Any] = {}
RECIPE = tlb.Recipe(
    num_examples=ROWS,
    per_replica_batch_size=BATCH,
    num_replicas=1,
    base_learning_rate=0.05,
    base_batch_size=3,
    epochs=4,
    warmup_epochs=2,
)


def undisturbed(run: Run) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        outcome = train(run, Path(folder))
    assert outcome is not None
    return outcome


PLAIN, GRAPH = Run(), Run(eagerly=False)
known = functools.cache(lambda run_id: undisturbed({"plain": PLAIN, "graph": GRAPH}[run_id]))


@pytest.mark.parametrize("after", range(1, 2 * STEPS))
def test_broken_off_after_any_step(tmp_path: Path, after: int) -> None:
    assert_same(resumed(PLAIN, tmp_path, after), known("plain"))


@pytest.mark.parametrize("every", [None, 3])
def test_broken_off_again_and_again(tmp_path: Path, every: int | None) -> None:
    run = replace(GRAPH, state={"save_every_steps": every})
    assert_same(resumed(run, tmp_path, 2, 3, 1), known("graph"))


def schedulers(_: Path) -> list[Any]:
    return [
        kinds.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
        # The loss never gets better by 10, so that it halves the rate again and again.
        kinds.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=10.0),
    ]


def warmup(_: Path) -> list[Any]:
    return [tlb.callbacks.LearningRateWarmup(RECIPE)]


def keras_sgd() -> Any:
    return keras.optimizers.SGD(0.05, momentum=0.9)


class Subclassed(keras.Model):
    """Has no variables before it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.first = keras.layers.Dense(4, activation="relu")
        self.dropout = keras.layers.Dropout(0.4, seed=3)
        self.last = keras.layers.Dense(1)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.last(self.dropout(self.first(x), training=training))


def half_precision_model() -> keras.Model:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        return layered_model()
    finally:
        keras.config.set_dtype_policy("float32")


def plain_dataset() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)


VARIANTS: dict[str, tuple[Run, tuple[int, ...]]] = {
    "validation": (Run(validation=True), (3,)),
    "steps_per_epoch": (Run(given_steps=True, epochs=3), (2,)),
    "steps_per_epoch_and_validation": (Run(given_steps=True, validation=True), (3,)),
    "steps_per_execution": (Run(eagerly=False, steps_per_execution=2), (2,)),
    "within_an_accumulation": (
        Run(
            accumulation_steps=2,
            optimizer=lambda: tlb.optimizers.LARS(0.05, gradient_accumulation_steps=2),
        ),
        (3,),
    ),
    "rates_of_callbacks": (Run(epochs=4, callbacks=schedulers, optimizer=keras_sgd), (9,)),
    "state_before_the_rates": (
        Run(epochs=3, callbacks=schedulers, optimizer=keras_sgd, place=0),
        (6,),
    ),
    "warmup": (Run(epochs=4, callbacks=warmup, optimizer=keras_sgd), (6,)),
    "state_before_the_warmup": (
        Run(epochs=4, callbacks=warmup, optimizer=keras_sgd, place=0),
        (6,),
    ),
    "loss_scale": (
        Run(
            model=half_precision_model,
            optimizer=lambda: keras.optimizers.LossScaleOptimizer(
                momentum_sgd(), initial_scale=2.0**20, dynamic_growth_steps=3
            ),
        ),
        (4,),
    ),
    "adam_with_moving_average": (
        Run(optimizer=lambda: keras.optimizers.Adam(0.05, use_ema=True)),
        (3,),
    ),
    "unbuilt": (Run(model=Subclassed), (3,)),
    "unbuilt_on_arrays": (
        Run(model=Subclassed, data=lambda: (X, Y), state=BETWEEN_EPOCHS),
        (STEPS + 1,),
    ),
    "plain_dataset": (Run(data=plain_dataset, epochs=3, state=BETWEEN_EPOCHS), (3, 5)),
    "epoch_of_one_step": (Run(batch=ROWS, epochs=4), (1, 2)),
    "initial_epoch": (Run(initial_epoch=2, epochs=4), (3,)),
    "stop_together": (
        Run(epochs=3, callbacks=lambda _: [tlb.callbacks.StopTogether()]),
        (2,),
    ),
    "under_the_strategy": (Run(strategy=tlb.LargeBatchStrategy(), eagerly=False), (3,)),
    "strategy_not_given_to_the_data": (
        Run(
            strategy=tlb.LargeBatchStrategy(),
            eagerly=False,
            data=lambda: sharder_of(PLAIN).train_dataset(),
            given_steps=True,
        ),
        (3,),
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_all_kinds_of_trainings(tmp_path: Path, name: str) -> None:
    run, after = VARIANTS[name]
    expected = undisturbed(run)
    assert len(expected.epochs) == run.epochs - run.initial_epoch
    assert_same(resumed(run, tmp_path, *after), expected)


def test_all_strategies_of_two_replicas() -> None:
    found = json_from_replicas("tests.callbacks._training_state_script", replicas=2)
    assert set(found.values()) == {"the same"}, found
    assert {name.split()[0] for name in found} == {"LargeBatchStrategy", "MirroredStrategy"}


# --- What other callbacks remember, and have written


def test_the_best_weights_of_before(tmp_path: Path) -> None:
    def callbacks(_: Path) -> list[Any]:  # the loss falls, so that the first epoch is the "best"
        return [kinds.EarlyStopping("loss", mode="max", patience=9, restore_best_weights=True)]

    run = replace(PLAIN, epochs=3, callbacks=callbacks)
    expected = undisturbed(run)
    outcome = resumed(run, tmp_path, 2 * STEPS + 1)
    assert_same(outcome, expected)
    assert outcome.callbacks[0].best_epoch == 0
    first_epoch = undisturbed(replace(PLAIN, epochs=1)).model.get_weights()
    for value, best in zip(outcome.model.get_weights(), first_epoch, strict=True):
        np.testing.assert_array_equal(value, best)


@pytest.mark.parametrize("after", [None, STEPS + 2])
def test_stopped_early_is_over(tmp_path: Path, after: int | None) -> None:
    def callbacks(_: Path) -> list[Any]:
        return [kinds.EarlyStopping("loss", mode="max", patience=1)]

    run = replace(PLAIN, epochs=5, callbacks=callbacks)
    expected = undisturbed(run)
    assert expected.epochs == [0, 1]
    assert_same(resumed(run, tmp_path, *([after] if after else [])), expected)
    again = resumed(replace(run, epochs=9), tmp_path)
    assert_same(again, expected)
    assert again.state.saves == 0


@pytest.mark.parametrize("place", [0, None], ids=["first", "last"])
def test_stopped_within_an_epoch_it_goes_on(tmp_path: Path, place: int | None) -> None:
    class Stops(kinds.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if self.model.optimizer.iterations == STEPS + 2:
                self.model.stop_training = True

    run = replace(PLAIN, epochs=3, place=place)
    stopped = resumed(replace(run, callbacks=lambda _: [Stops()]), tmp_path)
    assert int(stopped.model.optimizer.iterations) == STEPS + 2
    assert_same(resumed(run, tmp_path), undisturbed(run))


def test_the_best_checkpoint_is_remembered(tmp_path: Path) -> None:
    def callbacks(folder: Path) -> list[Any]:
        path = str(folder / "{epoch}.keras")
        return [kinds.ModelCheckpoint(path, "loss", mode="max", save_best_only=True)]

    run = replace(PLAIN, epochs=3, callbacks=callbacks)
    resumed(run, tmp_path, STEPS + 2, 3)
    assert [path.name for path in tmp_path.glob("*.keras")] == ["1.keras"]


def test_checkpoints_of_every_third_batch(tmp_path: Path) -> None:
    def callbacks(folder: Path) -> list[Any]:
        path = str(folder / "last.weights.h5")
        return [kinds.ModelCheckpoint(path, save_weights_only=True, save_freq=3)]

    outcome = resumed(replace(PLAIN, callbacks=callbacks), tmp_path, 4)
    outcome.model.load_weights(tmp_path / "last.weights.h5")

    # Of batch 6; without the memory of one batch it would be 7.
    other = tmp_path / "other"
    train(PLAIN, other, break_after=6)
    stored = max((other / "state").iterdir())
    assert stored.name == "state_000000000005.tlb"  # broken off before it would be 6
    sixth = compiled_model(PLAIN)
    sixth.fit(
        sharder_of(PLAIN).train_dataset(),
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=[BreaksOff(6, lambda: setattr(sixth, "stop_training", True))],
    )
    for value, expected in zip(outcome.model.get_weights(), sixth.get_weights(), strict=True):
        np.testing.assert_array_equal(value, expected)


class Remembers(kinds.Callback):
    """One of a user's own: the sum of all losses, and the largest weight after each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.batches = np.zeros(0, np.float64), {"seen": 0}

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        largest = max(np.abs(value).max() for value in self.model.get_weights())
        self.largest = np.append(self.largest, largest)
        self.batches["seen"] += 1

    def get_state(self) -> dict[str, Any]:
        return {"largest": self.largest, "batches": self.batches}

    def set_state(self, state: dict[str, Any]) -> None:
        self.largest, self.batches = state["largest"], state["batches"]


@pytest.mark.parametrize("place", [0, None])
@pytest.mark.parametrize("wrap", [lambda each: each, tlb.callbacks.ChiefOnly])
def test_callbacks_of_ones_own(tmp_path: Path, place: int | None, wrap: Callable[..., Any]) -> None:
    run = replace(PLAIN, place=place, callbacks=lambda _: [wrap(Remembers())])
    mine, other = (
        getattr(outcome.callbacks[-1 if place == 0 else 0], "callback", None)
        or outcome.callbacks[-1 if place == 0 else 0]
        for outcome in (resumed(run, tmp_path, 3), undisturbed(run))
    )
    assert mine.batches == other.batches == {"seen": 2 * STEPS}
    np.testing.assert_array_equal(mine.largest, other.largest, strict=True)
