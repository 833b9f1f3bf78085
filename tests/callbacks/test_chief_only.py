"""`ChiefOnly` passes everything on, on the chief, and refuses what others would wait for."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

import tf_largebatch as tlb

HOOKS = sorted(name for name in vars(keras.callbacks.Callback) if name.startswith("on_"))


class Records(keras.callbacks.Callback):
    """What is called, with which arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []


def _recording(hook: str) -> Any:
    def record(self: Records, *arguments: Any, **named: Any) -> None:
        self.calls.append((hook, *arguments, *named.values()))

    return record


for _hook in HOOKS:
    setattr(Records, _hook, _recording(_hook))


def model_of(strategy: Any) -> Any:
    return SimpleNamespace(distribute_strategy=strategy, stop_training=False)


def strategy_of(*, chief: bool, workers: int = 2) -> Any:
    return SimpleNamespace(
        extended=SimpleNamespace(should_checkpoint=chief),
        topology=SimpleNamespace(num_workers=workers),
    )


def test_there_are_hooks_of_all_kinds() -> None:
    assert len(HOOKS) > 15
    assert {"on_epoch_end", "on_train_batch_end", "on_test_begin", "on_predict_end"} <= {*HOOKS}


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("chief", [False, True])
def test_every_hook(hook: str, named: bool, chief: bool) -> None:
    inner = Records()
    wrapped = tlb.callbacks.ChiefOnly(inner)
    wrapped.set_model(model_of(strategy_of(chief=chief)))
    names = list(inspect.signature(getattr(keras.callbacks.Callback, hook)).parameters)[1:]
    assert names[-1] == "logs"
    logs = {"loss": 1.0}
    first = (7,) if len(names) == 2 else ()
    if named:
        getattr(wrapped, hook)(*first, logs=logs)
    else:
        getattr(wrapped, hook)(*first, logs)
    assert inner.calls == ([(hook, *first, logs)] if chief else [])
    if chief:
        assert inner.calls[0][-1] is logs  # which a callback may add to


def test_params_and_model() -> None:
    for chief in (True, False):
        inner = Records()
        wrapped = tlb.callbacks.ChiefOnly(inner)
        model, params = model_of(strategy_of(chief=chief)), {"epochs": 3}
        wrapped.set_params(params)
        wrapped.set_model(model)
        assert wrapped.callback is inner and wrapped.model is model
        assert wrapped.params is inner.params is params
        assert inner.model is (model if chief else None)


def test_in_a_fit_evaluation_and_prediction() -> None:
    inner = Records()
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    ones = np.ones((2, 1))
    callbacks = [tlb.callbacks.ChiefOnly(inner), alone := Records()]
    model.fit(ones, ones, 1, verbose=0, validation_data=(ones, ones), callbacks=callbacks)
    model.evaluate(ones, ones, verbose=0, callbacks=callbacks)
    model.predict(ones, verbose=0, callbacks=callbacks)
    assert inner.calls == alone.calls
    assert {call[0] for call in inner.calls} == {
        hook for hook in HOOKS if hook not in ("on_batch_begin", "on_batch_end")
    }


def recipe() -> tlb.Recipe:
    return tlb.Recipe(
        num_examples=8,
        per_replica_batch_size=1,
        num_replicas=2,
        base_learning_rate=0.1,
        epochs=1,
        warmup="none",
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: keras.callbacks.EarlyStopping(),
        lambda folder: keras.callbacks.ReduceLROnPlateau(),
        lambda folder: keras.callbacks.TerminateOnNaN(),
        lambda folder: keras.callbacks.SwapEMAWeights(),
        lambda folder: keras.callbacks.LearningRateScheduler(lambda epoch: 0.1),
        lambda folder: keras.callbacks.BackupAndRestore(folder),
        lambda folder: tlb.callbacks.TrainingState(folder),
        lambda folder: tlb.callbacks.StopTogether(),
        lambda folder: tlb.callbacks.BatchNormSync(),
        lambda folder: tlb.callbacks.LearningRateWarmup(recipe()),
        lambda folder: tlb.callbacks.GradientNoiseScale(recipe()),
    ],
)
def test_needed_on_every_worker(make: Any, tmp_path: Any) -> None:
    callback = make(tmp_path)
    name = type(callback).__name__
    with pytest.raises(tlb.ConfigurationError, match=f"{name} is needed on every worker"):
        tlb.callbacks.ChiefOnly(callback)


@pytest.mark.parametrize("given", [None, print, keras.callbacks.CSVLogger])
def test_no_callback(given: Any) -> None:
    with pytest.raises(tlb.ConfigurationError, match=r"must be a keras\.callbacks\.Callback obj"):
        tlb.callbacks.ChiefOnly(given)


class Stops(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.stop_training = True


def test_stopping_on_the_chief_alone() -> None:
    wrapped = tlb.callbacks.ChiefOnly(Stops())
    alone = model_of(strategy_of(chief=True, workers=1))
    wrapped.set_model(alone)
    wrapped.on_train_batch_end(0)
    assert alone.stop_training is True

    wrapped.set_model(model_of(strategy_of(chief=True)))
    with pytest.raises(tlb.ConfigurationError, match="Stops stops the training on the chief alone"):
        wrapped.on_train_batch_end(0)
    beside = keras.callbacks.CallbackList([wrapped, tlb.callbacks.StopTogether()])
    wrapped.set_model(model_of(strategy_of(chief=True)))
    beside.callbacks = [wrapped, _Quiet()]
    beside.on_train_batch_end(0)
    assert wrapped.model.stop_training is True


class _Quiet(tlb.callbacks.StopTogether):
    """Stands there, and does nothing."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        pass
