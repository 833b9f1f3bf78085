"""Prints what dropout leaves of ones on each replica, in two calls; see test_replica_seeds.py."""

from __future__ import annotations

import json

import keras
import tensorflow as tf

import tf_largebatch as tlb

strategy = tlb.LargeBatchStrategy()
with strategy.scope():
    dropout = keras.layers.Dropout(0.5, seed=1)


@tf.function
def drop():
    return strategy.run(lambda: dropout(tf.ones(64), training=True))


calls = [[value.numpy().tolist() for value in drop().values] for _ in range(2)]
print(json.dumps(calls))
