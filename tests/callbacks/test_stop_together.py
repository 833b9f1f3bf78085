"""`StopTogether` in one process; on several workers in `multiprocess/test_training_state.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

import tf_largebatch as tlb
from tf_largebatch.callbacks._running_fit import EPOCH_IS_OVER

ONES = np.ones((6, 1))


class StopsAfter(keras.callbacks.Callback):
    """Asks after a batch, or after an epoch; counts the batches and epochs that were trained."""

    def __init__(self, *, batch: int | None = None, epoch: int | None = None, by: Any = True):
        super().__init__()
        self.batch, self.epoch, self.by = batch, epoch, by
        self.batches = self.epochs = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches += 1
        if batch == self.batch:
            self.model.stop_training = self.by

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epochs += 1
        if epoch == self.epoch:
            self.model.stop_training = self.by


def fitted(*callbacks: Any) -> None:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    model.fit(ONES, ONES, 1, 3, verbose=0, callbacks=list(callbacks))


@pytest.mark.parametrize(
    ("asks", "batches", "epochs"),
    [
        ({"batch": 2}, 3, 1),
        ({"batch": 2, "by": np.True_}, 3, 1),
        ({"batch": 5}, 6, 1),  # the last one of an epoch
        ({"epoch": 1}, 12, 2),
        ({"epoch": 1, "by": 1}, 12, 2),
        ({}, 18, 3),
    ],
)
def test_alone_it_changes_nothing(asks: dict[str, Any], batches: int, epochs: int) -> None:
    for beside in ([], [tlb.callbacks.StopTogether()]):
        counts = StopsAfter(**asks)
        fitted(counts, *beside)
        assert (counts.batches, counts.epochs) == (batches, epochs)


class TwoWorkers:
    """Stands for the flags of two workers: a wish is learnt of with the next step."""

    def __init__(self) -> None:
        self.wished: set[str] = set()
        self.travelled: set[str] = set()
        self.others_answer = False

    def step(self) -> None:
        self.travelled |= self.wished

    def wish(self, name: str) -> None:
        self.wished.add(name)

    def take(self, name: str) -> bool:
        taken = name in self.travelled
        self.travelled.discard(name)
        if taken:
            self.wished.discard(name)
        return taken

    def withdraw(self, name: str) -> None:
        self.wished.discard(name)

    def gather(self, value: Any, *, purpose: str) -> Any:
        return np.stack([value, np.array([self.others_answer], np.int64)])


@pytest.fixture
def of_two() -> tuple[tlb.callbacks.StopTogether, Any, TwoWorkers]:
    flags = TwoWorkers()
    extended = SimpleNamespace(agreed_flags=flags, gather=flags.gather)
    model = SimpleNamespace(
        stop_training=False, distribute_strategy=SimpleNamespace(extended=extended)
    )
    callback = tlb.callbacks.StopTogether()
    callback.set_model(model)
    callback.on_train_begin()
    return callback, model, flags


def test_stops_one_step_later(of_two: Any) -> None:
    callback, model, flags = of_two
    flags.step()
    model.stop_training = True  # somebody asks
    callback.on_train_batch_end(0)
    assert model.stop_training is False
    flags.step()
    callback.on_train_batch_end(1)
    assert model.stop_training is True


def test_stops_where_another_worker_asks(of_two: Any) -> None:
    callback, model, flags = of_two
    flags.travelled.add("stop")
    callback.on_train_batch_end(0)
    assert model.stop_training is True


@pytest.mark.parametrize("asked_in_the_last_batch", [False, True])
@pytest.mark.parametrize("asked_after_the_epoch", [False, True])
@pytest.mark.parametrize("other_asks", [False, True])
def test_at_the_end_of_an_epoch(
    of_two: Any, asked_in_the_last_batch: bool, asked_after_the_epoch: bool, other_asks: bool
) -> None:
    callback, model, flags = of_two
    flags.step()
    model.stop_training = asked_in_the_last_batch
    callback.on_train_batch_end(0)
    flags.others_answer = other_asks
    model.stop_training = asked_after_the_epoch
    callback.on_epoch_end(0)
    expected = asked_in_the_last_batch or asked_after_the_epoch or other_asks
    assert model.stop_training is expected
    # Nothing is left of it for the next step.
    assert flags.wished == set()
    model.stop_training = False
    flags.step()
    callback.on_train_batch_end(0)
    assert model.stop_training is False


def test_the_end_of_a_resumed_epoch_is_no_wish(of_two: Any) -> None:
    callback, model, flags = of_two
    model.stop_training = EPOCH_IS_OVER
    callback.on_train_batch_end(0)
    assert model.stop_training is EPOCH_IS_OVER and flags.wished == set()
    callback.on_epoch_end(0)
    assert model.stop_training is False


def test_places_in_the_list(tmp_path: Any) -> None:
    together = tlb.callbacks.StopTogether
    with pytest.raises(tlb.ConfigurationError, match="StopsAfter stands behind StopTogether"):
        fitted(together(), StopsAfter())
    with pytest.raises(tlb.ConfigurationError, match="CSVLogger stands behind StopTogether"):
        fitted(together(), keras.callbacks.CSVLogger(str(tmp_path / "log.csv")))
    with pytest.raises(tlb.ConfigurationError, match="Put TrainingState last"):
        fitted(tlb.callbacks.TrainingState(tmp_path / "refused"), together())
    history = keras.callbacks.History()
    fitted(StopsAfter(), together(), history, tlb.callbacks.TrainingState(tmp_path / "state"))
    assert history.epoch == [0, 1, 2]
