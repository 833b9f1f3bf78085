"""The ways to sum that `benchmark_all_reduce.py` compares: what carries it, and how."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

ALGORITHMS = ("tensorflow", "ring", "halving_doubling", "auto")
TRANSPORTS = ("tensorflow", "mpi")


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to sum.

    Args:
        transport: as of `AllReduceOptions`; or that of `RAW`.
        algorithm: as of `AllReduceOptions`; or that of `RAW`.
    """

    transport: str
    algorithm: str

    @property
    def has_wire_dtype(self) -> bool:
        """Whether values may travel in another dtype than that in which they are summed."""
        return self != RAW and self.algorithm != "tensorflow"


# mpi4py on NumPy arrays, without TensorFlow: the limit of all that goes by MPI.
RAW = Way("mpi4py", "Allreduce")


def ways_of(transports: Sequence[str], algorithms: Sequence[str]) -> list[Way]:
    """All that transports and algorithms amount to, in their order; with "mpi" `RAW` comes last.

    Left out are TensorFlow's own algorithm by MPI, as there is none, and, beside MPI, "auto" of
    TensorFlow's transport: a strategy by MPI measures no costs of it, and what "auto" chose from
    typical ones would be something else than what it chooses without MPI.
    """
    has_mpi = "mpi" in transports
    left_out = [Way("mpi", "tensorflow"), *([Way("tensorflow", "auto")] if has_mpi else [])]
    ways = [Way(transport, algorithm) for transport in transports for algorithm in algorithms]
    return [way for way in ways if way not in left_out] + ([RAW] if has_mpi else [])
