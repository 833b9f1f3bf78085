"""One worker of a training that is to survive whatever happens; see `Training`."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from _chaos_settings import Progress, Training, arrays_path, progress_path

import tf_largebatch as tlb

_ROWS_PER_REPLICA = 4
_CLASSES = 5
_SHAPE = (8, 8, 3)
_BALLAST = 2**20  # numbers
_VALIDATION_ROWS = 50  # no multiple of any batch


class _ProgressFile(keras.callbacks.Callback):
    """Says in a file where training stands, for whoever chooses the moment of a signal."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = path.open("wb", buffering=0)
        self._progress: Progress | None = None

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._progress is None:
            batches = int(self.model.optimizer.variables[0].numpy())  # its counter
            self._write(Progress(batches, batches, self._epoch))

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        before = self._progress
        batches = before.batches + self.model.steps_per_execution
        self._write(Progress(before.first, batches, self._epoch))

    def _write(self, progress: Progress) -> None:
        self._progress = progress
        progress.write(self._file)


class _Ballast(keras.layers.Layer):
    """Weights without use, so that writing a state takes long enough to be hit."""

    def build(self, input_shape: Any) -> None:
        self.add_weight(shape=(_BALLAST,), initializer="random_uniform", trainable=False)

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return inputs


def train(training: Training, folder: Path, rank: int) -> dict[str, Any]:
    """Trains to the end, from the state that there is, and returns what came out, for JSON.

    All variables go into the file `arrays_path(folder, rank)`.
    """
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    strategy = tlb.LargeBatchStrategy(
        all_reduce=training.all_reduce,
        start_timeout_seconds=training.start_timeout_seconds,
        timeout_seconds=training.timeout_seconds,
    )
    tf.config.experimental.enable_op_determinism()
    keras.utils.set_random_seed(training.seed)
    recipe = _recipe(training, strategy.num_replicas_in_sync)
    with strategy.scope():
        model = _compiled_model(training, recipe)
    history = model.fit(
        _sharder(training, recipe).train_dataset(strategy),
        epochs=training.epochs,
        shuffle=False,  # the sharder's part
        validation_data=tlb.data.evaluation_dataset(
            _source(_VALIDATION_ROWS, seed=training.seed + 1), batch_size=12, strategy=strategy
        ),
        callbacks=[_ProgressFile(progress_path(folder, rank)), *_callbacks(training)],
        verbose=0,
    )
    result = {
        "epochs": history.epoch,
        "history": history.history,
        "weights_sha256": _digest(model.weights),  # without dropout's seeds, which differ
        "scalars": _scalars(Path(training.run_dir)) if strategy.topology.is_chief else None,
    }
    _store([*model.variables, *model.optimizer.variables], arrays_path(folder, rank))
    strategy.barrier()  # the others leave together with the chief
    return result


def _recipe(training: Training, replicas: int) -> tlb.Recipe:
    batch = _ROWS_PER_REPLICA * replicas * training.accumulation_steps
    return tlb.Recipe(
        num_examples=batch * training.updates_per_epoch,
        per_replica_batch_size=_ROWS_PER_REPLICA,
        num_replicas=replicas,
        accumulation_steps=training.accumulation_steps,
        base_learning_rate=2.0 if training.optimizer == "lars" else 0.05,
        base_batch_size=batch,
        epochs=training.epochs,
        warmup_epochs=min(1.5, training.epochs / 4),
    )


def _source(rows: int, *, seed: int) -> tlb.data.ArraySource:
    """Noise, brighter in one place for each class."""
    random = np.random.default_rng(seed)
    labels = random.integers(_CLASSES, size=rows).astype(np.int32)
    images = random.normal(size=(rows, *_SHAPE)).astype(np.float32)
    images[np.arange(rows), labels, labels] += 1.5
    return tlb.data.ArraySource((images, labels))


def _augmented(seed: tf.Tensor, image: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    image = tf.image.stateless_random_flip_left_right(image, seed)
    return image + 0.1 * tf.random.stateless_normal(_SHAPE, seed), label


def _sharder(training: Training, recipe: tlb.Recipe) -> tlb.data.GlobalShuffleSharder:
    return tlb.data.GlobalShuffleSharder(
        _source(recipe.num_examples, seed=training.seed),
        global_batch_size=recipe.global_batch_size // training.accumulation_steps,
        seed=training.seed,
        row_fn=_augmented,
        accumulation_steps=training.accumulation_steps,
    )


def _compiled_model(training: Training, recipe: tlb.Recipe) -> keras.Model:
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input(_SHAPE),
            _Ballast(),
            layers.Conv2D(8, 3, use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.Dropout(0.2),
            layers.Flatten(),
            layers.Dense(16, activation="relu"),
            layers.Dropout(0.2),
            layers.Dense(_CLASSES),
        ]
    )
    accumulation = training.accumulation_steps if training.accumulation_steps > 1 else None
    if training.optimizer == "lars":
        rates = recipe.learning_rate_schedule()
        optimizer = tlb.optimizers.LARS(rates, gradient_accumulation_steps=accumulation)
    else:
        rate = recipe.peak_learning_rate
        optimizer = tlb.optimizers.MomentumSGD(rate, gradient_accumulation_steps=accumulation)
    model.compile(
        optimizer,
        tlb.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        steps_per_execution=training.steps_per_execution,
    )
    return model


def _callbacks(training: Training) -> list[keras.callbacks.Callback]:
    run_dir = Path(training.run_dir)
    made: list[keras.callbacks.Callback] = [
        tlb.callbacks.BatchNormSync(),
        keras.callbacks.EarlyStopping(
            "val_loss", patience=training.patience, restore_best_weights=True
        ),
    ]
    if training.optimizer == "sgd":
        made.append(keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1))
    made += [
        tlb.callbacks.ChiefOnly(keras.callbacks.CSVLogger(str(training.csv_path), append=True)),
        tlb.callbacks.ChiefOnly(keras.callbacks.TensorBoard(str(run_dir / "tensorboard"))),
    ]
    if training.with_state:
        steps = training.save_every_steps or training.batches_per_epoch * training.epochs
        made.append(
            tlb.callbacks.TrainingState(str(training.state_dir), save_every_steps=steps)
        )  # last: it sees what all others have done
    return made


def _digest(variables: list[Any]) -> str:
    digest = hashlib.sha256()
    for variable in variables:
        digest.update(np.ascontiguousarray(variable.numpy()).tobytes())
    return digest.hexdigest()


def _store(variables: list[Any], path: Path) -> None:
    # Numbered, as paths of variables need not be unique.
    named = {
        f"{place:03d} {variable.path}": variable.numpy() for place, variable in enumerate(variables)
    }
    np.savez(path, **{name.replace("/", "|"): value for name, value in named.items()})


def _scalars(run_dir: Path) -> dict[str, list[list[float]]]:
    """`{"train epoch_loss": [[step, value], ...]}`, as they stand in TensorBoard's files."""
    found = defaultdict(list)
    for path in sorted((run_dir / "tensorboard").glob("*/events*")):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "scalars":
                    number = tf.make_ndarray(value.tensor).item()
                    found[f"{path.parent.name} {value.tag}"].append([event.step, number])
    return dict(found)
