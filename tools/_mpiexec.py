"""Which mpiexec there is, and how to call it for ranks of this machine."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_VERSION_SECONDS = 30.0
# By what `--version` prints, the arguments before the number of ranks. By default a rank's death
# ends all others at once; the first ones tell mpiexec to leave them alone.
_ARGUMENTS = {
    # Ranks of this machine alone, also within an allocation of a batch system.
    "HYDRA": ("-disable-auto-cleanup", "-launcher", "fork", "-rmk", "user"),
    "(Open MPI)": (
        "--enable-recovery",
        # More ranks than cores, as with the other launchers; binding is left to TensorFlow.
        *("--oversubscribe", "--bind-to", "none", "--allow-run-as-root"),
    ),
}


class NoMpiexec(Exception):
    """There is none that can start the ranks; the message says what does."""


@dataclasses.dataclass(frozen=True)
class Mpiexec:
    """An mpiexec, and the arguments it needs before the number of ranks."""

    path: Path
    arguments: tuple[str, ...]

    def command(self, num_ranks: int, program: Sequence[str]) -> list[str]:
        """What starts `num_ranks` times `program`."""
        return [str(self.path), *self.arguments, "-n", str(num_ranks), *program]


def find_mpiexec() -> Mpiexec:
    """The mpiexec beside this Python, where the wheels put theirs, else the one on PATH.

    Raises:
        NoMpiexec: there is none, or one of an MPI that is not known here.
    """
    found = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which(
        "mpiexec"
    )
    if found is None:
        raise NoMpiexec(
            f"mpiexec is neither beside {sys.executable} nor on PATH: "
            "pip install 'tf_largebatch[mpi]' mpich"
        )
    version = _version(found)
    for name, arguments in _ARGUMENTS.items():
        if name in version:
            return Mpiexec(Path(found), arguments)
    first_line = next(iter(version.splitlines()), "nothing")
    raise NoMpiexec(
        f"the mpiexec must be that of MPICH 4 or 5 or of Open MPI 5, but {found} --version "
        f"says {first_line!r}: pip install 'tf_largebatch[mpi]' mpich"
    )


def _version(mpiexec: str) -> str:
    try:
        done = subprocess.run(
            [mpiexec, "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_VERSION_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stdout.strip()
