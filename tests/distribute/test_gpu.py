"""One host's GPUs, or its one GPU, train as one CPU does."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_largebatch as tlb

GPUS = tf.config.list_physical_devices("GPU")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not GPUS, reason="TensorFlow sees no GPU"),
]


def trained_weights(strategy: tf.distribute.Strategy) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    source = tlb.data.ArraySource(
        (random.normal(size=(64, 6)).astype(np.float32), random.integers(0, 3, size=64))
    )
    sharder = tlb.data.GlobalShuffleSharder(source, global_batch_size=16, seed=1)
    with strategy.scope():
        initializer = keras.initializers.RandomNormal(seed=2)
        model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(3, kernel_initializer=initializer)]
        )
        model.compile(
            tlb.optimizers.MomentumSGD(0.1),
            tlb.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    model.fit(sharder.train_dataset(strategy), epochs=2, verbose=0)
    return model.get_weights()


def test_all_gpus_of_the_host_train_as_one_cpu() -> None:
    strategy = tlb.LargeBatchStrategy()
    assert strategy.num_replicas_in_sync == len(GPUS)
    assert "NCCL" in strategy.all_reduce_report()
    expected = trained_weights(tf.distribute.OneDeviceStrategy("/cpu:0"))
    for weight, reference in zip(trained_weights(strategy), expected, strict=True):
        np.testing.assert_allclose(weight, reference, rtol=0, atol=1e-5)
