"""What mpiexec starts as each rank: runs the command, keeps its log, and notes how it ended.

    python -I -S _mpi_rank.py FOLDER        # with FOLDER/orders.json, see `_mpi_cluster.py`

mpiexec tells little of a rank's end, so its parent has to note it. That parent is not the process
that mpiexec knows: MPICH's kills that one, as those of all ranks, on a rank's MPI_Abort, and sends
it SIGUSR1 to tell of another rank's death, of which a command dies that has not started MPI yet. So
there are two: the one that mpiexec knows, which does nothing, and its child, the watcher, in a
session of its own. When the first is killed, the watcher kills the command.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK")
_CANNOT_START = 127  # as a shell's
# Other processes get these from the launcher or from mpiexec, each in its own way.
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_MPIEXEC_ENDED_US = signal.SIGUSR2
# A rank that calls MPI_Abort says so in its log, if its MPI is MPICH, and sleeps until it is killed
# (for 3 s at most). The others are left alone so long that it is noted first.
_ABORT = re.compile(rb"^Abort\((-?\d+)\) on node \d+ \(rank \d+", re.MULTILINE)
_ABORT_SECONDS = 0.5
_TAIL_BYTES = 4096
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def main(folder: Path) -> int:
    orders = json.loads((folder / "orders.json").read_text())
    rank = own_rank(os.environ)
    end_file = folder / f"end_{rank}.json"
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _IGNORED}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, _MPIEXEC_ENDED_US})

    def restore_signals() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    _signal_when_parent_dies(signal.SIGKILL, os.getppid())
    first = os.getpid()
    if (watcher := os.fork()) == 0:
        os.setsid()  # mpiexec may signal the group of the first process
        _signal_when_parent_dies(_MPIEXEC_ENDED_US, first)
        end = run(orders["command"], Path(orders["logs"][rank]), restore_signals)
        write_end(end_file, end)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(watcher, 0)[1])
    if not end_file.exists():  # the watcher was killed, and its command with it
        write_end(end_file, end_of(status or 1))
    return 0  # the note says how it ended; for a rank that fails Open MPI's may end the others


def own_rank(environ: Mapping[str, str]) -> int:
    """This process' rank, from what mpiexec set."""
    return next(int(environ[name]) for name in _RANK_VARIABLES if name in environ)


def run(command: list[str], log_path: Path, prepare: Callable[[], None]) -> dict[str, Any]:
    """Runs the command to its end, or to that of the first process.

    Returns:
        `returncode` as of Popen, `at` in the seconds of `time.monotonic`, and `ended_by`, which is
        empty where the command ended by itself.
    """
    watcher = os.getpid()

    def prepare_command() -> None:
        prepare()
        _signal_when_parent_dies(signal.SIGKILL, watcher)

    with log_path.open("ab") as log:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                close_fds=False,  # MPI's own to mpiexec is among them
                start_new_session=True,
                preexec_fn=prepare_command,
            )
        except OSError as error:
            log.write(f"{command[0]} cannot be started: {error.strerror}\n".encode())
            return end_of(_CANNOT_START)
    while process.poll() is None:
        if signal.sigwait({signal.SIGCHLD, _MPIEXEC_ENDED_US}) == _MPIEXEC_ENDED_US:
            return _end_with_first(process, log_path)
    return end_of(process.returncode)


def end_of(returncode: int, ended_by: str = "") -> dict[str, Any]:
    """What is noted of an end now."""
    return {"returncode": returncode, "at": time.monotonic(), "ended_by": ended_by}


def _end_with_first(process: subprocess.Popen[bytes], log_path: Path) -> dict[str, Any]:
    """mpiexec has killed the first process of all ranks, of which one may have asked for it."""
    aborted = _abort_code(log_path)
    with contextlib.suppress(subprocess.TimeoutExpired):
        if aborted is None:
            return end_of(process.wait(timeout=_ABORT_SECONDS))
    end = end_of(-signal.SIGKILL, "was ended by mpiexec")
    if aborted is not None:
        end = end_of(aborted, f"called MPI_Abort with code {aborted}")
    process.kill()
    process.wait()
    return end


def _abort_code(log_path: Path) -> int | None:
    """With which code this rank has called MPI_Abort; None if it has not, or is silent about it."""
    with log_path.open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
        found = _ABORT.findall(log.read())
    return int(found[-1]) if found else None


def write_end(path: Path, end: Mapping[str, Any]) -> None:
    """Whoever reads it finds all of it, or nothing."""
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(end))
    unfinished.replace(path)


def _signal_when_parent_dies(number: int, parent_pid: int) -> None:
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() != parent_pid:  # it died before the line above
            os.kill(os.getpid(), number)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
