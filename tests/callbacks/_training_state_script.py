"""Trainings on two CPU replicas, broken off and resumed; prints what differed as a line of JSON.

A process of its own: logical devices must be configured before anything else uses TensorFlow.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import tensorflow as tf

import tf_largebatch as tlb
from tests.callbacks._training_runs import (
    BATCH,
    ROWS,
    Run,
    assert_same,
    resumed,
    sharder_of,
    train,
)

RECIPE = tlb.Recipe(
    num_examples=ROWS,
    per_replica_batch_size=BATCH // 2,
    num_replicas=2,
    base_learning_rate=0.05,
    base_batch_size=BATCH,
    epochs=3,
    warmup_epochs=1,
)


def synchronised(_: Path) -> list[Any]:
    return [tlb.callbacks.BatchNormSync(every_steps=3), tlb.callbacks.GradientNoiseScale(RECIPE)]


def recipe_sgd() -> Any:
    return tlb.optimizers.MomentumSGD(RECIPE.learning_rate_schedule())


def compared(run: Run, *after: int) -> str:
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        expected = train(run, Path(first))
        assert expected is not None
        try:
            assert_same(resumed(run, Path(second), *after), expected)
        except AssertionError as error:
            return str(error)
    return "the same"


def main() -> None:
    found = {}
    graph = Run(eagerly=False)
    ours = replace(graph, strategy=tlb.LargeBatchStrategy())
    found["LargeBatchStrategy noise scale"] = compared(
        replace(ours, epochs=3, callbacks=synchronised, optimizer=recipe_sgd), 5
    )
    found["LargeBatchStrategy with validation"] = compared(
        replace(ours, validation=True, given_steps=True, steps_per_execution=2), 2
    )
    found["LargeBatchStrategy one step"] = compared(replace(ours, batch=ROWS), 1)
    stock = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    of_stock = replace(graph, strategy=stock, data=lambda: sharder_of(graph).train_dataset())
    found["MirroredStrategy"] = compared(of_stock, 3)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
