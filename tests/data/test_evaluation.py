from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data._helpers import OneWorkerOf, numbered_rows
from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.data import evaluation_dataset


def batches_of(dataset: tf.data.Dataset) -> list[list[int]]:
    return [x.numpy()[:, 0].astype(int).tolist() for x, _ in dataset]


@pytest.mark.parametrize(("rows", "batch"), [(37, 4), (8, 4), (1, 1), (3, 5)])
def test_without_a_strategy_batches_are_full_but_the_last(rows: int, batch: int) -> None:
    dataset = evaluation_dataset(numbered_rows(rows), batch_size=batch)
    found = batches_of(dataset)
    assert int(dataset.cardinality()) == len(found) == -(-rows // batch)
    assert {len(one) for one in found[:-1]} <= {batch}
    assert [row for one in found for row in one] == list(range(rows))
    assert batches_of(dataset) == found


def joined_as_keras_does(steps: list[list[list[int]]], *, workers: int, local: int) -> list[int]:
    """`_multi_worker_concat` of Keras' TensorFlow trainer; a step is `[worker * local, rows]`."""
    joined: list[int] = []
    for replicas in steps:
        for replica in range(local):
            for rows in replicas[replica::local]:
                joined += rows
    assert all(len(replicas) == workers * local for replicas in steps)
    return joined


@settings(deadline=None, max_examples=8)
@given(
    rows=st.integers(1, 40),
    batch=st.integers(1, 16),
    workers=st.integers(1, 3),
    local=st.integers(1, 2),
)
def test_predict_joins_the_rows_in_order(rows: int, batch: int, workers: int, local: int) -> None:
    by_worker = [
        batches_of(
            evaluation_dataset(
                numbered_rows(rows),
                batch_size=batch,
                strategy=OneWorkerOf(index=worker, workers=workers, local_replicas=local),
            )
        )
        for worker in range(workers)
    ]
    assert len({len(batches) for batches in by_worker}) == 1
    steps = [
        [rows for batches in by_worker for rows in batches[first : first + local]]
        for first in range(0, len(by_worker[0]), local)
    ]
    assert joined_as_keras_does(steps, workers=workers, local=local) == list(range(rows))


def test_metrics_are_exact() -> None:
    model = keras.Sequential([keras.Input([1]), keras.layers.Lambda(lambda x: x % 3)])
    model.compile(loss="mse", metrics=["binary_accuracy"], jit_compile=False)
    dataset = evaluation_dataset(
        numbered_rows(37), batch_size=8, map_fn=lambda x, y: (x, tf.cast(y, tf.float32))
    )
    rows = np.arange(37)
    loss, accuracy = model.evaluate(dataset, verbose=0)
    assert loss == pytest.approx(np.mean((rows % 3 - rows % 2) ** 2), rel=1e-6)
    assert accuracy == pytest.approx(np.mean((rows % 3 > 0.5) == rows % 2), rel=1e-6)


def test_refused() -> None:
    with pytest.raises(ConfigurationError, match="batch_size must be an integer"):
        evaluation_dataset(numbered_rows(3), batch_size=2.0)
    with pytest.raises(ConfigurationError, match="source must be a RandomAccessSource"):
        evaluation_dataset([1, 2, 3], batch_size=2)
    with pytest.raises(ConfigurationError, match="map_fn must be a function"):
        evaluation_dataset(numbered_rows(3), batch_size=2, map_fn="x")
