"""StepProfile on two workers, of which one computes longer, by a time that is known."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tf_largebatch as tlb

PAUSES = (0.02, 0.12)  # of rank 0 and 1


def setup():
    return tlb.LargeBatchStrategy(start_timeout_seconds=120, timeout_seconds=120)


class Pause(keras.layers.Layer):
    def call(self, inputs):
        def pause(values):
            # Asked for here, as layers must be equal on all workers.
            time.sleep(PAUSES[tlb.ClusterTopology.from_environment().rank])
            return values

        paused = tf.numpy_function(pause, [inputs], tf.float32)
        paused.set_shape(inputs.shape)
        return inputs + 0.0 * tf.stop_gradient(paused)


def profiled(strategy, directory=None):
    x = np.ones((60, 8), np.float32)
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((8,)), Pause(), keras.layers.Dense(4)])
        model.compile("sgd", "mse")
    profile = tlb.callbacks.StepProfile(first_step=3, steps=8, directory=directory)
    train = tlb.data.GlobalShuffleSharder(
        tlb.data.ArraySource((x, x[:, :4])), global_batch_size=4, seed=1
    )
    model.fit(train.train_dataset(strategy), verbose=0, shuffle=False, callbacks=[profile])
    report = profile.report
    return {
        name: getattr(report, name)
        for name in ("seconds", "compute", "input_wait", "exposed_communication", "other")
    } | {"steps": len(report.steps)}


def case_parts(strategy):
    return profiled(strategy)


def case_directories(strategy):
    # One folder for both, as on a shared file system.
    base = Path(tempfile.gettempdir()) / f"step_profile_test_{os.getppid()}"
    profiled(strategy, base)
    strategy.barrier()
    own = base / f"worker_{strategy.topology.rank}"
    names = [sorted(path.name for path in folder.iterdir()) for folder in (base, own)]
    strategy.barrier()
    if strategy.topology.is_chief:
        shutil.rmtree(base)
    return names
