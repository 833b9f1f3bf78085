"""What one worker does alone: it works, or all are told soon."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from forked_cluster import Cluster
from small_training import Ends, batches, compiled_model, join, new_strategy


class OnChief(keras.callbacks.Callback):
    """Prints what `act(model)` hands back, on one worker alone."""

    def __init__(self, act: Callable[[keras.Model], Any], *, rank: int, hook: str) -> None:
        super().__init__()
        if rank == 0:
            setattr(self, hook, lambda *_, **__: print("ALONE", act(self.model), flush=True))


def reads(model: keras.Model) -> list[float]:
    result = model.get_metrics_result()
    return [float(result[name]) for name in ("loss", "mae")]


def reads_at_the_end_of_epochs(rank: int) -> None:
    """Where Keras has read them on all workers; and once more after fit."""
    model = compiled_model(new_strategy(), metrics=("mae",))
    callback = OnChief(reads, rank=rank, hook="on_epoch_end")
    history = model.fit(batches(), epochs=3, verbose=0, callbacks=[callback]).history
    if rank == 0:
        print("ALONE", reads(model))
    print("LOGS", list(zip(history["loss"], history["mae"], strict=True)), flush=True)


def reads_within_an_epoch(rank: int) -> None:
    model = compiled_model(new_strategy(), metrics=("mae",))
    callback = OnChief(reads, rank=rank, hook="on_train_batch_end")
    model.fit(batches(), verbose=0, callbacks=[callback])


def evaluates_in_a_callback(rank: int) -> None:
    model = compiled_model(new_strategy())
    evaluate = OnChief(
        lambda model: model.evaluate(batches(), verbose=0), rank=rank, hook="on_epoch_end"
    )
    model.fit(batches(), epochs=2, verbose=0, callbacks=[evaluate])


def evaluates_after_fit(rank: int) -> None:
    model = compiled_model(new_strategy())
    model.fit(batches(), verbose=0)
    if rank == 0:
        model.evaluate(batches(), verbose=0)


def reduces_after_fit(rank: int) -> None:
    strategy = new_strategy()
    compiled_model(strategy).fit(batches(), verbose=0)
    if rank == 0:
        strategy.reduce("SUM", tf.constant(1.0), axis=None)


def case_done_alone() -> list[Ends]:
    bodies = (
        reads_at_the_end_of_epochs,
        reads_within_an_epoch,
        evaluates_in_a_callback,
        evaluates_after_fit,
        reduces_after_fit,
    )
    return join(*map(Cluster, bodies))
