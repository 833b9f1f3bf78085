"""What a bucket of several replicas is, and how MPI brings it to all workers: sums, or rows."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tf_largebatch.core.collective_plan import AllReducePlan
from tf_largebatch.distribute._mpi_transfers import (
    Transfer,
    all_reduce_by_plan,
    library_all_gather,
    library_all_reduce,
)
from tf_largebatch.distribute._packed_blocks import BlockPool, PackedLayout

Array = npt.NDArray[Any]


class Cargo(Protocol):
    """One kind of bucket."""

    @property
    def layout(self) -> PackedLayout:
        """Of the block that all workers end with."""
        ...

    def describe(self) -> str:
        """What is exchanged; equal on workers that may exchange it."""
        ...

    def load(self, arrays: Sequence[Array], block: Array, *, replica: int) -> None:
        """Copies what one of this worker's replicas has into its block."""
        ...

    def merge(self, blocks: Sequence[Array]) -> None:
        """Brings the blocks of this worker's replicas, in their order, together in the first."""
        ...

    def transfer(self, mpi: Any, comm: Any, block: Array, *, tag: int, pool: BlockPool) -> Transfer:
        """Brings the block of each worker to all of them."""
        ...


@dataclass(frozen=True)
class Sums:
    """Tensors to be summed over all replicas.

    Args:
        layout: of the tensors.
        plan: how, for as many elements as the block has; None leaves it to MPI.
        wire_dtype: in which the pieces of a plan travel; None for that of the block.
    """

    layout: PackedLayout
    plan: AllReducePlan | None = None
    wire_dtype: np.dtype[Any] | None = None

    def describe(self) -> str:
        way = "all_reduce"
        if self.plan is not None:
            way = f"{self.plan.algorithm} in {self.plan.num_steps} steps"
        if self.wire_dtype is not None:
            way += f" as {self.wire_dtype.name}"
        shapes = self.layout.shapes
        # Of as many numbers in other shapes a sum would be possible, and wrong.
        digest = zlib.crc32(repr(shapes).encode())
        rows = self.layout.block_shape[0]
        return f"mpi {way} of {len(shapes)} tensors in {rows} rows (shapes {digest:08x}), first"

    def load(self, arrays: Sequence[Array], block: Array, *, replica: int) -> None:
        self.layout.pack(arrays, block)

    def merge(self, blocks: Sequence[Array]) -> None:
        for other in blocks[1:]:
            np.add(blocks[0], other, out=blocks[0])

    def transfer(self, mpi: Any, comm: Any, block: Array, *, tag: int, pool: BlockPool) -> Transfer:
        flat = block.reshape(-1)
        if self.plan is None:
            return library_all_reduce(mpi, comm, flat)
        return all_reduce_by_plan(
            self.plan, comm, flat, tag=tag, pool=pool, wire_dtype=self.wire_dtype
        )


@dataclass(frozen=True)
class Rows:
    """One tensor of each replica, of one shape, to be had by all.

    Args:
        shape: of the tensor.
        dtype: of the tensor.
        worker: this one's rank.
        workers: how many.
        replicas: of a worker.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    worker: int
    workers: int
    replicas: int

    @cached_property
    def layout(self) -> PackedLayout:
        """All replicas' tensors, in the order of their ranks."""
        return PackedLayout((self.shape,) * (self.workers * self.replicas), self.dtype)

    def describe(self) -> str:
        return (
            "mpi all_gather of a sparse gradient (equally many rows on each replica, so let them "
            "divide the batch):"
        )

    def load(self, arrays: Sequence[Array], block: Array, *, replica: int) -> None:
        (array,) = arrays
        self._part(block, replica)[: array.size] = array.reshape(-1)

    def merge(self, blocks: Sequence[Array]) -> None:
        for replica, other in enumerate(blocks[1:], start=1):
            self._part(blocks[0], replica)[:] = self._part(other, replica)

    def transfer(self, mpi: Any, comm: Any, block: Array, *, tag: int, pool: BlockPool) -> Transfer:
        return library_all_gather(mpi, comm, block.reshape(-1))

    def _part(self, block: Array, replica: int) -> Array:
        """A replica's own rows."""
        rows = self.layout.rows[0]
        first = (self.worker * self.replicas + replica) * rows
        return block[first : first + rows].reshape(-1)
