"""One worker of `benchmark_step.py`: trains a tiny model with `model.fit` and times its steps.

All variants train the same model on the same rows in the same order, as `GlobalShuffleSharder`
has them; they differ in the strategy, and in how the rows reach it:

    stock                   MultiWorkerMirroredStrategy, a plain data set, which TensorFlow shards
    stock_per_worker_data   the same strategy, a data set made on each worker of its own rows
    ours_plain_data         LargeBatchStrategy, the same plain data set
    ours                    LargeBatchStrategy, the data set of GlobalShuffleSharder

Our strategy has a transport besides; mpi is for processes that `mpiexec` has started.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf
from _mended_strategy import MendedStrategy
from absl import app, flags

import tf_largebatch as tlb

_STOCK = ("stock", "stock_per_worker_data")
_OURS = ("ours_plain_data", "ours")
_VARIANT = flags.DEFINE_enum("variant", None, [*_STOCK, *_OURS], "What to time.", required=True)
_TRANSPORT = flags.DEFINE_string("transport", "tensorflow", "As of LargeBatchStrategy.")
_STEPS = flags.DEFINE_integer("steps", None, "Steps of an epoch.", required=True)
_EPOCHS = flags.DEFINE_integer("epochs", None, "Timed epochs, after one of warmup.", required=True)
_GLOBAL_BATCH = flags.DEFINE_integer("global_batch_size", None, "Rows of a step.", required=True)
_RESULT_DIR = flags.DEFINE_string("result_dir", None, "Folder of worker_NN.json.", required=True)

_FEATURES, _HIDDEN, _CLASSES = 16, 32, 4
_SEED = 1


class StepTimer(keras.callbacks.Callback):
    """Mean milliseconds of a step of each epoch, between the ends of its first and last step.

    `wall_ms` is what a user waits; `cpu_ms` is the time of all threads of this process, which
    other load on the machine changes less.
    """

    def __init__(self) -> None:
        super().__init__()
        self.wall_ms: list[float] = []
        self.cpu_ms: list[float] = []
        self._first = self._last = (0.0, 0.0)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._last = (time.perf_counter(), time.process_time())
        if batch == 0:
            self._first = self._last

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        milliseconds_a_step = 1000.0 / (self.params["steps"] - 1)
        for values, begin, end in zip(
            (self.wall_ms, self.cpu_ms), self._first, self._last, strict=True
        ):
            values.append(milliseconds_a_step * (end - begin))


def make_strategy(variant: str) -> tf.distribute.Strategy:
    if variant in _STOCK:
        return MendedStrategy()
    return tlb.LargeBatchStrategy(transport=_TRANSPORT.value)


def make_rows(count: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    """Rows of a linear teacher: `[row, feature]` and `[row]`, equal on all workers."""
    random = np.random.default_rng(_SEED)
    teacher = random.normal(size=(_FEATURES, _CLASSES))
    x = random.normal(size=(count, _FEATURES))
    return x.astype(np.float32), np.argmax(x @ teacher, axis=1).astype(np.int32)


def build_model() -> keras.Model:
    keras.utils.set_random_seed(_SEED)
    model = keras.Sequential(
        [
            keras.Input((_FEATURES,)),
            keras.layers.Dense(_HIDDEN, activation="tanh"),
            keras.layers.Dense(_CLASSES),
        ]
    )
    model.compile(
        keras.optimizers.SGD(0.02, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def epoch_datasets(variant: str, strategy: tf.distribute.Strategy) -> Callable[[int], Any]:
    """Returns the function from an epoch's number to what `model.fit` is given for it."""
    x, y = make_rows(_STEPS.value * _GLOBAL_BATCH.value)
    sharder = tlb.data.GlobalShuffleSharder(
        tlb.data.ArraySource((x, y)), global_batch_size=_GLOBAL_BATCH.value, seed=_SEED
    )
    if variant == "ours":
        dataset = sharder.train_dataset(strategy)
        return lambda epoch: dataset  # goes on to the next epoch by itself

    def batches(epoch: int, worker: int, workers: int) -> tf.data.Dataset:
        rows = [
            sharder.positions(epoch=epoch, step=step, shard_index=worker, shard_count=workers)
            for step in range(_STEPS.value)
        ]
        chosen = np.concatenate(rows)
        dataset = tf.data.Dataset.from_tensor_slices((x[chosen], y[chosen]))
        return dataset.batch(_GLOBAL_BATCH.value // workers, drop_remainder=True)

    if variant == "stock_per_worker_data":
        return lambda epoch: strategy.distribute_datasets_from_function(
            lambda context: batches(epoch, context.input_pipeline_id, context.num_input_pipelines)
        )
    return lambda epoch: batches(epoch, 0, 1).prefetch(tf.data.AUTOTUNE)


def train(variant: str, strategy: tf.distribute.Strategy) -> dict[str, Any]:
    """Trains one epoch of warmup (with the tracing) and the timed ones; returns what was seen."""
    dataset_of = epoch_datasets(variant, strategy)
    with strategy.scope():
        model = build_model()
    timer, losses = StepTimer(), []
    for epoch in range(1 + _EPOCHS.value):
        history = model.fit(
            dataset_of(epoch),
            initial_epoch=epoch,
            epochs=epoch + 1,
            callbacks=[timer],
            shuffle=False,  # the order is in the data set
            verbose=0,
        )
        losses += history.history["loss"]
    weights = np.concatenate([weight.ravel() for weight in model.get_weights()])
    return {
        "step_ms": timer.wall_ms[1:],
        "cpu_ms": timer.cpu_ms[1:],
        "losses": losses,
        "steps": int(model.optimizer.iterations.numpy()),
        "weights": weights.tolist(),
    }


def main(_: Sequence[str]) -> None:
    strategy = make_strategy(_VARIANT.value)
    ours = isinstance(strategy, tlb.LargeBatchStrategy)  # which alone knows MPI's ranks
    topology = strategy.topology if ours else tlb.ClusterTopology.from_environment()
    result = train(_VARIANT.value, strategy)
    (Path(_RESULT_DIR.value) / f"worker_{topology.rank:02d}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    app.run(main)
