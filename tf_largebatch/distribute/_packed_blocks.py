"""Tensors packed one behind the other into one block of memory, and blocks to be used again."""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

# TensorFlow takes over foreign memory, and hands out parts of a tensor, without a copy where they
# start at multiples of this.
_ALIGNMENT_BYTES = 64
# A layout that was not asked for among so many, the buckets of many steps, has no memory kept.
_TAKES_KEPT = 5_000


@dataclass(frozen=True)
class PackedLayout:
    """Where each of some tensors lies in a block `[rows, row_length]`: each starts a row.

    Args:
        shapes: of the tensors.
        dtype: of all of them, in the block.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtype: np.dtype[Any]

    @property
    def row_length(self) -> int:
        """Elements of a row, which takes 64 bytes."""
        return _ALIGNMENT_BYTES // self.dtype.itemsize

    @cached_property
    def rows(self) -> list[int]:
        """Of each tensor; the last one may be filled in part."""
        return [-(-math.prod(shape) // self.row_length) for shape in self.shapes]

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """Of each tensor the elements `[begin, end)` of the block that are its own."""
        begins = [self.row_length * first for first in itertools.accumulate(self.rows, initial=0)]
        return [
            (begin, begin + math.prod(shape))
            for begin, shape in zip(begins[:-1], self.shapes, strict=True)
        ]

    @cached_property
    def block_shape(self) -> tuple[int, int]:
        return sum(self.rows), self.row_length

    @cached_property
    def size(self) -> int:
        """Elements of a block."""
        return math.prod(self.block_shape)

    def pack(self, arrays: Sequence[npt.NDArray[Any]], block: npt.NDArray[Any]) -> None:
        """Copies tensors into a block; the one copy that there is on the way to the wire."""
        flat = block.reshape(-1)
        for array, (begin, end) in zip(arrays, self.spans, strict=True):
            flat[begin:end] = array.reshape(-1)


class BlockPool:
    """Blocks of memory, taken again as soon as nothing refers to what was handed out.

    A fresh block of many megabytes costs as much as a copy of it, by its page faults. When
    TensorFlow is done with a step's sums is known to their reference counts alone: a user may keep
    them for longer than a step.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By layout, so that what lies behind a tensor in its last row stays 0.
        self._free: dict[PackedLayout, list[npt.NDArray[Any]]] = {}
        self._used: set[PackedLayout] = set()  # since those not used were last given up
        self._takes = 0

    def take(self, layout: PackedLayout) -> npt.NDArray[Any]:
        """A block for this layout.

        It is lent for as long as the returned array itself lives: views of it do not count, as
        NumPy has them refer to what lies beneath.
        """
        with self._lock:
            self._give_up_unused(layout)
            free = self._free.setdefault(layout, [])
            memory = free.pop() if free else _aligned_zeros(layout)
        block = memory[:]
        # Called wherever the last reference goes, which may be within `take`: takes no lock.
        weakref.finalize(block, free.append, memory).atexit = False
        return block

    def _give_up_unused(self, layout: PackedLayout) -> None:
        """Forgets layouts, as of graphs that are traced no more, that nobody asks for."""
        self._used.add(layout)
        self._takes += 1
        if self._takes % _TAKES_KEPT == 0:
            self._free = {each: free for each, free in self._free.items() if each in self._used}
            self._used = {layout}


def _aligned_zeros(layout: PackedLayout) -> npt.NDArray[Any]:
    size_bytes = math.prod(layout.block_shape) * layout.dtype.itemsize
    memory = np.zeros(size_bytes + _ALIGNMENT_BYTES, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT_BYTES
    return memory[begin : begin + size_bytes].view(layout.dtype).reshape(layout.block_shape)
