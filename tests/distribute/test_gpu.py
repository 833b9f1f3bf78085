"""One host's GPUs, or its one GPU, train as one CPU does."""

from __future__ import annotations

import functools

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


@functools.cache
def the_strategy() -> tlb.LargeBatchStrategy:
    """A process can make one only."""
    return tlb.LargeBatchStrategy()


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
    strategy = the_strategy()
    assert strategy.num_replicas_in_sync == len(GPUS)
    assert "NCCL" in strategy.all_reduce_report()
    expected = trained_weights(tf.distribute.OneDeviceStrategy("/cpu:0"))
    for weight, reference in zip(trained_weights(strategy), expected, strict=True):
        np.testing.assert_allclose(weight, reference, rtol=0, atol=1e-5)


@pytest.mark.parametrize("algorithm", ["tensorflow", "ring", "halving_doubling", "auto"])
@pytest.mark.parametrize("dtype", [tf.float16, tf.float32, tf.float64])
def test_all_reduce_on_the_gpus_of_the_host(algorithm: str, dtype: tf.DType) -> None:
    strategy = the_strategy()
    replicas = strategy.num_replicas_in_sync
    options = tlb.AllReduceOptions(algorithm=algorithm, bucket_bytes=4000)

    def step() -> list[tf.Tensor]:
        context = tf.distribute.get_replica_context()
        member = tf.cast(context.replica_id_in_sync_group, dtype)
        values = [tf.fill([size], member + 1) for size in (1, 7, 1000, 3000)]
        return context.all_reduce("SUM", values, options=options)

    for result in tf.function(lambda: strategy.run(step))():
        for local in strategy.experimental_local_results(result):
            np.testing.assert_array_equal(
                local, np.full(local.shape, replicas * (replicas + 1) / 2)
            )
