"""Where packed tensors lie, and that memory is used again no sooner than nobody needs it."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest

from tf_largebatch.distribute import _packed_blocks
from tf_largebatch.distribute._packed_blocks import BlockPool, PackedLayout

FLOAT32 = np.dtype("float32")


def layout(*shapes: tuple[int, ...], dtype: str = "float32") -> PackedLayout:
    return PackedLayout(shapes, np.dtype(dtype))


@pytest.mark.parametrize(
    ("dtype", "row_length"), [("float32", 16), ("int32", 16), ("float64", 8), ("int64", 8)]
)
def test_a_row_takes_64_bytes(dtype: str, row_length: int) -> None:
    assert layout((5,), dtype=dtype).row_length == row_length


def test_each_tensor_starts_a_row() -> None:
    packed = layout((), (16,), (17,), (0,), (3, 0, 2), (4, 8), (1,))
    assert packed.rows == [1, 1, 2, 0, 0, 2, 1]
    assert packed.block_shape == (7, 16)
    assert packed.size == 7 * 16


def test_nothing_takes_no_rows() -> None:
    for empty in (layout(), layout((0,), (2, 0))):
        assert (empty.block_shape, empty.size) == ((0, 16), 0)
        assert BlockPool().take(empty).shape == (0, 16)


def test_tensors_are_found_where_their_rows_are() -> None:
    packed = layout((), (17,), (0,), (2, 3), dtype="int64")
    arrays = [
        np.int64(7).reshape(()),
        np.arange(17),
        np.zeros(0, np.int64),
        np.arange(100, 106).reshape(2, 3),
    ]
    block = BlockPool().take(packed)
    packed.pack(arrays, block)
    assert block[0, 0] == 7
    assert block[1:3].ravel().tolist() == [*range(16)]
    assert block[3, 0] == 16
    assert block[4].ravel()[:6].tolist() == [*range(100, 106)]


def test_arrays_that_are_not_contiguous_are_packed_in_their_order() -> None:
    packed = layout((3, 2))
    array = np.arange(6, dtype=np.float32).reshape(2, 3).T
    block = BlockPool().take(packed)
    packed.pack([array], block)
    assert block.ravel()[:6].tolist() == [0, 3, 1, 4, 2, 5]


def test_arrays_must_be_as_many_as_the_layout_says() -> None:
    packed = layout((2,), (2,))
    with pytest.raises(ValueError, match="zip"):
        packed.pack([np.zeros(2)], BlockPool().take(packed))


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64"])
@pytest.mark.parametrize("length", [1, 16, 1001, 300_000])
def test_rows_begin_at_multiples_of_64_bytes(length: int, dtype: str) -> None:
    pool = BlockPool()
    held = [pool.take(layout((length,), (3,), dtype=dtype)) for _ in range(5)]
    for block in held:
        assert block.ctypes.data % 64 == 0
        assert block[-1].ctypes.data % 64 == 0
        assert block.flags.c_contiguous and block.flags.writeable
        assert block.dtype == np.dtype(dtype)


def addresses(blocks: list[Any]) -> set[int]:
    return {block.ctypes.data for block in blocks}


def test_blocks_that_are_held_are_different_ones() -> None:
    pool = BlockPool()
    held = [pool.take(layout((100,))) for _ in range(8)]
    for number, block in enumerate(held):
        block[:] = number
    assert len(addresses(held)) == 8
    assert [int(block.min()) for block in held] == [int(block.max()) for block in held]


def test_memory_is_taken_again_once_nobody_holds_it() -> None:
    pool = BlockPool()
    block = pool.take(layout((100,)))
    address = block.ctypes.data
    other = pool.take(layout((100,)))
    del block
    again = pool.take(layout((100,)))
    assert again.ctypes.data == address != other.ctypes.data


@pytest.mark.parametrize("hold", [lambda block: block, np.from_dlpack, lambda block: [{1: block}]])
def test_memory_that_is_held_in_any_way_is_not_taken(hold: Any) -> None:
    """Also by who took it over without a copy, as TensorFlow does."""
    pool = BlockPool()
    block = pool.take(layout((100,)))
    address = block.ctypes.data
    holder = hold(block)
    del block
    gc.collect()
    assert pool.take(layout((100,))).ctypes.data != address
    del holder
    gc.collect()
    assert address in addresses([pool.take(layout((100,))) for _ in range(2)])


def test_other_sizes_and_dtypes_have_other_memory() -> None:
    pool = BlockPool()
    taken = set()
    for shape, dtype in (((100,), "float32"), ((200,), "float32"), ((100,), "int32")):
        block = pool.take(layout(shape, dtype=dtype))
        taken.add(block.ctypes.data)
        assert block.dtype == np.dtype(dtype) and block.size >= shape[0]
        del block
    kept = [pool.take(layout((50,), dtype="float64")) for _ in range(3)]
    assert not addresses(kept) & taken


def test_what_lies_behind_tensors_stays_finite() -> None:
    """Whatever lay there before: it is summed as well, in place, over and over."""
    pool = BlockPool()
    full = pool.take(layout((48,)))
    full[:] = 1e3
    del full
    packed = layout((17,), (3,))
    assert packed.block_shape == (3, 16)
    for _ in range(400):
        block = pool.take(packed)
        packed.pack([np.ones(17, np.float32), np.ones(3, np.float32)], block)
        with np.errstate(over="ignore"):
            block += block.copy()  # the sum of two ranks
        assert np.all(np.isfinite(block))
        del block


def test_many_threads_never_share_a_block() -> None:
    pool = BlockPool()
    packed = layout((64,), dtype="int64")
    errors: list[str] = []

    def use(number: int) -> None:
        for turn in range(300):
            block = pool.take(packed)
            block[:] = number * 1000 + turn
            if block.min() != block.max() or block[0, 0] != number * 1000 + turn:
                errors.append(f"thread {number} lost its block in turn {turn}")
            del block

    threads = [threading.Thread(target=use, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    # As many as threads held at a time, not as many as were taken.
    assert sum(map(len, pool._free.values())) <= len(threads)


def test_memory_of_a_layout_that_nobody_asks_for_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_packed_blocks, "_TAKES_KEPT", 4)
    pool = BlockPool()
    once, often = (PackedLayout(((length,),), np.dtype(np.float32)) for length in (100, 200))
    places = {pool.take(often).ctypes.data}
    gone = weakref.ref(pool.take(once).base)
    for _ in range(12):
        places.add(pool.take(often).ctypes.data)
    gc.collect()
    assert gone() is None
    assert len(places) == 1
