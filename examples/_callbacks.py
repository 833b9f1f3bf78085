"""What is recorded at the end of each epoch."""

from __future__ import annotations

from pathlib import Path

import keras

import tf_largebatch as tlb


def epoch_callbacks(
    recipe: tlb.Recipe, run_dir: Path, *, is_chief: bool
) -> list[keras.callbacks.Callback]:
    """Returns the callbacks of one worker; only the chief's write.

    BatchNormSync takes part in a collective, so all have it; none of those that write does.
    """
    callbacks: list[keras.callbacks.Callback] = [
        tlb.callbacks.BatchNormSync(),
        tlb.callbacks.ThroughputLogger(recipe),
    ]
    if is_chief:
        callbacks += [
            keras.callbacks.CSVLogger(str(run_dir / "history.csv")),
            keras.callbacks.TensorBoard(str(run_dir / "tensorboard"), write_graph=False),
        ]
    return callbacks
