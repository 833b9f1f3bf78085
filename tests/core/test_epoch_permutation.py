from __future__ import annotations

import hashlib
import itertools
import math
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_largebatch.core.epoch_permutation import EpochPermutation, row_seeds
from tf_largebatch.core.errors import ConfigurationError

IMAGENET_ROWS = 1_281_167
MASK = 2**64 - 1


def philox4x64(counter: list[int], key: list[int]) -> list[int]:
    """Ten rounds of Philox4x64 (Salmon et al. 2011), in Python's integers."""
    for _ in range(10):
        high0, low0 = divmod(0xD2E7470EE14C6C93 * counter[0], 2**64)
        high1, low1 = divmod(0xCA5A826395121157 * counter[2], 2**64)
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [(key[0] + 0x9E3779B97F4A7C15) & MASK, (key[1] + 0xBB67AE8584CAA73B) & MASK]
    return counter


def draws(count: int, seed: int, epoch: int, stream: int) -> list[int]:
    blocks = [philox4x64([1 + i, 0, 0, stream], [seed, epoch]) for i in range(-(-count // 4))]
    return [number for block in blocks for number in block][:count]


def row_by_definition(place: int, num_rows: int, seed: int, epoch: int) -> int:
    """The Feistel network of the docstring, one place at a time, in Python's integers."""
    a = next(a for a in itertools.count(2, 2) if a * a >= num_rows)
    b = -(-num_rows // a)
    numbers = iter(draws(12 * (a + b), seed, epoch, stream=0))
    rounds = [
        ([next(numbers) for _ in range(b)], [next(numbers) for _ in range(a)]) for _ in range(12)
    ]
    while True:
        left, right = divmod(place, b)
        for left_shifts, right_shifts in rounds:
            left = (left + left_shifts[right]) % a
            right = (right + right_shifts[left]) % b
        place = left * b + right
        if place < num_rows:
            return place


def whole(num_rows: int, *, seed: int, epoch: int) -> np.ndarray:
    return EpochPermutation(num_rows, seed=seed, epoch=epoch).rows_at(np.arange(num_rows))


def test_the_oracle_gives_the_known_answer_of_random123() -> None:
    assert philox4x64([0, 0, 0, 0], [0, 0]) == [
        0x16554D9ECA36314C,
        0xDB20FE9D672D0FDC,
        0xD7E772CEE186176B,
        0x7E68B68AEC7BA23B,
    ]


@pytest.mark.parametrize("seed", [0, 12345, MASK])
@pytest.mark.parametrize("epoch", [0, 89, 2**63])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 11, 41])
def test_the_order_is_that_of_its_definition(num_rows: int, seed: int, epoch: int) -> None:
    assert whole(num_rows, seed=seed, epoch=epoch).tolist() == [
        row_by_definition(place, num_rows, seed, epoch) for place in range(num_rows)
    ]


@pytest.mark.parametrize(
    ("num_rows", "seed", "epoch", "order"),
    [
        (8, 0, 0, [1, 7, 5, 0, 2, 3, 6, 4]),
        (8, 0, 1, [6, 5, 7, 3, 1, 2, 0, 4]),
        (8, 1, 0, [3, 7, 1, 4, 6, 5, 0, 2]),
        (10, MASK, 2**63, [6, 9, 2, 3, 8, 0, 4, 7, 1, 5]),
        (7, 12345, 6, [2, 6, 3, 0, 5, 1, 4]),
    ],
)
def test_golden_orders(num_rows: int, seed: int, epoch: int, order: list[int]) -> None:
    assert whole(num_rows, seed=seed, epoch=epoch).tolist() == order


def test_golden_order_of_imagenet() -> None:
    order = whole(IMAGENET_ROWS, seed=17, epoch=89)
    assert order.dtype == np.int64
    assert order[:6].tolist() == [537332, 437527, 1230341, 1222220, 1111464, 742571]
    assert order[-2:].tolist() == [1081265, 855908]
    assert hashlib.sha256(order.astype("<i8").tobytes()).hexdigest() == (
        "3d4a67585f3367c21375c4c728c41a078656a7c68076381918bb49ed9170b5d4"
    )
    assert (np.bincount(order, minlength=IMAGENET_ROWS) == 1).all()


@settings(deadline=None, max_examples=200)
@given(
    num_rows=st.one_of(st.integers(1, 300), st.sampled_from([997, 10_007, 65_536])),
    seed=st.integers(0, MASK),
    epoch=st.integers(0, MASK),
)
def test_each_row_lies_at_one_place(num_rows: int, seed: int, epoch: int) -> None:
    order = whole(num_rows, seed=seed, epoch=epoch)
    assert np.array_equal(np.sort(order), np.arange(num_rows))


def test_any_part_can_be_asked_for_in_any_shape() -> None:
    permutation = EpochPermutation(1000, seed=4, epoch=2)
    order = permutation.rows_at(np.arange(1000))
    places = np.array([[999, 0, 5], [5, 17, 400]])
    assert np.array_equal(permutation.rows_at(places), order[places])
    assert permutation.rows_at(np.zeros([0], np.int64)).shape == (0,)


def test_epochs_and_seeds_have_different_orders() -> None:
    orders = {
        whole(97, seed=seed, epoch=epoch).tobytes() for seed in (0, 1, 2) for epoch in range(20)
    }
    assert len(orders) == 60  # `seed + epoch` would give 22


@pytest.mark.parametrize("num_rows", [2, 3, 4, 5, 6])
def test_all_orders_of_few_rows_come_equally_often(num_rows: int) -> None:
    permutations = math.factorial(num_rows)
    epochs = 100 + 5 * permutations
    counts = Counter(whole(num_rows, seed=7, epoch=epoch).tobytes() for epoch in range(epochs))
    expected = epochs / permutations
    chi_square = sum((count - expected) ** 2 / expected for count in counts.values())
    chi_square += (permutations - len(counts)) * expected
    # The mean of chi-square is its degrees of freedom d, its variance 2 d.
    assert abs(chi_square - (permutations - 1)) < 4 * math.sqrt(2 * (permutations - 1))


@pytest.mark.parametrize("num_rows", [7, 9, 25])
def test_half_of_the_orders_are_odd(num_rows: int) -> None:
    """Shifts of an odd number of places are even, and so is all that is made of them."""
    epochs = 400
    swaps = [_swaps_to_sort(whole(num_rows, seed=1, epoch=epoch)) for epoch in range(epochs)]
    assert abs(sum(each % 2 for each in swaps) - epochs / 2) < 5 * math.sqrt(epochs / 4)


def _swaps_to_sort(order: np.ndarray) -> int:
    """Its length less its number of cycles."""
    cycles, left = 0, set(range(len(order)))
    while left:
        place = left.pop()
        while (place := int(order[place])) in left:
            left.remove(place)
        cycles += 1
    return len(order) - cycles


@pytest.mark.parametrize("num_rows", [100, 1_000_003])
def test_an_order_looks_random(num_rows: int) -> None:
    """Against four expectations of a uniform permutation, each within 5 standard errors."""
    epochs = 200 if num_rows == 100 else 1
    orders = np.stack([whole(num_rows, seed=3, epoch=epoch) for epoch in range(epochs)])
    samples = math.sqrt(orders.size)
    # No correlation of place and row, nor of neighbours in the order.
    places = np.broadcast_to(np.arange(num_rows), orders.shape)
    assert abs(np.corrcoef(places.ravel(), orders.ravel())[0, 1]) < 5 / samples
    neighbours = np.corrcoef(orders[:, :-1].ravel(), orders[:, 1:].ravel())[0, 1]
    assert abs(neighbours + 1 / num_rows) < 5 / samples
    # One fixed point, and one pair of consecutive rows side by side, is expected in each order.
    for events in ((orders == places).sum(), (np.diff(orders) == 1).sum()):
        assert abs(events - epochs) < 5 * math.sqrt(epochs) + 1


def test_memory_grows_with_the_square_root_of_the_rows() -> None:
    tracemalloc.start()
    rows = EpochPermutation(100_000_000, seed=0, epoch=0).rows_at(np.arange(10**8 - 4096, 10**8))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(np.unique(rows)) == 4096
    assert peak_bytes < 8e6  # 8 bytes a row would be 800e6


@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (3, 1), (MASK, 2**63)])
def test_row_seeds(seed: int, epoch: int) -> None:
    rows = np.array([[5, 0], [7, 5]])
    seeds = row_seeds(rows, seed=seed, epoch=epoch)
    assert seeds.dtype == np.int64
    assert seeds.shape == (2, 2, 2)
    assert np.array_equal(seeds[..., 1], rows)
    (number,) = set(seeds[..., 0].ravel().tolist())
    assert number % 2**64 == draws(1, seed, epoch, stream=1)[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0, 0), "num_rows must be at least 1"),
        ((5, -1, 0), r"seed must be in \[0, 18446744073709551615\]"),
        ((5, 0, 2**64), "the nearest is 18446744073709551615"),
        ((5, True, 0), "seed must be an integer, but is True"),
        ((5, 0, 1.0), "epoch must be an integer"),
    ],
)
def test_refused(arguments: tuple, message: str) -> None:
    num_rows, seed, epoch = arguments
    with pytest.raises(ConfigurationError, match=message):
        EpochPermutation(num_rows, seed=seed, epoch=epoch)
