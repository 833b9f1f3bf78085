"""One run of the study: a ResNet-8 on the photo patches, by the public parts of the package."""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from _local_cluster import die_with_parent
from _study_settings import SELECTION_SEED, WORKER_BATCH, Setting

import tf_largebatch as tlb

# The data set is one of the examples'. Behind all else: its files have names of their own.
sys.path.append(str(Path(__file__).parents[1] / "examples"))
from _photo_patches import NUM_CLASSES, PATCH, mirror_at_random, photo_patches
from _report import weights_sha256

LAST_EPOCHS = 5  # a run's error is the median of theirs, as in the paper
_DIGITS = 5
_EVALUATION_BATCH = 200
_WEIGHT_DECAY = 1e-4
_CLUSTER_SECONDS = 1800
_TOOLS = Path(__file__).parent
Parts = Mapping[str, Any]


class _RunLog(keras.callbacks.Callback):
    """The curves of a run, and the test error after each of the last epochs.

    What is seen of the test patches changes nothing, and is not looked at for `SELECTION_SEED`.
    """

    def __init__(self, recipe: tlb.Recipe, test: Any) -> None:
        super().__init__()
        self._recipe, self._test = recipe, test
        self.curves: dict[str, list[float | None]] = {
            name: [] for name in ("learning_rate", "train_loss", "train_error", "val_errors")
        }
        self.test_errors: list[float] = []

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        last_update = (epoch + 1) * self._recipe.steps_per_epoch - 1
        values = {
            "learning_rate": self._recipe.learning_rate_at(last_update),
            "train_loss": logs["loss"],
            "train_error": 1 - logs["accuracy"],
            "val_errors": 1 - logs["val_accuracy"],
        }
        for name, value in values.items():
            self.curves[name].append(_rounded(value))
        if self._test is not None and epoch >= self._recipe.epochs - LAST_EPOCHS:
            seen = self.model.evaluate(self._test, verbose=0, return_dict=True)
            self.test_errors.append(_rounded(1 - seen["accuracy"]))


def use_one_thread() -> None:
    """For a process that shares the machine with others like it; before TensorFlow's first op."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)


def run(setting: Setting) -> dict[str, Any]:
    """Makes one run, in this process or with workers of its own, and returns what it gave."""
    if setting.workers > 1:
        return _run_on_workers(setting)
    return train(setting, photo_patches(split=setting.split))


def train(setting: Setting, parts: Parts, strategy: Any = None) -> dict[str, Any]:
    """Trains and evaluates.

    A micro-batch is a step of a sharder whose global batch is one micro-batch on each worker: k of
    them follow one another in the same order of rows, so that a minibatch of 8 k is the next k of
    the baseline's, whoever reads them.

    Batch norm's moving averages move at each micro-batch, also between updates, by the same share
    for all sizes: they reach back over the same number of rows.

    Args:
        parts: of `photo_patches`.
        strategy: for real workers.

    Returns:
        A dictionary for JSON.
    """
    started_at = time.perf_counter()
    keras.backend.clear_session()
    recipe = setting.recipe(len(parts["train"][1]))
    sharder = tlb.data.GlobalShuffleSharder(
        tlb.data.ArraySource(parts["train"]),
        global_batch_size=WORKER_BATCH * setting.workers,
        seed=setting.seed,
        row_fn=mirror_at_random,
    )
    validation, test = (
        tlb.data.evaluation_dataset(
            tlb.data.ArraySource(parts[name]), batch_size=_EVALUATION_BATCH, strategy=strategy
        )
        for name in ("validation", "test")
    )
    log = _RunLog(recipe, None if setting.seed == SELECTION_SEED else test)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = _compiled_model(setting, recipe, steps_per_execution=sharder.steps_per_epoch)
    # One process has one set of moving statistics; workers pool theirs before evaluation.
    synchronised = [tlb.callbacks.BatchNormSync()] if strategy else []
    model.fit(
        sharder.train_dataset(strategy),
        epochs=recipe.epochs,
        shuffle=False,  # the sharder's part
        validation_data=validation,
        callbacks=[*synchronised, log],
        verbose=0,
    )
    return {
        "updates": int(model.optimizer.iterations.numpy()),
        "val_error": statistics.median(log.curves["val_errors"][-LAST_EPOCHS:]),
        "test_error": statistics.median(log.test_errors) if log.test_errors else None,
        "test_errors": log.test_errors,
        **log.curves,
        "seconds": round(time.perf_counter() - started_at, 1),
        "weights_sha256": weights_sha256(model),
        "versions": {module.__name__: module.__version__ for module in (tlb, tf, keras, np)},
    }


def _compiled_model(
    setting: Setting, recipe: tlb.Recipe, *, steps_per_execution: int
) -> keras.Model:
    model = tlb.models.ResNetSmall(
        NUM_CLASSES,
        depth=8,
        input_shape=(PATCH, PATCH, 1),
        zero_init_residual=setting.zero_gamma,
        seed=setting.seed,
    )
    accumulation = recipe.accumulation_steps
    options = {
        "weight_decay": _WEIGHT_DECAY,
        "gradient_accumulation_steps": accumulation if accumulation > 1 else None,
    }
    rates = recipe.learning_rate_schedule()
    if setting.optimizer == "lars":
        optimizer = tlb.optimizers.LARS(rates, **options)
    else:
        optimizer = tlb.optimizers.MomentumSGD(rates, nesterov=True, **options)
    model.compile(
        optimizer,
        tlb.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        steps_per_execution=steps_per_execution,  # an epoch is one call
    )
    return model


def _run_on_workers(setting: Setting) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="study_warmup_") as folder:
        output = Path(folder) / "outcome.json"
        command = [
            *(sys.executable, str(_TOOLS / "launch_local_cluster.py")),
            *(f"--workers={setting.workers}", f"--log_dir={folder}", "--status_seconds=0", "--"),
            *(sys.executable, str(_TOOLS / "_study_worker.py")),
            *(f"--setting={json.dumps(setting.to_dict())}", f"--output={output}"),
        ]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_CLUSTER_SECONDS,
            check=False,
            preexec_fn=die_with_parent(os.getpid()),
        )
        if done.returncode != 0:
            raise RuntimeError(f"{setting} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        return json.loads(output.read_text())


def _rounded(value: float) -> float | None:
    """For JSON, which has no infinity: what is not finite is None."""
    return round(float(value), _DIGITS) if math.isfinite(value) else None
