"""The workers of `benchmark_startup.py`; see `_forks.py` for how they start."""

from __future__ import annotations

import hashlib
import multiprocessing
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from _forks import read_addresses, run_forks
from absl import app, flags

import tf_largebatch as tlb

_NO_STRATEGY = ("alone", "side_by_side")
_VARIANTS = (*_NO_STRATEGY, "stock", "ours_other_seeds", "ours_equal_seeds", "ours_parallel")
_RESULT_DIR = flags.DEFINE_string("result_dir", None, "See _forks.py.", required=True)
_VARIANT = flags.DEFINE_enum("variant", None, _VARIANTS, "See benchmark_startup.py.", required=True)
_MODEL = flags.DEFINE_enum("model", None, ["resnet50", "resnet_small"], "Network.", required=True)
_TIMEOUT = flags.DEFINE_float("timeout_seconds", None, "For each wait.", required=True)

_CLASSES = 1000
_SEED = 1
_DIFFERENT_SEEDS = ("stock", "ours_other_seeds")


def make_strategy(variant: str) -> tf.distribute.Strategy:
    """The strategy of the variant; TensorFlow's default one where there is none."""
    if variant in _NO_STRATEGY:
        return tf.distribute.get_strategy()
    if variant == "stock":
        return tf.distribute.MultiWorkerMirroredStrategy()
    return tlb.LargeBatchStrategy(
        parallel_initialization=variant == "ours_parallel",
        start_timeout_seconds=_TIMEOUT.value,
        timeout_seconds=_TIMEOUT.value,
    )


def build() -> tuple[keras.Model, keras.optimizers.Optimizer]:
    """Model and optimizer with all their variables."""
    make = tlb.models.ResNet50 if _MODEL.value == "resnet50" else tlb.models.ResNetSmall
    model = make(_CLASSES)
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    model.optimizer.build(model.trainable_variables)
    return model, model.optimizer


def measure(rank: int, start_line: Any) -> dict[str, Any]:
    """Builds once; all workers enter the scope together."""
    keras.utils.set_random_seed(_SEED + rank * (_VARIANT.value in _DIFFERENT_SEEDS))
    begin = time.monotonic()
    strategy = make_strategy(_VARIANT.value)
    strategy_seconds = time.monotonic() - begin
    start_line.wait(_TIMEOUT.value)
    cpu_start, start = time.process_time(), time.monotonic()
    with strategy.scope():
        model, optimizer = build()
    end, cpu_end = time.monotonic(), time.process_time()
    digest = hashlib.sha256()
    for variable in (*model.variables, *optimizer.variables):
        digest.update(variable.numpy().tobytes())
    start_line.wait(_TIMEOUT.value)  # TensorFlow takes a worker that leaves early for a crash
    return {
        "strategy_seconds": strategy_seconds,
        "seconds": end - start,
        "cpu_seconds": cpu_end - cpu_start,
        "variables": len(model.variables) + len(optimizer.variables),
        "sha256": digest.hexdigest(),
    }


def main(_: Sequence[str]) -> int:
    folder = Path(_RESULT_DIR.value)
    start_line = multiprocessing.get_context("fork").Barrier(len(read_addresses(folder)))
    return run_forks(folder, lambda rank: measure(rank, start_line))


if __name__ == "__main__":
    app.run(main)
