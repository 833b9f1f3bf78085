"""Batch norm on two workers with two replicas each, whose data are shifted against each other."""

from __future__ import annotations

import tempfile
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tf_largebatch as tlb

ROWS, CHANNELS, STEPS, MOMENTUM = 4, 3, 4, 0.75
VALIDATION = np.random.default_rng(9).normal(size=(10, CHANNELS)).astype(np.float32)


def setup():
    return tlb.LargeBatchStrategy(start_timeout_seconds=60, timeout_seconds=60)


def batch_of(replica, step):
    """`[row, channel]`; the replica's number is in the mean and in the deviation."""
    random = np.random.default_rng([replica, step])
    return (random.normal(size=(ROWS, CHANNELS)) * (1 + replica) + 10 * replica).astype(np.float32)


def train_data(strategy):
    """A finite data set of `STEPS` steps, in which each replica has batches of its own."""
    first = 2 * strategy.topology.rank
    rows = np.stack(
        [batch_of(first + local, step) for step in range(STEPS) for local in range(2)]
    )  # [step and local replica, row, channel]

    def dataset_fn(_):
        return tf.data.Dataset.from_tensor_slices((rows, rows[:, :, :1]))

    return strategy.distribute_datasets_from_function(dataset_fn)


def compiled(strategy, **options):
    with strategy.scope():
        inner = keras.Sequential(
            [
                keras.Input((4,)),
                tlb.normalization.GhostBatchNormalization(2, momentum=MOMENTUM, name="ghost"),
            ]
        )
        model = keras.Sequential(
            [
                keras.Input((CHANNELS,)),
                keras.layers.BatchNormalization(momentum=MOMENTUM, name="first"),
                keras.layers.Dense(4, kernel_initializer=keras.initializers.RandomNormal(seed=1)),
                inner,
                keras.layers.Dense(1, kernel_initializer=keras.initializers.RandomNormal(seed=2)),
            ]
        )
        model.compile(keras.optimizers.SGD(0.01), "mse", **options)
    return model


def statistics(model):
    """[local replica, variable]: means and variances of both layers."""
    first, ghost = model.get_layer("first"), model.layers[-2].get_layer("ghost")
    variables = [v for layer in (first, ghost) for v in (layer.moving_mean, layer.moving_variance)]
    return [[v.value.values[local].numpy() for v in variables] for local in range(2)]


def case_data(strategy):
    """`[replica, step, row, channel]`, and the momentum."""
    batches = [[batch_of(replica, step) for step in range(STEPS)] for replica in range(4)]
    return {"batches": np.array(batches), "momentum": MOMENTUM}


class Recorder(keras.callbacks.Callback):
    def __init__(self, *events):
        super().__init__()
        self.events, self.seen = events, []

    def record(self, event):
        if event in self.events:
            self.seen.append(statistics(self.model))

    def on_train_batch_end(self, batch, logs=None):
        self.record("batch")

    def on_epoch_end(self, epoch, logs=None):
        self.record("epoch")

    def on_test_begin(self, logs=None):
        self.record("test")

    def on_train_end(self, logs=None):
        self.record("end")


def case_epochs_and_files(strategy):
    model = compiled(strategy)
    before, after = Recorder("batch"), Recorder("epoch", "end")
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "epoch.keras"
        model.fit(
            train_data(strategy),
            epochs=2,
            verbose=0,
            callbacks=[
                before,
                tlb.callbacks.BatchNormSync(),
                after,
                keras.callbacks.ModelCheckpoint(checkpoint),
            ],
        )
        files = [checkpoint, Path(folder) / "end.keras"]
        model.save(files[1])
        saved = [keras.models.load_model(file).get_weights() for file in files]
    return {
        "batches": before.seen,
        "epochs and end": after.seen,
        "saved": saved,
        "output": np.asarray(model(VALIDATION, training=False)),
    }


def case_validation(strategy):
    model = compiled(strategy)
    at_test = Recorder("test")
    data = tlb.data.evaluation_dataset(
        tlb.data.ArraySource((VALIDATION, VALIDATION[:, :1])), batch_size=4, strategy=strategy
    )
    history = model.fit(
        train_data(strategy),
        epochs=2,
        verbose=0,
        validation_data=data,
        callbacks=[tlb.callbacks.BatchNormSync(), at_test],
    )
    outputs = np.asarray(model(VALIDATION, training=False))
    return {
        "val_loss": history.history["val_loss"],
        "by hand": float(np.mean((outputs - VALIDATION[:, :1]) ** 2)),
        "at test": at_test.seen,
    }


def case_every_steps(strategy):
    """3 of 4 steps: after batches 2 and 5 (the second of the next epoch), and at epochs' ends."""
    model = compiled(strategy)
    recorder = Recorder("batch", "epoch")
    model.fit(
        train_data(strategy),
        epochs=2,
        verbose=0,
        callbacks=[tlb.callbacks.BatchNormSync(every_steps=3), recorder],
    )
    return recorder.seen


def case_several_steps_in_a_call(strategy):
    model = compiled(strategy, steps_per_execution=2)
    recorder = Recorder("end")
    model.fit(
        train_data(strategy),
        verbose=0,
        callbacks=[tlb.callbacks.BatchNormSync(), recorder],
    )
    return recorder.seen


def case_zero_init_residual(strategy):
    """Outside of the scope; gammas on both local replicas, and after a step."""
    with strategy.scope():
        model = tlb.models.ResNetSmall(2, input_shape=(8, 8, 3), zero_init_residual=False, seed=1)
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    touched = tlb.models.zero_init_residual(model)
    gammas = [[part.numpy() for part in layer.gamma.value.values] for layer in touched]
    images = np.random.default_rng(1).normal(size=(16, 8, 8, 3)).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices((images, np.arange(16) % 2)).batch(8)
    model.fit(data, verbose=0)
    trained = [[part.numpy() for part in layer.gamma.value.values] for layer in touched]
    return {"start": gammas, "trained": trained}


def case_recalibration(strategy):
    """Rows of a plain data set, the same on all workers, of which each replica takes its part."""
    model = compiled(strategy)
    rows = np.concatenate([batch_of(replica, 0) for replica in range(4)] * 2)  # 32 rows
    data = tf.data.Dataset.from_tensor_slices((rows, rows[:, :1])).batch(16)
    used = [
        tlb.normalization.recalibrate_batch_norm(model, data),
        tlb.normalization.recalibrate_batch_norm(model, data.repeat(), steps=4),
        tlb.normalization.recalibrate_batch_norm(model, train_data(strategy), steps=3),
    ]
    of_own_data = statistics(model)
    tlb.normalization.recalibrate_batch_norm(model, data)
    return {"used": used, "rows": rows, "own": of_own_data, "plain": statistics(model)}
