"""All-reduces that ranks run, and the test computes as well: plans, lengths, dtypes, inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tf_largebatch.core.collective_plan import AllReducePlan, binary_blocks, halving_doubling, ring

# All numbers of ranks, in launches' rounds of up to 16: groups of a round run side by side.
ROUNDS = ((16,), (12, 4), (9, 7), (8, 6, 2), (5, 3, 1))
LENGTHS = (1, 37, 1001)
WIRE_DTYPES = {None: None, "bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype("f2")}
DTYPES = ("float32", "float64", "int32", "int64")


@dataclass(frozen=True)
class Case:
    """`algorithm` is "mpi", or says a plan; `align` is the plan's."""

    algorithm: str
    length: int
    dtype: str
    wire: str | None = None
    align: int = 1

    def plan(self, num_ranks: int) -> AllReducePlan | None:
        sizes: dict[str, Any] = {"length": self.length, "align": self.align}
        if self.algorithm == "ring":
            return ring(num_ranks, **sizes)
        if self.algorithm == "binary_blocks":
            return binary_blocks(num_ranks, **sizes)
        if self.algorithm.startswith("halving_doubling"):
            return halving_doubling(num_ranks, halvings=int(self.algorithm[-1]), **sizes)
        return None

    def values(self, num_ranks: int, rank: int) -> npt.NDArray[Any]:
        """Normal numbers, or whole ones of either sign."""
        random = np.random.default_rng([num_ranks, rank, self.length])
        if self.dtype.startswith("int"):
            return random.integers(-1000, 1000, self.length).astype(self.dtype)
        return random.normal(size=self.length).astype(self.dtype)


def cases(num_ranks: int) -> list[Case]:
    most = num_ranks.bit_length() - 1
    algorithms = [
        "ring",
        "binary_blocks",
        *(f"halving_doubling {halvings}" for halvings in range(most + 1)),
    ]
    found = [Case("mpi", length, dtype) for length in (0, *LENGTHS, 100_003) for dtype in DTYPES]
    for algorithm in algorithms:
        found += [Case(algorithm, length, "float32") for length in LENGTHS]
        found += [Case(algorithm, LENGTHS[-1], dtype) for dtype in DTYPES[1:]]
        found += [Case(algorithm, length, "float32", "bfloat16") for length in LENGTHS[:-1]]
        found += [
            Case(algorithm, LENGTHS[-1], dtype, wire)
            for dtype in ("float32", "float64")
            for wire in ("bfloat16", "float16")
        ]
        # As the strategy cuts: at multiples of 64 bytes. One has no elements at all.
        found += [
            Case(algorithm, 1000, "float32", align=16),
            Case(algorithm, 1000, "float32", "bfloat16", align=32),
            Case(algorithm, 0, "float32"),
            Case(algorithm, 0, "float64", "float16"),
        ]
    return found
