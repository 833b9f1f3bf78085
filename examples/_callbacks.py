"""What is recorded while training, and saved to be resumed from."""

from __future__ import annotations

from pathlib import Path

import keras

import tf_largebatch as tlb


def training_callbacks(
    recipe: tlb.Recipe, run_dir: Path, *, save_every_steps: int | None
) -> list[keras.callbacks.Callback]:
    """Returns the callbacks, the same on every worker; only the chief's write.

    Args:
        recipe: of the run.
        run_dir: for what they write.
        save_every_steps: from one state to the next, from which a run is resumed; None: an epoch.
    """
    writers = (
        keras.callbacks.CSVLogger(str(run_dir / "history.csv")),
        keras.callbacks.TensorBoard(str(run_dir / "tensorboard"), write_graph=False),
        keras.callbacks.ModelCheckpoint(
            str(run_dir / "best.keras"), monitor="val_accuracy", mode="max", save_best_only=True
        ),
    )
    return [
        tlb.callbacks.BatchNormSync(),  # before what saves the model
        tlb.callbacks.ThroughputLogger(recipe),
        *map(tlb.callbacks.ChiefOnly, writers),
        tlb.callbacks.TrainingState(run_dir / "state", save_every_steps=save_every_steps),
    ]
