from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.data._helpers import OneWorkerOf, numbered_rows
from tf_largebatch.core.epoch_permutation import row_seeds
from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.data import ArraySource, GlobalShuffleSharder, evaluation_dataset

ROWS, BATCH, SEED = 45, 12, 9


def with_draw(seed: tf.Tensor, x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, ...]:
    """A row with its seed and a number drawn from it; single rows have no batch dimension."""
    assert seed.shape == [2]
    assert x.shape == [1]
    return x[0], y, seed, tf.random.stateless_uniform([], seed)


def sharder_of(**changes: Any) -> GlobalShuffleSharder:
    settings = {"global_batch_size": BATCH, "seed": SEED, "row_fn": with_draw, **changes}
    return GlobalShuffleSharder(numbered_rows(ROWS), **settings)


def draws_by_row(dataset: Any) -> dict[int, float]:
    return {
        int(x): float(draw)
        for xs, _, _, draws in dataset
        for x, draw in zip(xs.numpy(), draws.numpy(), strict=True)
    }


@pytest.mark.parametrize("remainder", ["drop", "wrap"])
def test_rows_arrive_in_order_with_their_seeds(remainder: str) -> None:
    sharder = sharder_of(remainder=remainder)
    dataset = sharder.train_dataset(initial_epoch=4)
    assert dataset.element_spec[2] == tf.TensorSpec([BATCH, 2], tf.int64)
    assert int(dataset.cardinality()) == sharder.steps_per_epoch
    for epoch in (4, 5):
        batches = list(dataset)
        assert len(batches) == sharder.steps_per_epoch
        for step, (x, y, seeds, _) in enumerate(batches):
            rows = sharder.positions(epoch=epoch, step=step)
            assert x.numpy().tolist() == rows.tolist()
            assert y.numpy()[:, 0].tolist() == (rows % 2).tolist()
            assert np.array_equal(seeds, row_seeds(rows, seed=SEED, epoch=epoch))


def test_what_is_drawn_depends_on_seed_epoch_and_row_alone() -> None:
    first = draws_by_row(sharder_of().train_dataset())
    other_batches = draws_by_row(sharder_of(global_batch_size=5).train_dataset())
    shared = first.keys() & other_batches.keys()
    assert len(shared) > 30
    assert all(first[row] == other_batches[row] for row in shared)
    workers: dict[int, float] = {}
    for worker in range(3):
        strategy = OneWorkerOf(index=worker, workers=3, local_replicas=2)
        workers |= draws_by_row(sharder_of().train_dataset(strategy))
    assert workers == first
    for other in (sharder_of().train_dataset(initial_epoch=1), sharder_of(seed=8).train_dataset()):
        draws = draws_by_row(other)
        assert all(first[row] != draws[row] for row in first.keys() & draws.keys())


def test_map_fn_is_given_what_row_fn_returned() -> None:
    sharder = sharder_of(map_fn=lambda x, y, seeds, draw: {"x": x, "rows": seeds[:, 1]})
    batch = next(iter(sharder.train_dataset()))
    assert batch["x"].shape == [BATCH]
    assert batch["x"].numpy().astype(int).tolist() == batch["rows"].numpy().tolist()


def test_a_row_that_is_no_tuple() -> None:
    source = ArraySource({"a": np.arange(6), "b": np.arange(6) * 10})
    sharder = GlobalShuffleSharder(
        source, global_batch_size=6, seed=0, row_fn=lambda seed, row: row["a"] + row["b"]
    )
    assert sorted(next(iter(sharder.train_dataset())).numpy()) == [0, 11, 22, 33, 44, 55]


@pytest.mark.parametrize(("rows", "batch"), [(37, 8), (8, 8), (1, 4), (3, 100)])
def test_evaluation_maps_each_row_once_in_order(rows: int, batch: int) -> None:
    arguments = {"batch_size": batch, "row_fn": with_draw}
    dataset = evaluation_dataset(numbered_rows(rows), **arguments)
    assert int(dataset.cardinality()) == -(-rows // batch)
    for _ in range(2):  # the seeds do not change from pass to pass
        batches = list(dataset)
        assert {len(x) for x, *_ in batches[:-1]} <= {batch}
        assert np.concatenate([x for x, *_ in batches]).tolist() == list(range(rows))
        seeds = np.concatenate([seeds for _, _, seeds, _ in batches])
        assert np.array_equal(seeds, row_seeds(np.arange(rows), seed=0, epoch=0))


@pytest.mark.parametrize("rows", [37, 3, 1])
def test_evaluation_on_workers_equals_that_of_whole_batches(rows: int) -> None:
    """Slots of unequal sizes, also of none."""
    for worker in range(4):
        strategy = OneWorkerOf(index=worker, workers=4, local_replicas=1)
        source = numbered_rows(rows)
        plain = evaluation_dataset(source, batch_size=8, strategy=strategy)
        mapped = evaluation_dataset(source, batch_size=8, strategy=strategy, row_fn=with_draw)
        assert int(mapped.cardinality()) == int(plain.cardinality())
        plain_rows = [x[:, 0].numpy().tolist() for x, _ in plain]
        assert [x.numpy().tolist() for x, *_ in mapped] == plain_rows


def test_an_error_in_a_row_reaches_the_user() -> None:
    def fail_at_seven(seed: tf.Tensor, x: tf.Tensor, y: tf.Tensor) -> Any:
        with tf.control_dependencies([tf.debugging.Assert(seed[1] != 7, ["row", seed[1]])]):
            return tf.identity(x)

    sharder = sharder_of(row_fn=fail_at_seven, remainder="wrap")
    with pytest.raises(tf.errors.InvalidArgumentError, match="row"):
        list(sharder.train_dataset())


def test_refused() -> None:
    with pytest.raises(ConfigurationError, match="row_fn must be a function or None, but is 3"):
        sharder_of(row_fn=3)
    with pytest.raises(ConfigurationError, match="row_fn must be a function or None"):
        evaluation_dataset(numbered_rows(3), batch_size=2, row_fn="crop")
