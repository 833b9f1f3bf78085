"""The one door to mpi4py: loads it, and refuses an MPI that cannot carry gradients.

Importing `mpi4py.MPI` starts MPI, which waits for all ranks, so nothing else may import it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from tf_largebatch.core.errors import ConfigurationError, TopologyError, UnsupportedVersionError
from tf_largebatch.distribute._start_guard import end_if_mpi_hangs

_INSTALL = (
    "pip install 'tf_largebatch[mpi]', and, where the machine has no MPI of its own (Open MPI, "
    "MPICH, Intel MPI), pip install mpich."
)
# (launcher, number of ranks, this one), by the variables that it sets.
_LAUNCHERS = (
    ("Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("mpiexec", "PMI_SIZE", "PMI_RANK"),
    ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
)


def launched_ranks(environ: Mapping[str, str] | None = None) -> tuple[str, int, int] | None:
    """(launcher, number of ranks, this one) where an MPI launcher started this process as one.

    None where it started no others, or where no launcher did.
    """
    variables = os.environ if environ is None else environ
    for launcher, size, rank in _LAUNCHERS:
        count, own = variables.get(size, ""), variables.get(rank, "")
        # The first one decides: within a SLURM job, mpiexec has srun start its own helpers.
        if count.isdecimal() and own.isdecimal():
            return (launcher, int(count), int(own)) if int(count) > 1 else None
    return None


def load_mpi(*, timeout_seconds: float) -> Any:
    """`mpi4py.MPI`, started with `MPI_THREAD_MULTIPLE`.

    Args:
        timeout_seconds: how long MPI may take to start, with all its ranks; then this process is
            ended, as nothing can interrupt it.

    Raises:
        UnsupportedVersionError: there is no mpi4py, or no MPI library.
        ConfigurationError: this MPI does not let several threads call it at a time.
        TopologyError: a launcher started several ranks, but each of them is alone in this MPI.
    """
    launched = launched_ranks()
    try:
        import mpi4py
    except ImportError as error:
        raise UnsupportedVersionError(f"transport='mpi' needs mpi4py ({error}): {_INSTALL}") from (
            error
        )
    if "mpi4py.MPI" not in sys.modules:
        # Ours to end: see `_mpi_exit.py`. A rank that left by itself would wait for the others.
        mpi4py.rc.finalize = False
    try:
        with end_if_mpi_hangs(launched, timeout_seconds=timeout_seconds):
            from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # mpi4py's own word for a missing library
        raise UnsupportedVersionError(
            f"transport='mpi' needs an MPI library, which mpi4py cannot load ({error}): {_INSTALL}"
        ) from error
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise ConfigurationError(
            "transport='mpi' needs MPI_THREAD_MULTIPLE, as buckets travel in a thread of their own "
            "while the program goes on, but this MPI was started with less: "
            f"{MPI.Get_library_version().splitlines()[0]}. Use an MPI built with threads (the "
            "mpich wheel is), and do not lower mpi4py.rc.thread_level; or use "
            "transport='tensorflow'."
        )
    if launched is not None and MPI.COMM_WORLD.size == 1:
        launcher, count, rank = launched
        raise TopologyError(
            f"{launcher} started this process as rank {rank} of {count}, but its MPI library sees "
            f"one rank alone: {MPI.Get_library_version().splitlines()[0]}. Start it with the "
            "mpiexec that belongs to this library (the one of the mpich wheel lies beside "
            "python), or with `srun --mpi=pmi2`."
        )
    return MPI
