"""The files that a run leaves, written by the chief."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from _config import TrainConfig

import tf_largebatch as tlb

# What a run may be resumed with otherwise: none of it changes what is trained.
_MAY_CHANGE = {
    "run_dir",
    "data_dir",
    "all_reduce",
    "transport",
    "save_every_steps",
    "per_replica_batch_size",
}


def refuse_other_run(config: TrainConfig, run_dir: Path) -> None:
    """Raises ConfigurationError if the folder holds a run with other settings."""
    path = run_dir / "config.json"
    if not path.exists():
        return
    there, here = _read_json(path), json.loads(json.dumps(dataclasses.asdict(config)))
    lines = [
        f"  --{name}: {there.get(name)!r} there, {value!r} now"
        for name, value in here.items()
        if name not in _MAY_CHANGE and there.get(name) != value
    ]
    _refuse(lines, run_dir)


def write_config(config: TrainConfig, recipe: tlb.Recipe, run_dir: Path) -> None:
    """config.json: the settings, and the recipe that they make with the number of replicas.

    Of a run that is resumed it stays as it is; the number of replicas may be another one.

    Raises:
        ConfigurationError: with another global batch.
    """
    path = run_dir / "config.json"
    if path.exists():
        there = tlb.Recipe.from_dict(_read_json(path)["recipe"]).global_batch_size
        if there != recipe.global_batch_size:
            _refuse([f"  global batch: {there} there, {recipe.global_batch_size} now"], run_dir)
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    _write_json({**dataclasses.asdict(config), "recipe": recipe.to_dict()}, path)


def _refuse(lines: Sequence[str], run_dir: Path) -> None:
    if lines:
        raise tlb.ConfigurationError(
            f"--run_dir={run_dir} holds a run with other settings:\n"
            + "\n".join(lines)
            + "\nResume it with the same, or give another folder."
        )


def weights_sha256(model: keras.Model) -> str:
    """SHA-256 over the trained weights' bytes, in the model's order: equal on all workers."""
    digest = hashlib.sha256()
    for weight in model.trainable_weights:
        digest.update(np.ascontiguousarray(keras.ops.convert_to_numpy(weight)).tobytes())
    return digest.hexdigest()


def save_model(model: keras.Model, path: Path) -> None:
    """Saves under another name first, so that `path` is a whole model or is not there."""
    temporary = path.with_name(f".{path.name}.partial.keras")  # Keras asks for the extension
    model.save(temporary)
    os.replace(temporary, path)


def write_summary(
    model: keras.Model,
    recipe: tlb.Recipe,
    history: Mapping[str, Sequence[float]],
    run_dir: Path,
    *,
    num_workers: int,
) -> dict[str, Any]:
    """summary.json, the last file of a run; returns its contents.

    `images_per_second` is the median of the epochs without the first, which compiles.
    """
    speeds = history["images_per_second"]
    summary = {
        "final_val_accuracy": history["val_accuracy"][-1],
        "final_val_loss": history["val_loss"][-1],
        "final_train_accuracy": history["accuracy"][-1],
        "images_per_second": statistics.median(speeds[1:] or speeds),
        "global_batch_size": recipe.global_batch_size,
        "num_workers": num_workers,
        "num_replicas": recipe.num_replicas,
        "epochs": recipe.epochs,
        "steps": int(tf.convert_to_tensor(model.optimizer.iterations)),
        "weights_sha256": weights_sha256(model),
        "versions": {
            "tf_largebatch": tlb.__version__,
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
            "numpy": np.__version__,
        },
    }
    _write_json(summary, run_dir / "summary.json")
    return summary


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise tlb.ConfigurationError(
            f"{path} is no file of train.py: {error}; give another folder as --run_dir."
        ) from error


def _write_json(contents: Mapping[str, Any], path: Path) -> None:
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text(json.dumps(contents, indent=2) + "\n")
    os.replace(temporary, path)
