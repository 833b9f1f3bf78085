from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_largebatch.core.epoch_permutation import EpochPermutation
from tf_largebatch.core.epoch_rows import EpochRows
from tf_largebatch.core.errors import ConfigurationError

IMAGENET_ROWS = 1_281_167
MASK = 2**64 - 1


def order(num_rows: int, *, seed: int, epoch: int) -> np.ndarray:
    return EpochPermutation(num_rows, seed=seed, epoch=epoch).rows_at(np.arange(num_rows))


def all_steps(rows: EpochRows, epoch: int, **shard: int) -> np.ndarray:
    return rows.rows(epoch, 0, rows.steps_per_epoch, **shard)


@settings(deadline=None, max_examples=200)
@given(
    num_rows=st.sampled_from([1, 2, 3, 7, 8, 97, 840, 997]),
    per_shard=st.integers(1, 40),
    shard_count=st.sampled_from([1, 2, 3, 4, 7]),
    seed=st.integers(0, MASK),
    epoch=st.integers(0, MASK),
    remainder=st.sampled_from(["drop", "wrap"]),
)
def test_shards_see_each_row_exactly_once(
    num_rows: int, per_shard: int, shard_count: int, seed: int, epoch: int, remainder: str
) -> None:
    batch = per_shard * shard_count
    if remainder == "drop" and batch > num_rows:
        return  # refused
    rows = EpochRows(num_rows, global_batch_size=batch, seed=seed, remainder=remainder)  # type: ignore[arg-type]
    steps = all_steps(rows, epoch)
    parts = [
        all_steps(rows, epoch, shard_index=index, shard_count=shard_count)
        for index in range(shard_count)
    ]
    assert {part.shape for part in parts} == {(rows.steps_per_epoch, per_shard)}
    # The same rows a step, in the same order, whatever the number of shards.
    assert np.array_equal(np.concatenate(parts, axis=1), steps)
    # The order, cut off or begun again where it does not fill the steps.
    repeated = np.resize(order(num_rows, seed=seed, epoch=epoch), steps.size)
    assert np.array_equal(steps.ravel(), repeated)
    seen = np.bincount(steps.ravel(), minlength=num_rows)
    assert len(seen) == num_rows
    if remainder == "drop":
        assert seen.max() == 1
        assert num_rows - seen.sum() == num_rows % batch
    else:
        assert seen.min() >= 1
        assert seen.max() - seen.min() <= 1


@pytest.mark.parametrize("shard_count", [1, 2, 4])
def test_imagenet(shard_count: int) -> None:
    rows = EpochRows(IMAGENET_ROWS, global_batch_size=8192, seed=1, remainder="drop")
    seen = np.zeros(IMAGENET_ROWS, int)
    for index in range(shard_count):
        part = all_steps(rows, 3, shard_index=index, shard_count=shard_count)
        seen += np.bincount(part.ravel(), minlength=IMAGENET_ROWS)
    assert seen.max() == 1
    assert seen.sum() == 156 * 8192


def test_steps_by_themselves() -> None:
    rows = EpochRows(100, global_batch_size=6, seed=1, remainder="wrap")
    whole = all_steps(rows, 5, shard_index=1, shard_count=3)
    assert whole.shape == (17, 2)
    for first, end in ((0, 1), (3, 9), (16, 17)):
        part = rows.rows(5, first, end, shard_index=1, shard_count=3)
        assert np.array_equal(part, whole[first:end])
    # Epochs in any order.
    assert not np.array_equal(all_steps(rows, 4, shard_index=1, shard_count=3), whole)
    assert np.array_equal(all_steps(rows, 5, shard_index=1, shard_count=3), whole)


@pytest.mark.parametrize("remainder", ["drop", "wrap"])
def test_an_update_has_the_same_rows_however_it_is_accumulated(remainder: str) -> None:
    def updates_of(accumulated: int) -> np.ndarray:
        rows = EpochRows(
            100,
            global_batch_size=12 // accumulated,
            accumulation_steps=accumulated,
            seed=1,
            remainder=remainder,  # type: ignore[arg-type]
        )
        return all_steps(rows, 2).reshape(-1, 12)

    for accumulated in (2, 3, 12):
        assert np.array_equal(updates_of(accumulated), updates_of(1))


def test_the_rows_dropped_change_each_epoch() -> None:
    rows = EpochRows(10, global_batch_size=4, seed=3, remainder="drop")
    dropped = {tuple(set(range(10)) - set(all_steps(rows, e).ravel().tolist())) for e in range(10)}
    assert len(dropped) > 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_rows": 0}, "num_rows must be at least 1"),
        ({"global_batch_size": 0}, "global_batch_size must be at least 1"),
        ({"global_batch_size": 11}, "use at most 10, or remainder='wrap'"),
        ({"seed": -1}, "seed must be in"),
        ({"remainder": "pad"}, "remainder must be 'drop' or 'wrap'"),
    ],
)
def test_refused(change: dict, message: str) -> None:
    arguments = {"num_rows": 10, "global_batch_size": 2, "seed": 0, "remainder": "drop", **change}
    with pytest.raises(ConfigurationError, match=message):
        EpochRows(arguments.pop("num_rows"), **arguments)
