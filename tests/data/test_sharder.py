from __future__ import annotations

import threading
import warnings
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.data._helpers import OneWorkerOf, numbered_rows, recording_model
from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.data import ArraySource, GlobalShuffleSharder, evaluation_dataset


def sharder_of(rows: int, batch: int, **kwargs: Any) -> GlobalShuffleSharder:
    return GlobalShuffleSharder(
        numbered_rows(rows), global_batch_size=batch, **{"seed": 5, **kwargs}
    )


def rows_of_pass(dataset: Any, steps: int | None = None) -> list[list[int]]:
    batches = dataset if steps is None else dataset.take(steps)
    return [x.numpy()[:, 0].astype(int).tolist() for x, _ in batches]


def expected(sharder: GlobalShuffleSharder, epoch: int, **shard: int) -> list[list[int]]:
    return [
        sharder.positions(epoch=epoch, step=step, **shard).tolist()
        for step in range(sharder.steps_per_epoch)
    ]


@pytest.mark.parametrize("remainder", ["drop", "wrap"])
def test_a_pass_is_an_epoch_and_epochs_follow_by_themselves(remainder: str) -> None:
    sharder = sharder_of(29, 6, remainder=remainder)
    dataset = sharder.train_dataset(initial_epoch=3)
    assert sharder.steps_per_epoch == {"drop": 4, "wrap": 5}[remainder]
    assert int(dataset.cardinality()) == sharder.steps_per_epoch
    assert dataset.element_spec == (tf.TensorSpec([6, 1]), tf.TensorSpec([6, 1]))
    for epoch in (3, 4, 5):
        assert rows_of_pass(dataset) == expected(sharder, epoch)
    assert expected(sharder, 3) != expected(sharder, 4)
    # A second data set has an epoch number of its own.
    assert rows_of_pass(sharder.train_dataset()) == expected(sharder, 0)


