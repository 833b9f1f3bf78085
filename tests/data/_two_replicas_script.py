"""Trains, evaluates and predicts on two CPU replicas; prints what was seen as one line of JSON.

A process of its own: logical devices must be configured before anything else uses TensorFlow.
"""

from __future__ import annotations

import json
import time
import warnings

import keras
import numpy as np
import tensorflow as tf

from tests.data._helpers import numbered_rows, recording_model
from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.data import GlobalShuffleSharder, evaluation_dataset
from tf_largebatch.distribute import LargeBatchStrategy

SEED, ROWS, BATCH = 5, 23, 4


def sharder_of(batch: int) -> GlobalShuffleSharder:
    return GlobalShuffleSharder(numbered_rows(ROWS), global_batch_size=batch, seed=SEED)


def trained(
    strategy: tf.distribute.Strategy,
    *,
    built: bool = True,
    batch: int = BATCH,
    steps_per_epoch: int | None = None,
    steps_per_execution: int = 1,
    validation_rows: int = 0,
    class_weight: dict[int, float] | None = None,
    strategy_given: bool = True,
    fits: tuple[int, ...] = (2,),
) -> dict[str, object]:
    with strategy.scope():
        model, batches = recording_model(built=built, steps_per_execution=steps_per_execution)
    # Keras distributes a data set that is made without the strategy.
    given = strategy if strategy_given else None
    dataset = sharder_of(batch).train_dataset(given)
    validation = None
    if validation_rows:
        validation = evaluation_dataset(
            numbered_rows(validation_rows), batch_size=8, strategy=given
        )
    history: dict[str, list[float]] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for epochs in fits:
            fitted = model.fit(
                dataset,
                epochs=epochs,
                steps_per_epoch=steps_per_epoch,
                validation_data=validation,
                class_weight=class_weight,
                verbose=0,
            )
            for name, values in fitted.history.items():
                history.setdefault(name, []).extend(values)
    return {
        "batches": batches,
        "iterations": int(model.optimizer.iterations.numpy()),
        "cardinality": int(dataset.cardinality if strategy_given else dataset.cardinality()),
        "ran_out_of_data": sum("ran out of data" in str(each.message) for each in caught),
        **history,
    }


def next_pass_after(strategy: tf.distribute.Strategy, *, read: int) -> dict[str, object]:
    """Reads `read` steps, leaves time to read ahead; the first step of the next pass."""
    dataset = sharder_of(BATCH).train_dataset(strategy)
    # As Keras does for class weights, but with a fixed size: AUTOTUNE reads ahead now and then.
    dataset = dataset.map(lambda x, y: (x, y)).prefetch(4)
    iterator = iter(dataset)
    for _ in range(read):
        next(iterator)
    time.sleep(0.3)
    replicas = strategy.experimental_local_results(next(iter(dataset))[0])
    return {
        "shapes": [replica.shape.as_list() for replica in replicas],
        "rows": np.concatenate(replicas)[:, 0].astype(int).tolist(),
    }


def evaluated_and_predicted(strategy: tf.distribute.Strategy) -> dict[str, object]:
    with strategy.scope():
        model = keras.Sequential([keras.Input([1]), keras.layers.Activation("sigmoid")])
        model.compile(
            loss="binary_crossentropy",
            metrics=["binary_accuracy", keras.metrics.AUC(name="auc")],
            jit_compile=False,
        )
    results: dict[str, object] = {}
    for rows, batch in ((37, 8), (1, 4)):
        dataset = evaluation_dataset(
            numbered_rows(rows),
            batch_size=batch,
            strategy=strategy,
            map_fn=lambda x, y: (tf.sin(x), y),
        )
        results[str(rows)] = {
            **model.evaluate(dataset, verbose=0, return_dict=True),
            "predicted": model.predict(dataset, verbose=0)[:, 0].tolist(),
        }
    return results


def refused_under_stock_strategy() -> list[str]:
    stock = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    messages = []
    for make in (
        lambda: sharder_of(BATCH).train_dataset(stock),
        lambda: evaluation_dataset(numbered_rows(37), batch_size=8, strategy=stock),
    ):
        try:
            make()
        except ConfigurationError as error:
            messages.append(str(error))
    return messages


def main() -> None:
    strategy = LargeBatchStrategy()
    results = {
        "unbuilt": trained(strategy, built=False, validation_rows=37, fits=(2, 1)),
        "given_steps": trained(strategy, steps_per_epoch=5, class_weight={0: 1.0, 1: 3.0}),
        "strategy_not_given": trained(strategy, validation_rows=37, strategy_given=False),
        "two_steps_an_epoch": trained(strategy, batch=10, steps_per_execution=2),
        "steps_per_execution": trained(strategy, steps_per_execution=2),
        "one_step_an_epoch": trained(strategy, batch=22),
        "next_pass": [next_pass_after(strategy, read=read) for read in range(3)],
        "evaluation": evaluated_and_predicted(strategy),
        "refused": refused_under_stock_strategy(),
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
