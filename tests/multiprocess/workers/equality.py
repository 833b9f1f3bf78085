"""Twenty steps of one global batch, however it is divided; compared across launches."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tf_largebatch as tlb

ROWS, GLOBAL_BATCH, STEPS = 160, 8, 20
RANDOM = np.random.default_rng(0)
LEFT = RANDOM.normal(size=(ROWS, 6)).astype(np.float32)
RIGHT = RANDOM.integers(0, 5, size=(ROWS,)).astype(np.int32)
CLASSES = RANDOM.integers(0, 3, size=(ROWS,)).astype(np.int64)
VALUES = RANDOM.normal(size=(ROWS, 1)).astype(np.float32)


def setup():
    return tlb.LargeBatchStrategy(
        all_reduce=os.environ["EQUALITY_ALL_REDUCE"],
        bucket_bytes=100,  # several for each of the models
        start_timeout_seconds=60,
        timeout_seconds=60,
    )


def two_inputs_two_outputs(strategy, optimizer, *, l2=0.01, **compile_options):
    """No batch norm; L2 terms, `add_loss`-like penalties, an embedding of an integer feature."""
    seeds = iter(range(100, 120))

    def initializer():
        return keras.initializers.RandomNormal(stddev=0.3, seed=next(seeds))

    with strategy.scope():
        left = keras.Input((6,), name="left")
        right = keras.Input((), dtype="int32", name="right")
        embedded = keras.layers.Embedding(5, 4, embeddings_initializer=initializer())(right)
        hidden = keras.layers.Concatenate()(
            [
                keras.layers.Dense(
                    8,
                    activation="tanh",
                    kernel_initializer=initializer(),
                    kernel_regularizer=keras.regularizers.L2(l2) if l2 else None,
                    activity_regularizer=keras.regularizers.L2(0.001),
                )(left),
                embedded,
            ]
        )
        classes = keras.layers.Dense(3, kernel_initializer=initializer(), name="classes")(hidden)
        value = keras.layers.Dense(1, kernel_initializer=initializer(), name="value")(hidden)
        model = keras.Model({"left": left, "right": right}, {"classes": classes, "value": value})
        model.compile(
            optimizer=optimizer() if callable(optimizer) else optimizer,
            loss={
                "classes": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                "value": keras.losses.MeanSquaredError(),
            },
            metrics={"classes": ["accuracy"], "value": ["mae"]},
            **compile_options,
        )
    return model


def sharder(global_batch=GLOBAL_BATCH):
    source = tlb.data.ArraySource(
        ({"left": LEFT, "right": RIGHT}, {"classes": CLASSES, "value": VALUES})
    )
    return tlb.data.GlobalShuffleSharder(source, global_batch_size=global_batch, seed=7)


def recipe(strategy, **options):
    settings = {
        "num_examples": ROWS,
        "per_replica_batch_size": GLOBAL_BATCH // strategy.num_replicas_in_sync,
        "num_replicas": strategy.num_replicas_in_sync,
        "base_learning_rate": 0.05,
        "base_batch_size": 4,
        "epochs": 1,
        "warmup_epochs": 0.4,
        "decay_epochs": (0.7, 0.9),
    }
    return tlb.Recipe(**{**settings, **options})


def trained_weights(model):
    return [np.asarray(weight.numpy()) for weight in model.weights]


def case_sgd_with_schedule(strategy):
    schedule = recipe(strategy).learning_rate_schedule()
    model = two_inputs_two_outputs(
        strategy, lambda: keras.optimizers.SGD(schedule, momentum=0.9, nesterov=True)
    )
    history = model.fit(sharder().train_dataset(strategy), epochs=1, verbose=0).history
    return {"weights": trained_weights(model), "history": history}


def case_learning_rate_warmup_callback(strategy):
    """The same rates, set from outside, on stock SGD whose momentum buffer is corrected."""
    model = two_inputs_two_outputs(strategy, lambda: keras.optimizers.SGD(0.05, momentum=0.9))
    callback = tlb.callbacks.LearningRateWarmup(recipe(strategy))
    history = model.fit(
        sharder().train_dataset(strategy), epochs=1, verbose=0, callbacks=[callback]
    ).history
    return {"weights": trained_weights(model), "rate": history["learning_rate"]}


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": lambda rate, **options: keras.optimizers.SGD(rate, momentum=0.9, **options),
    "momentum_sgd": lambda rate, **options: tlb.optimizers.MomentumSGD(
        rate, nesterov=True, weight_decay=0.02, global_clipnorm=0.5, **options
    ),
    "lars": lambda rate, **options: tlb.optimizers.LARS(
        rate, weight_decay=0.02, trust_coefficient=0.5, **options
    ),
}


def case_optimizers_and_accumulation(strategy):
    """Each optimizer, with batches of 8 rows and with 2 of 4 accumulated."""
    results = {}
    for name, make in OPTIMIZERS.items():
        for accumulated in (1, 2):
            settings = recipe(
                strategy,
                per_replica_batch_size=GLOBAL_BATCH // accumulated // strategy.num_replicas_in_sync,
                accumulation_steps=accumulated,
            )
            options = {"gradient_accumulation_steps": accumulated} if accumulated > 1 else {}
            schedule = settings.learning_rate_schedule()
            model = two_inputs_two_outputs(
                strategy,
                lambda make=make, schedule=schedule, options=options: make(schedule, **options),
                l2=0.01 if name == "sgd" else 0.0,
            )
            model.fit(in_parts_of(GLOBAL_BATCH // accumulated), epochs=1, verbose=0)
            assert int(tf.convert_to_tensor(model.optimizer.iterations)) == STEPS
            results[f"{name} {accumulated}"] = trained_weights(model)
    return results


def case_batch_norm(strategy):
    """Batch norm over the n rows of each worker; one process: in groups of n, or accumulated."""
    workers = strategy.num_replicas_in_sync
    rows = GLOBAL_BATCH // workers
    if workers > 1:
        return {f"n = {rows}": with_batch_norm(strategy, keras.layers.BatchNormalization)}
    results = {}
    for rows in (2, 4):
        ghost = partial(tlb.normalization.GhostBatchNormalization, rows)
        results[f"n = {rows}"] = with_batch_norm(strategy, ghost)
        results[f"n = {rows}, accumulated"] = with_batch_norm(
            strategy, keras.layers.BatchNormalization, accumulated=GLOBAL_BATCH // rows
        )
    return results


def with_batch_norm(strategy, layer, *, accumulated=1):
    """Trained weights, and moving means of the end, of all workers."""
    settings = recipe(
        strategy,
        per_replica_batch_size=GLOBAL_BATCH // accumulated // strategy.num_replicas_in_sync,
        accumulation_steps=accumulated,
    )
    initializer = keras.initializers.RandomNormal(stddev=0.5, seed=11)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8, kernel_initializer=initializer),
                layer(momentum=0.9),
                keras.layers.Activation("tanh"),
                keras.layers.Dense(3, kernel_initializer=initializer),
            ]
        )
        model.compile(
            tlb.optimizers.MomentumSGD(
                settings.learning_rate_schedule(),
                nesterov=True,
                weight_decay=0.02,
                gradient_accumulation_steps=accumulated if accumulated > 1 else None,
            ),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    data = in_parts_of(GLOBAL_BATCH // accumulated).map(lambda x, y: (x["left"], y["classes"]))
    model.fit(data, verbose=0, callbacks=[tlb.callbacks.BatchNormSync()])
    return {
        "trained": [np.asarray(weight.numpy()) for weight in model.trainable_weights],
        "moving mean": np.asarray(model.layers[1].moving_mean.numpy()),
    }


def in_parts_of(rows):
    """The rows of the sharder's global batches, in turn, so that an update sees the same ones."""
    order = np.concatenate(
        [sharder().positions(epoch=0, step=step) for step in range(STEPS)]
    )  # [row]
    data = tf.data.Dataset.from_tensor_slices(
        (
            {"left": LEFT[order], "right": RIGHT[order]},
            {"classes": CLASSES[order], "value": VALUES[order]},
        )
    )
    return data.batch(rows, drop_remainder=True)