@pytest.mark.parametrize(("workers", "local_replicas"), [(1, 1), (2, 1), (4, 1), (2, 2), (1, 4)])
def test_workers_deliver_their_positions(workers: int, local_replicas: int) -> None:
    sharder = sharder_of(53, 8)
    replicas = workers * local_replicas
    whole = expected(sharder, 0)
    steps: list[list[int]] = [[] for _ in whole]
    for worker in range(workers):
        strategy = OneWorkerOf(index=worker, workers=workers, local_replicas=local_replicas)
        dataset = sharder.train_dataset(strategy)
        assert int(dataset.cardinality()) == sharder.steps_per_epoch * local_replicas
        assert dataset.element_spec[0].shape == [8 // replicas, 1]
        batches = rows_of_pass(dataset)
        for step in range(sharder.steps_per_epoch):
            for replica in range(local_replicas):
                rows = batches[step * local_replicas + replica]
                steps[step] += rows
                assert rows == (
                    sharder.positions(
                        epoch=0,
                        step=step,
                        shard_index=worker * local_replicas + replica,
                        shard_count=replicas,
                    ).tolist()
                )
        assert rows_of_pass(dataset) != batches
    assert steps == whole


def test_an_epoch_is_begun_by_its_second_step() -> None:
    sharder = sharder_of(20, 4)
    dataset = sharder.train_dataset()
    iter(dataset)  # never read
    for _ in range(2):
        assert rows_of_pass(dataset, 1) == expected(sharder, 0)[:1]
    assert rows_of_pass(dataset, 2) == expected(sharder, 0)[:2]
    assert rows_of_pass(dataset, 1) == expected(sharder, 1)[:1]
    assert rows_of_pass(dataset) == expected(sharder, 1)
    assert rows_of_pass(dataset) == expected(sharder, 2)


def test_two_live_iterators() -> None:
    sharder = sharder_of(20, 4)
    dataset = sharder.train_dataset()
    first, second = iter(dataset), iter(dataset)
    next(first)
    next(second)  # both began to read epoch 0
    rest = [x.numpy()[:, 0].astype(int).tolist() for x, _ in first]
    assert rest == expected(sharder, 0)[1:]
    assert rows_of_pass(dataset) == expected(sharder, 1)
    rest = [x.numpy()[:, 0].astype(int).tolist() for x, _ in second]
    assert rest == expected(sharder, 0)[1:]
    assert rows_of_pass(dataset) == expected(sharder, 2)  # the late one took nothing back


def test_iterators_on_several_threads_read_whole_epochs() -> None:
    sharder = sharder_of(60, 3)
    dataset = sharder.train_dataset()
    passes: list[list[list[int]]] = []
    threads = [
        threading.Thread(target=lambda: passes.append(rows_of_pass(dataset))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    epochs = [expected(sharder, epoch) for epoch in range(4)]
    assert len(passes) == 4
    assert all(one_pass in epochs for one_pass in passes)


def test_an_epoch_of_one_step_and_one_row() -> None:
    sharder = sharder_of(1, 1, seed=2**64 - 1)
    dataset = sharder.train_dataset()
    assert rows_of_pass(dataset) == [[0]]
    sharder = sharder_of(7, 7)
    dataset = sharder.train_dataset()
    for epoch in (0, 1):
        assert rows_of_pass(dataset) == expected(sharder, epoch)


def test_map_fn_sees_batches() -> None:
    sharder = sharder_of(12, 4, map_fn=lambda x, y: {"rows": x, "sum": x + y})
    batch = next(iter(sharder.train_dataset()))
    rows = sharder.positions(epoch=0, step=0)
    assert batch["sum"].numpy()[:, 0].tolist() == (rows + rows % 2).tolist()
    single = GlobalShuffleSharder(
        ArraySource(np.arange(4)), global_batch_size=4, seed=0, map_fn=lambda rows: rows * 10
    )
    assert sorted(next(iter(single.train_dataset())).numpy()) == [0, 10, 20, 30]


@pytest.mark.parametrize("built", [True, False])
@pytest.mark.parametrize("given_steps", [True, False])
def test_fit_reshuffles_and_validation_does_not_advance_it(built: bool, given_steps: bool) -> None:
    sharder = sharder_of(23, 4)
    model, batches = recording_model(built=built)
    dataset = sharder.train_dataset()
    steps = sharder.steps_per_epoch if given_steps else None
    validation = evaluation_dataset(numbered_rows(9), batch_size=4)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*ran out of data")
        for epochs in (2, 1):  # a second fit goes on
            model.fit(
                dataset,
                epochs=epochs,
                steps_per_epoch=steps,
                validation_data=validation,
                verbose=0,
            )
    assert batches == [rows for epoch in range(3) for rows in expected(sharder, epoch)]


@pytest.mark.parametrize(
    ("given_steps", "steps_of_epochs"),
    [
        # Fewer: the next epoch of Keras goes on within the pass; the last one is short.
        (2, [2, 2, 1, 2]),
        # More: Keras' epoch ends with the pass.
        (7, [5, 5]),
    ],
)
def test_other_steps_per_epoch_than_the_sharders(
    given_steps: int, steps_of_epochs: list[int]
) -> None:
    sharder = sharder_of(23, 4)
    model, batches = recording_model(built=True)
    with pytest.warns(UserWarning, match="ran out of data"):
        history = model.fit(
            sharder.train_dataset(),
            epochs=len(steps_of_epochs),
            steps_per_epoch=given_steps,
            verbose=0,
        )
    rows_read = iter(rows for epoch in range(2) for rows in expected(sharder, epoch))
    by_epoch = [[next(rows_read) for _ in range(steps)] for steps in steps_of_epochs]
    assert batches == [rows for epoch in by_epoch for rows in epoch]
    means = [
        np.mean([(row - row % 2) ** 2 for rows in epoch for row in rows]) for epoch in by_epoch
    ]
    assert history.history["loss"] == pytest.approx(means, rel=1e-6)


def test_strategies_that_count_steps_are_taken() -> None:
    sharder = sharder_of(23, 4)
    default = sharder.train_dataset(tf.distribute.get_strategy())
    assert rows_of_pass(default) == expected(sharder, 0)
    one_replica = tf.distribute.MirroredStrategy(["CPU:0"])
    assert int(sharder.train_dataset(one_replica).cardinality) == sharder.steps_per_epoch


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"global_batch_size": True}, "global_batch_size must be an integer"),
        ({"global_batch_size": 0}, "global_batch_size must be at least 1"),
        ({"global_batch_size": 11}, "use at most 10, or remainder='wrap'"),
        ({"seed": -1}, "seed must be in"),
        ({"seed": 1.5}, "seed must be an integer"),
        ({"remainder": "pad"}, "remainder must be 'drop' or 'wrap'"),
        ({"map_fn": 3}, "map_fn must be a function or None"),
        ({"source": np.zeros(10)}, r"is a ndarray; wrap arrays as .*ArraySource"),
    ],
)
def test_refused(change: dict[str, Any], message: str) -> None:
    settings = {"source": numbered_rows(10), "global_batch_size": 2, "seed": 0, **change}
    with pytest.raises(ConfigurationError, match=message):
        GlobalShuffleSharder(settings.pop("source"), **settings)


def test_refused_data_sets_and_positions() -> None:
    sharder = sharder_of(60, 10)
    with pytest.raises(ConfigurationError, match=r"among 4 replicas; .*: 8 and 12"):
        sharder.train_dataset(OneWorkerOf(index=0, workers=2, local_replicas=2))
    with pytest.raises(ConfigurationError, match="initial_epoch must be at least 0"):
        sharder.train_dataset(initial_epoch=-1)
    with pytest.raises(ConfigurationError, match=r"step must be in \[0, 5\], but is 6"):
        sharder.positions(epoch=0, step=6)
    with pytest.raises(ConfigurationError, match=r"among 3 shards; .*: 9 and 12"):
        sharder.positions(epoch=0, step=0, shard_count=3)
    changed = sharder_of(60, 10, map_fn=lambda x, y: (x[:3], y))
    with pytest.raises(ConfigurationError, match="map_fn must keep the batch dimension"):
        changed.train_dataset()
