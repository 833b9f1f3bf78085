"""Twelve workers: TensorFlow orders their devices as text, with 10 and 11 before 2."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

import tf_largebatch as tlb


def setup():
    return tlb.LargeBatchStrategy(
        all_reduce="tensorflow", start_timeout_seconds=120, timeout_seconds=120
    )


def case_predict(strategy):
    with strategy.scope():
        inputs = keras.Input((1,))
        model = keras.Model(inputs, keras.layers.Rescaling(2.0)(inputs))
    rows = np.arange(31, dtype=np.float32)[:, None]  # 24, and 7 for 12 workers
    return model.predict(rows, batch_size=24, verbose=0)


def case_gather(strategy):
    rank = tf.constant([strategy.topology.rank])
    return strategy.gather(rank, axis=0).numpy()


def case_all_reduce(strategy):
    """Each rank adds to its own place; the surplus ranks fold theirs into others'."""

    def step():
        context = tf.distribute.get_replica_context()
        rank = context.replica_id_in_sync_group
        values = tf.one_hot(rank, 12) * tf.cast(rank + 1, tf.float32)
        options = tlb.AllReduceOptions(algorithm="halving_doubling")
        return context.all_reduce("SUM", values, options=options)

    return tf.function(lambda: strategy.run(step))().numpy()
