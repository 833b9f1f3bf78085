"""Python started by mpiexec, in as many processes as there are ranks; nothing of it is left."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.processes import kill_marked

ROOT = Path(__file__).parents[1]
_MARK = "TEST_MPI_LAUNCH"  # environment variable that tells whose a process is
_OF_LAUNCHERS = ("PMI_", "MPI_LOCAL", "HYDI_", "HYDRA_", "OMPI_", "PMIX_", "SLURM_")
_POLL_SECONDS = 0.02
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def mpiexec() -> str | None:
    """That beside this Python, which belongs to the library of its mpich wheel; else of PATH."""
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def why_not() -> str | None:
    """Why no ranks can be started here, to skip tests with; None where they can."""
    if importlib.util.find_spec("mpi4py") is None:
        return "needs mpi4py: pip install 'tf_largebatch[mpi]'"
    if mpiexec() is None:
        return "needs mpiexec: pip install mpich"
    return None


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Of a process that is no worker and no rank, without GPUs."""
    kept = {
        name: value for name, value in environment.items() if not name.startswith(_OF_LAUNCHERS)
    }
    kept.pop("TF_CONFIG", None)
    paths = [str(ROOT), environment.get("PYTHONPATH", "")]
    return {
        **kept,
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_NUM_INTRAOP_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }


@dataclass(frozen=True)
class Ended:
    """How a launch ended: mpiexec's code, None if it was killed as too slow; what all printed."""

    returncode: int | None
    seconds: float
    log: str


class MpiLaunch:
    """`mpiexec -n RANKS python ARGUMENTS`, from the root of the repository.

    Args:
        arguments: of Python, the same on all ranks.
        num_ranks: how many.
        flags: more of mpiexec's.
        environment: more variables.
    """

    def __init__(
        self,
        *arguments: str,
        num_ranks: int,
        flags: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        command = mpiexec()
        assert command is not None
        self._mark = uuid.uuid4().hex
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `stop`
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [command, *flags, "-n", str(num_ranks), sys.executable, *arguments],
            cwd=ROOT,
            env={**without_launcher(os.environ), **(environment or {}), _MARK: self._mark},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )

    def wait(self, seconds: float) -> Ended:
        """Waits for the end of all ranks, and then, or after `seconds`, kills what is left."""
        try:
            code: int | None = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        took = time.monotonic() - self.started
        self.stop()
        return Ended(code, took, self.log())

    def log(self) -> str:
        """What mpiexec and its ranks have printed."""
        path = f"/proc/self/fd/{self._log.fileno()}"
        return Path(path).read_text(errors="replace")  # not `read`: the position is shared

    def stop(self) -> None:
        """Kills mpiexec and all that it started."""
        kill_marked(_MARK, self._mark)
        self.process.wait()


def run_ranks(
    *arguments: str,
    num_ranks: int,
    seconds: float,
    flags: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Ended:
    """Runs `MpiLaunch(...)` to its end; fails unless all ranks end well within `seconds`."""
    launch = MpiLaunch(*arguments, num_ranks=num_ranks, flags=flags, environment=environment)
    ended = launch.wait(seconds)
    assert ended.returncode == 0, f"{ended.returncode} after {ended.seconds:.1f} s\n{ended.log}"
    return ended


def _die_with_parent() -> None:
    """SIGKILL for mpiexec when what started it dies, even by SIGKILL; its ranks end with it."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
