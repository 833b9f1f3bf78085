"""What workers compare before they train: each case returns what this worker was told.

A mismatch is an error on all workers alike, after which they can go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tf_largebatch as tlb

ROWS = 32


def setup() -> tlb.LargeBatchStrategy:
    return tlb.LargeBatchStrategy(all_reduce="tensorflow", timeout_seconds=30.0)


def compiled_model(strategy: tlb.LargeBatchStrategy, **compiled: Any) -> keras.Model:
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(**{"optimizer": "sgd", "loss": "mse", **compiled})
    return model


def arrays(rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    x = np.linspace(0.0, 1.0, 3 * rows, dtype=np.float32).reshape(rows, 3)
    return x, x[:, :1]


def batches() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(arrays()).batch(8)


def told(action: Callable[[], Any]) -> str:
    try:
        action()
    except tlb.MismatchError as error:
        return str(error)
    return ""


@contextmanager
def purposes_of(strategy: tlb.LargeBatchStrategy) -> Iterator[list[str]]:
    """What workers gather meanwhile."""
    purposes: list[str] = []
    extended = strategy.extended
    gather = extended.gather_from_workers

    def noted(value: Any, *, purpose: str, detail: str = "") -> Any:
        purposes.append(purpose)
        return gather(value, purpose=purpose, detail=detail)

    extended.gather_from_workers = noted
    try:
        yield purposes
    finally:
        del extended.gather_from_workers


# --- Models


def schedule(boundary: int) -> keras.optimizers.schedules.LearningRateSchedule:
    return keras.optimizers.schedules.PiecewiseConstantDecay([boundary, 60], [0.5, 0.25, 0.125])


def case_models(strategy: tlb.LargeBatchStrategy) -> dict[str, str]:
    rank = strategy.topology.rank
    different = {
        "schedule": {"optimizer": keras.optimizers.SGD(schedule(30 + 10 * rank))},
        "rate": {"optimizer": keras.optimizers.SGD(0.5 + rank)},
        "optimizer": {"optimizer": keras.optimizers.SGD(nesterov=rank == 1)},
        "loss": {"loss": ("mse", "mae")[rank]},
        "steps_per_execution": {"steps_per_execution": 1 + rank},
    }
    texts = {}
    for name, compiled in different.items():
        model = compiled_model(strategy, **compiled)
        texts[name] = told(lambda model=model: model.fit(batches(), verbose=0))
    return texts


def case_again(strategy: tlb.LargeBatchStrategy) -> list[str]:
    """The error stays, until another `compile` cures it, and comes again with a bad one."""
    rank = strategy.topology.rank
    model = compiled_model(strategy, optimizer=keras.optimizers.SGD(nesterov=rank == 1))
    texts = [told(lambda: model.fit(batches(), verbose=0)) for _ in range(2)]
    for nesterov in (True, rank == 1):
        with strategy.scope():
            model.compile(keras.optimizers.SGD(nesterov=nesterov), "mse")
        texts.append(told(lambda: model.fit(batches(), verbose=0)))
    return texts


def case_one_gather(strategy: tlb.LargeBatchStrategy) -> list[list[str]]:
    model = compiled_model(strategy)
    with purposes_of(strategy) as first:
        model.fit(batches(), verbose=0)
    with purposes_of(strategy) as second:
        model.fit(batches(), epochs=2, verbose=0)
    return [first, second]


# --- Data


def case_data(strategy: tlb.LargeBatchStrategy) -> dict[str, str]:
    rank = strategy.topology.rank

    def trains(*, seed: int = 1, rows: int = ROWS, global_batch_size: int = 8) -> str:
        source = tlb.data.ArraySource(arrays(rows))
        sharder = tlb.data.GlobalShuffleSharder(
            source, global_batch_size=global_batch_size, seed=seed
        )
        return told(lambda: sharder.train_dataset(strategy))

    def evaluates(rows: int) -> str:
        source = tlb.data.ArraySource(arrays(rows))
        return told(lambda: tlb.data.evaluation_dataset(source, batch_size=8, strategy=strategy))

    sharder = tlb.data.GlobalShuffleSharder(
        tlb.data.ArraySource(arrays()), global_batch_size=8, seed=1
    )
    own = (lambda: strategy.experimental_distribute_dataset(batches()), None)
    mixed = (own[0], lambda: sharder.train_dataset(strategy))[rank]
    return {
        "equal": trains(),
        "seed": trains(seed=1 + rank),
        "rows": trains(rows=ROWS - 8 * rank),
        "evaluation": evaluates(ROWS - rank),
        "equal evaluation": evaluates(ROWS),
        "own": told(own[0]),
        "mixed": told(mixed),
    }


# --- Metrics: summed when they are read


def case_metrics(strategy: tlb.LargeBatchStrategy) -> dict[str, Any]:
    with strategy.scope():
        metric = keras.metrics.Mean()
        mean = tf.Variable(
            0.0,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.MEAN,
        )
        matrix = keras.metrics.MeanIoU(num_classes=2)

    def step() -> None:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        metric.update_state([1.0 + tf.cast(replica, tf.float32)])
        mean.assign(tf.cast(replica, tf.float32))
        matrix.update_state([0, 1, 1], [0, 1, 0])

    in_graph = tf.function(lambda: strategy.run(step))
    found: dict[str, Any] = {"results": []}
    with purposes_of(strategy) as purposes:
        for run in (lambda: strategy.run(step), in_graph, in_graph):
            run()
            found["results"].append([float(metric.result()) for _ in range(2)])
            found["results"][-1].append(float(metric.count.value.read_value()))
        found["reads"] = len(purposes)
        found["mean"] = float(mean.read_value())
        found["iou"] = float(matrix.result())
        purposes.clear()
        metric.reset_state()
        mean.assign(5.0)
        found["resets"] = list(purposes)
        found["after"] = [
            float(metric.result()),
            float(metric.count.value.read_value()),
            float(mean.read_value()),
        ]
        found["purposes"] = list(purposes)
    return found