def case_steps_per_execution(strategy):
    """5 steps at a time; 3 does not divide 20 and must still make 20 updates."""
    results = {}
    for steps in (5, 3):
        schedule = recipe(strategy).learning_rate_schedule()
        model = two_inputs_two_outputs(
            strategy,
            lambda schedule=schedule: keras.optimizers.SGD(schedule, momentum=0.9, nesterov=True),
            steps_per_execution=steps,
        )
        model.fit(sharder().train_dataset(strategy), epochs=1, verbose=0)
        results[str(steps)] = {
            "weights": trained_weights(model),
            "iterations": int(model.optimizer.iterations.numpy()),
        }
    return results


def case_evaluation(strategy):
    """37 rows in global batches of 4: the last step is not full."""
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(
                    1,
                    activation="sigmoid",
                    kernel_initializer=keras.initializers.RandomNormal(seed=3),
                ),
            ]
        )
        model.compile(loss="binary_crossentropy", metrics=["accuracy", keras.metrics.AUC()])
    labels = (VALUES[:, 0] > 0).astype(np.float32)[:, None]
    results = {}
    for rows in (37, 3):
        source = tlb.data.ArraySource((LEFT[:rows], labels[:rows]))
        data = tlb.data.evaluation_dataset(source, batch_size=4, strategy=strategy)
        results[f"source of {rows}"] = model.evaluate(data, verbose=0)
        results[f"arrays of {rows}"] = model.evaluate(
            LEFT[:rows], labels[:rows], batch_size=4, verbose=0
        )
        results[f"predict {rows}"] = model.predict(LEFT[:rows], batch_size=4, verbose=0)
    results["loss oracle"] = _binary_cross_entropy(model, LEFT[:37], labels[:37])
    return results


def _binary_cross_entropy(model, features, labels):
    kernel, bias = (weight.numpy().astype(np.float64) for weight in model.weights)
    probability = 1 / (1 + np.exp(-(features @ kernel + bias)))
    return float(-np.mean(labels * np.log(probability) + (1 - labels) * np.log1p(-probability)))
