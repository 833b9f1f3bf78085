"""This process as one of MPI's ranks: starts MPI, joins the others, and sees to it that it ends."""

from __future__ import annotations

import os

import tensorflow as tf

from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.distribute._mpi import load_mpi
from tf_largebatch.distribute._mpi_cluster import join_mpi
from tf_largebatch.distribute._mpi_engine import TransferEngine
from tf_largebatch.distribute._mpi_exit import MpiExit


class MpiWorkers:
    """The workers that MPI has, and the engine in which their buckets travel.

    Args:
        start_timeout_seconds: how long ranks wait for one another at start.
        timeout_seconds: how long a bucket may travel, and a rank wait for others at its end.

    Attributes:
        topology: the workers.
        engine: None for a worker alone.

    Raises:
        As `load_mpi` and `join_mpi`, and ConfigurationError on a host with GPUs.
    """

    def __init__(self, *, start_timeout_seconds: float, timeout_seconds: float) -> None:
        if tf.config.list_physical_devices("GPU"):
            raise ConfigurationError(
                "transport='mpi' moves what lies in the memory of the host, but TensorFlow uses "
                "this host's GPUs. Use transport='tensorflow', whose collectives are NCCL's on "
                "GPUs; or hide them by CUDA_VISIBLE_DEVICES=-1."
            )
        mpi = load_mpi(timeout_seconds=start_timeout_seconds)
        end = MpiExit.of(mpi, timeout_seconds=timeout_seconds)
        self.topology, comm, cores = join_mpi(mpi, timeout_seconds=start_timeout_seconds)
        self._cores = cores
        self.engine: TransferEngine | None = None
        if self.topology.num_workers > 1:
            self.engine = TransferEngine(
                mpi,
                comm,
                self.topology,
                timeout_seconds=timeout_seconds,
                share_cores=cores < 1,
            )
            end.joined(self.topology, comm, self.engine.close)

    def limit_threads(self) -> None:
        """Has TensorFlow compute with this rank's part of the cores, unless it was told otherwise.

        A launcher such as mpiexec sets no limit, and each rank would start as many threads as the
        host has cores. Before TensorFlow runs its first op.
        """
        told = os.environ.get("TF_NUM_INTRAOP_THREADS", "")
        threading = tf.config.threading
        if not told and threading.get_intra_op_parallelism_threads() == 0:
            threading.set_intra_op_parallelism_threads(max(1, int(self._cores)))
