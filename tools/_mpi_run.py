"""Runs of a benchmark whose workers are MPI's ranks."""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from _forked_run import ForkedRun, command_of
from _mpi_cluster import MpiLocalCluster
from _mpiexec import NoMpiexec, find_mpiexec
from _worker_wait import wait_for_workers


def missing_for_mpi() -> str | None:
    """What this machine lacks for runs by MPI, and how to get it; None if nothing."""
    if importlib.util.find_spec("mpi4py") is None:  # imported by the ranks alone: it starts MPI
        return "--transports=mpi needs mpi4py: pip install 'tf_largebatch[mpi]' mpich"
    try:
        find_mpiexec()
    except NoMpiexec as error:
        return f"--transports=mpi: {error}"
    return None


def run_ranks(
    program: Path, program_flags: Mapping[str, Any], *, workers: int, timeout_seconds: float
) -> ForkedRun:
    """Starts the workers by mpiexec, and collects what they hand back, as `run_forked` does.

    Args:
        program: the script that all of them run; each writes `rank_NN.json` to its `result_dir`.
        program_flags: as of `run_forked`.
        workers: how many.
        timeout_seconds: for all; then the run has failed.
    """
    with (
        tempfile.TemporaryDirectory(prefix=f"{program.stem}_") as name,
        MpiLocalCluster(find_mpiexec()) as cluster,
    ):
        folder = Path(name)
        command = command_of(program, folder, program_flags)
        cluster.start(command, num_workers=workers, replicas_per_worker=1, log_dir=folder)
        problem = wait_for_workers(cluster, timeout_seconds=timeout_seconds)
        if problem is not None:
            return ForkedRun((), problem, None)
        files = [folder / f"rank_{rank:02d}.json" for rank in range(workers)]
        return ForkedRun(tuple(json.loads(file.read_text()) for file in files), None, None)
