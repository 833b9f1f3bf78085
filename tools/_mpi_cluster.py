"""Workers of this machine that mpiexec starts: they find one another over MPI.

Each rank is `_mpi_rank.py`, which runs the command and notes its end in a file; so a worker's exit
code or signal, and when it ended, is known as exactly as for a process of our own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from _local_cluster import (
    LocalCluster,
    Worker,
    common_environment,
    last_lines,
    log_path,
    named_log_path,
)
from _mpi_shared_memory import shared_memory_of
from _mpiexec import Mpiexec

_RANK_PROGRAM = Path(__file__).with_name("_mpi_rank.py")
# From mpiexec's end to the last note of a rank that it ended, on a busy machine.
_LATE_SECONDS = 10.0
# For mpiexec to end when all ranks have: it takes no more, or hangs after a failure.
_LEAVE_SECONDS = 1.0


@dataclasses.dataclass
class MpiWorker(Worker):
    """A rank; `process` is mpiexec."""

    mpiexec_log_path: Path = Path(os.devnull)
    ended_by: str = ""  # where it did not end by itself; begins with a verb

    def describe_exit(self) -> str:
        if self.ended_by and not self.stopped_by_launcher:
            return f"{self.ended_by} after {self.seconds:.1f} s"
        return super().describe_exit()

    def last_log_lines(self, count: int) -> list[str]:
        lines = super().last_log_lines(count)
        if self.ended_by and not self.stopped_by_launcher:
            lines += [f"mpiexec: {line}" for line in last_lines(self.mpiexec_log_path, count)]
        return lines


class MpiLocalCluster(LocalCluster):
    """The ranks of one mpiexec; a context manager that leaves no process behind.

    mpiexec leaves the others alone when one rank ends, however it ends; only on a rank's MPI_Abort
    that of MPICH ends all of them.

    Args:
        mpiexec: which one.
    """

    workers: list[MpiWorker]

    def __init__(self, mpiexec: Mpiexec) -> None:
        super().__init__()
        self._mpiexec = mpiexec
        self._process: subprocess.Popen[bytes] | None = None
        self._process_ended_at: float | None = None
        self._shared_memory: set[Path] = set()
        self._notes = tempfile.TemporaryDirectory(prefix="tf_largebatch_mpi_")

    def __exit__(self, *exc_info: object) -> None:
        super().__exit__(*exc_info)
        self._notes.cleanup()

    def start(
        self,
        command: Sequence[str],
        *,
        num_workers: int,
        replicas_per_worker: int,
        log_dir: Path,
        restart: int = 0,
    ) -> None:
        """Starts `num_workers` ranks of `command`, which have no TF_CONFIG."""
        logs = [log_path(log_dir, rank, restart).absolute() for rank in range(num_workers)]
        for path in logs:
            path.write_bytes(b"")
        orders = {"command": list(command), "logs": [str(path) for path in logs]}
        (Path(self._notes.name) / "orders.json").write_text(json.dumps(orders))
        environment = common_environment(
            num_workers,
            replicas_per_worker=replicas_per_worker,
            restart=restart,
            base={name: value for name, value in os.environ.items() if name != "TF_CONFIG"},
        )
        mpiexec_log = named_log_path(log_dir, "mpiexec", restart)
        rank_program = [sys.executable, "-I", "-S", str(_RANK_PROGRAM), self._notes.name]
        self._started_at = time.monotonic()
        self._process = self._start_process(
            self._mpiexec.command(num_workers, rank_program), environment, mpiexec_log
        )
        self.workers += [
            MpiWorker(rank, f"MPI rank {rank}", path, self._process, mpiexec_log_path=mpiexec_log)
            for rank, path in enumerate(logs)
        ]

    def poll(self) -> list[Worker]:
        """Notes which ranks have ended; returns those that still run."""
        if self._process is None:
            return []
        is_over = self._no_note_will_come(self._process)  # so before they are read
        ends = [(end, worker) for worker in self.running if (end := self._end_of(worker))]
        for end, worker in sorted(ends, key=lambda pair: pair[0]["at"]):
            self._note_exit(worker, **end)
        if any(worker.failed for _, worker in ends):
            self._note_shared_memory()
        if is_over:
            self._give_up(f"ended with mpiexec, whose exit code was {self._process.returncode},")
        return self.running

    def kill(self) -> None:
        """As of any cluster; an mpiexec that can end by itself is left a moment for it."""
        if self._process is not None and not self.poll():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_LEAVE_SECONDS)
        self._note_shared_memory()
        super().kill()
        self._give_up()
        for path in self._shared_memory:
            path.unlink(missing_ok=True)

    def terminate(self) -> None:
        self._note_shared_memory()
        super().terminate()

    def _note_shared_memory(self) -> None:
        """Of the ranks that run still, as MPI's files are nobody's when all are gone."""
        self._shared_memory |= shared_memory_of(each.pid for each in self._descendants())

    def _processes_to_terminate(self) -> list[psutil.Process]:
        """All but mpiexec and what it starts, which end with the ranks, or would kill them."""
        assert self._process is not None
        own = {self._process.pid}
        with contextlib.suppress(psutil.NoSuchProcess):
            own |= {child.pid for child in psutil.Process(self._process.pid).children()}
        return [each for each in super()._processes_to_terminate() if each.pid not in own]

    def _end_of(self, worker: Worker) -> dict[str, Any] | None:
        try:
            return json.loads((Path(self._notes.name) / f"end_{worker.rank}.json").read_text())
        except FileNotFoundError:
            return None

    def _no_note_will_come(self, mpiexec: subprocess.Popen[bytes]) -> bool:
        """Whether all is over; a rank that mpiexec ends is noted a little later."""
        if mpiexec.poll() is None:
            return False
        self._process_ended_at = self._process_ended_at or time.monotonic()
        late = time.monotonic() > self._process_ended_at + _LATE_SECONDS
        return late or not self._descendants()

    def _give_up(self, ended_by: str = "") -> None:
        """Ends what still seems to run, of which no note has come."""
        for worker in self.running:
            self._note_exit(worker, -signal.SIGKILL, time.monotonic(), ended_by)

    def _note_exit(self, worker: Worker, returncode: int, at: float, ended_by: str) -> None:
        assert isinstance(worker, MpiWorker)
        worker.returncode = returncode
        worker.seconds = at - self._started_at
        worker.ended_by = ended_by
        self.exited.append(worker)
