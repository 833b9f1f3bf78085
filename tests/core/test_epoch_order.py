from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_largebatch.core.epoch_order import (
    checked_integer,
    epoch_order,
    epoch_steps,
    shard_part,
    steps_in_epoch,
)
from tf_largebatch.core.errors import ConfigurationError

IMAGENET_ROWS = 1_281_167
MASK = 2**64 - 1
SIZES = (1, 2, 3, 7, 8, 97, 840, 997)


def philox4x64(counter: list[int], key: list[int]) -> list[int]:
    """Ten rounds of Philox4x64 (Salmon et al. 2011), in Python's integers."""
    for _ in range(10):
        high0, low0 = divmod(0xD2E7470EE14C6C93 * counter[0], 2**64)
        high1, low1 = divmod(0xCA5A826395121157 * counter[2], 2**64)
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [(key[0] + 0x9E3779B97F4A7C15) & MASK, (key[1] + 0xBB67AE8584CAA73B) & MASK]
    return counter


def order_by_definition(num_rows: int, seed: int, epoch: int) -> list[int]:
    blocks = [philox4x64([1 + i, 0, 0, 0], [seed, epoch]) for i in range(-(-num_rows // 4))]
    raw = [number for block in blocks for number in block][:num_rows]
    return sorted(range(num_rows), key=raw.__getitem__)


def test_the_oracle_gives_the_known_answer_of_random123() -> None:
    assert philox4x64([0, 0, 0, 0], [0, 0]) == [
        0x16554D9ECA36314C,
        0xDB20FE9D672D0FDC,
        0xD7E772CEE186176B,
        0x7E68B68AEC7BA23B,
    ]


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**63, MASK])
@pytest.mark.parametrize("epoch", [0, 1, 89, 2**63, MASK])
def test_order_is_the_ranking_of_philox_numbers(seed: int, epoch: int) -> None:
    assert epoch_order(41, seed=seed, epoch=epoch).tolist() == order_by_definition(41, seed, epoch)


@pytest.mark.parametrize(
    ("num_rows", "seed", "epoch", "order"),
    [
        (8, 0, 0, [0, 2, 1, 5, 4, 3, 6, 7]),
        (8, 0, 1, [5, 3, 7, 2, 4, 1, 0, 6]),
        (8, 1, 0, [3, 5, 2, 7, 0, 6, 1, 4]),
        (10, MASK, 2**63, [9, 5, 8, 0, 3, 1, 2, 6, 7, 4]),
        (7, 12345, 6, [4, 5, 2, 1, 0, 6, 3]),
    ],
)
def test_golden_orders(num_rows: int, seed: int, epoch: int, order: list[int]) -> None:
    assert epoch_order(num_rows, seed=seed, epoch=epoch).tolist() == order


def test_golden_order_of_imagenet() -> None:
    order = epoch_order(IMAGENET_ROWS, seed=17, epoch=89)
    assert order.dtype == np.int64
    assert order[:6].tolist() == [809044, 947205, 783061, 582237, 995960, 14605]
    assert order[-2:].tolist() == [1149105, 186495]
    assert hashlib.sha256(order.astype("<i8").tobytes()).hexdigest() == (
        "7fdd2364829dc1d2efd071fce830a4e72cc78949726613fbd61835ee883bf436"
    )
    assert np.array_equal(np.bincount(order, minlength=IMAGENET_ROWS), np.ones(IMAGENET_ROWS))


def test_epochs_and_seeds_have_different_orders() -> None:
    orders = {
        epoch_order(97, seed=seed, epoch=epoch).tobytes()
        for seed in (0, 1, 2)
        for epoch in range(20)
    }
    assert len(orders) == 60  # `seed + epoch` would give 22


@settings(deadline=None, max_examples=200)
@given(
    num_rows=st.sampled_from(SIZES),
    per_shard=st.integers(1, 40),
    shard_count=st.sampled_from([1, 2, 3, 4, 7]),
    seed=st.integers(0, MASK),
    epoch=st.integers(0, MASK),
)
def test_shards_see_each_row_exactly_once(
    num_rows: int, per_shard: int, shard_count: int, seed: int, epoch: int
) -> None:
    batch = per_shard * shard_count
    order = epoch_order(num_rows, seed=seed, epoch=epoch)
    for remainder, times in (("drop", 0), ("wrap", 1)):
        if remainder == "drop" and batch > num_rows:
            continue
        steps = epoch_steps(order, global_batch_size=batch, remainder=remainder)  # type: ignore[arg-type]
        parts = [
            steps[:, shard_part(batch, shard_index=i, shard_count=shard_count)]
            for i in range(shard_count)
        ]
        assert {part.shape for part in parts} == {(len(steps), per_shard)}
        # The same rows a step, in the same order, whatever the number of shards.
        assert np.array_equal(np.concatenate(parts, axis=1), steps)
        seen = np.bincount(steps.ravel(), minlength=num_rows)
        assert len(seen) == num_rows
        assert seen.sum() == len(steps) * batch
        assert seen.min() >= times  # all with "wrap"
        if remainder == "drop":
            assert seen.max() == 1
            assert num_rows - seen.sum() == num_rows % batch
        else:
            extra = np.flatnonzero(seen > seen.min())
            assert set(extra) == set(order[: len(extra)])  # the first of the order repeat
            assert seen.max() - seen.min() <= 1


def test_wrap_repeats_the_order_as_often_as_needed() -> None:
    order = np.array([2, 0, 1])
    assert epoch_steps(order, global_batch_size=8, remainder="wrap").tolist() == [
        [2, 0, 1, 2, 0, 1, 2, 0]
    ]
    assert epoch_steps(order, global_batch_size=2, remainder="wrap").tolist() == [[2, 0], [1, 2]]
    assert epoch_steps(order, global_batch_size=2).tolist() == [[2, 0]]


@pytest.mark.parametrize(
    ("num_rows", "batch", "drop", "wrap"),
    [(IMAGENET_ROWS, 8192, 156, 157), (1, 1, 1, 1), (997, 100, 9, 10), (1000, 100, 10, 10)],
)
def test_steps_in_epoch(num_rows: int, batch: int, drop: int, wrap: int) -> None:
    assert steps_in_epoch(num_rows, global_batch_size=batch) == drop
    assert steps_in_epoch(num_rows, global_batch_size=batch, remainder="wrap") == wrap


def test_the_rows_dropped_change_each_epoch() -> None:
    dropped = {
        tuple(sorted(set(range(10)) - set(epoch_order(10, seed=3, epoch=e)[:8].tolist())))
        for e in range(10)
    }
    assert len(dropped) > 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: epoch_order(0, seed=0, epoch=0), "num_rows must be at least 1"),
        (lambda: epoch_order(5, seed=-1, epoch=0), r"seed must be in \[0, 18446744073709551615\]"),
        (lambda: epoch_order(5, seed=0, epoch=2**64), "the nearest is 18446744073709551615"),
        (lambda: epoch_order(5, seed=True, epoch=0), "seed must be an integer, but is True"),
        (lambda: epoch_order(5, seed=0, epoch=1.0), "epoch must be an integer"),  # type: ignore[arg-type]
        (lambda: steps_in_epoch(10, global_batch_size=11), "use at most 10, or remainder='wrap'"),
        (
            lambda: steps_in_epoch(10, global_batch_size=2, remainder="keep"),  # type: ignore[arg-type]
            "remainder must be 'drop' or 'wrap', but is 'keep'",
        ),
        (
            lambda: shard_part(10, shard_index=0, shard_count=4),
            "global_batch_size=10 cannot be divided equally among 4 shards; .*: 8 and 12",
        ),
        (lambda: shard_part(3, shard_index=0, shard_count=4), "nearest that can: 4"),
        (lambda: shard_part(8, shard_index=4, shard_count=4), r"shard_index must be in \[0, 3\]"),
    ],
)
def test_refused(call, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        call()


def test_numpy_integers_are_integers() -> None:
    assert checked_integer(np.int32(7), "x", minimum=0) == 7
    assert type(checked_integer(np.uint8(7), "x", minimum=0)) is int
