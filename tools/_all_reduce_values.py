"""What the workers of `benchmark_all_reduce.py` sum, and what must come out: pure NumPy."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

ITEM_BYTES = 4
_SEED = 1
_UNIT_ROUNDOFF = {None: 0.0, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
_LEAST_FLOAT16_STEP = 2.0**-24
Values = npt.NDArray[np.float32]


def values_of(rank: int, length: int, workers: int) -> tuple[Values, Values]:
    """A worker's whole numbers and normal numbers.

    Sums of the former, of any of the workers, are at most 256 in magnitude (up to 256 workers), so
    that float32, float16 and bfloat16 all hold them exactly.
    """
    random = np.random.Generator(np.random.Philox(key=[_SEED, rank]))
    largest = max(1, min(4, 256 // workers))
    whole = random.integers(-largest, largest, length, endpoint=True, dtype=np.int8)
    return whole.astype(np.float32), random.standard_normal(length, dtype=np.float32)


@dataclasses.dataclass(frozen=True)
class Truth:
    """What the values of all workers sum to: computed before the fork, in float64."""

    length: int
    workers: int
    whole_sum: Values
    normal_sum: npt.NDArray[np.float64]
    normal_magnitude: npt.NDArray[np.float64]  # sum of absolute values

    @classmethod
    def of(cls, size_bytes: int, workers: int) -> Truth:
        length = size_bytes // ITEM_BYTES
        whole_sum, normal_sum, magnitude = np.zeros((3, length))
        for rank in range(workers):
            whole, normal = values_of(rank, length, workers)
            whole_sum += whole
            normal_sum += normal
            magnitude += np.abs(normal)
        return cls(length, workers, whole_sum.astype(np.float32), normal_sum, magnitude)

    def tolerance(self, wire_dtype: str | None) -> npt.NDArray[np.float64]:
        """How far a right result may be from `normal_sum`."""
        return rounding_tolerance(self.normal_magnitude, self.workers, wire_dtype)


def rounding_tolerance(
    magnitude: npt.NDArray[Any], workers: int, wire_dtype: str | None
) -> npt.NDArray[Any]:
    """How far an all-reduce of float32 values may be from their sum.

    Each value goes through at most p - 1 additions in float32, and before each of them and at the
    end through one rounding to the wire's dtype:
    `|error| <= ((1 + u32)^p * (1 + u_wire)^p - 1) * sum |x|`, and p steps of the least numbers of
    float16, which are rounded absolutely. Source: Higham 2002, section 4.2.

    Args:
        magnitude: the sum of absolute values.
        workers: p.
        wire_dtype: in which they travel; None for float32.
    """
    growth = (1 + _UNIT_ROUNDOFF["float32"]) * (1 + _UNIT_ROUNDOFF[wire_dtype])
    least = workers * _LEAST_FLOAT16_STEP if wire_dtype == "float16" else 0.0
    return (growth**workers - 1) * magnitude + least
