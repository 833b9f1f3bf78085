"""Worker processes of this machine: ports, environment, start, watch, stop without leftovers."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import portpicker
import psutil

import tf_largebatch as tlb

HOST = "127.0.0.1"
_PORT_RANGE = range(15000, 25000)  # that of portpicker
RESTART_VARIABLE = "TF_LARGEBATCH_RESTART"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


@dataclasses.dataclass
class Worker:
    """One started worker; `returncode` is None while it runs, -signal if a signal ended it."""

    rank: int
    address: str
    log_path: Path
    process: subprocess.Popen[bytes]
    returncode: int | None = None
    seconds: float = 0.0  # from the start of the cluster to the exit of this worker
    stopped_by_launcher: bool = False

    @property
    def failed(self) -> bool:
        return self.returncode not in (None, 0) and not self.stopped_by_launcher

    def describe_exit(self) -> str:
        if self.returncode is None:
            return "is running"
        if self.stopped_by_launcher:
            return f"was stopped by the launcher after {self.seconds:.1f} s"
        if self.returncode >= 0:
            return f"exited with code {self.returncode} after {self.seconds:.1f} s"
        try:
            name = signal.Signals(-self.returncode).name
        except ValueError:  # a real-time signal
            name = "signal"
        return f"was killed by {name} ({-self.returncode}) after {self.seconds:.1f} s"

    def last_log_lines(self, count: int) -> list[str]:
        """The end of the log."""
        return last_lines(self.log_path, count)


def last_lines(path: Path, count: int) -> list[str]:
    """The end of a log; of a progress bar's line only what was last shown."""
    with path.open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - 64 * 1024))
        text = log.read().decode(errors="replace")
    lines = (line.rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n"))
    return [line for line in lines if line][-count:]


def pick_ports(count: int) -> list[int]:
    """Returns `count` different free ports of 127.0.0.1, in no order.

    They lie below the range from which the kernel serves outgoing connections: within it, a worker
    that dials a peer not yet listening can be given that very port, and then talks to itself. All
    are held together while they are picked, and let go on return, as a worker can only bind a port
    that nobody holds.
    """
    ports: list[int] = []
    with contextlib.ExitStack() as held:
        for port in random.sample(_PORT_RANGE, len(_PORT_RANGE)):
            if len(ports) == count:
                return ports
            if not portpicker.is_port_free(port):
                continue
            sock = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):  # taken in between: try the next
                sock.bind((HOST, port))
                ports.append(port)
    raise RuntimeError(
        f"{count} workers need as many ports; {len(ports)} are free in {_PORT_RANGE}."
    )


def common_environment(
    num_workers: int, *, replicas_per_worker: int, restart: int, base: Mapping[str, str]
) -> dict[str, str]:
    """Returns the environment that all workers share: `base`, replicas and thread limits.

    Thread limits share the cores among the workers; what `base` already sets stays as it is.
    TF_LARGEBATCH_RESTART says how often the workers were started again.
    """
    cores = len(psutil.Process().cpu_affinity()) if sys.platform == "linux" else os.cpu_count() or 1
    threads = str(max(1, cores // num_workers))
    environment = {
        "TF_NUM_INTRAOP_THREADS": threads,
        "OMP_NUM_THREADS": threads,
        "PYTHONUNBUFFERED": "1",  # the chief's lines are shown as they are written
        **base,
        RESTART_VARIABLE: str(restart),
    }
    if replicas_per_worker > 1:
        environment["TF_LARGEBATCH_CPU_REPLICAS"] = str(replicas_per_worker)
    return environment


def worker_environment(
    addresses: Sequence[str],
    rank: int,
    *,
    replicas_per_worker: int,
    restart: int,
    base: Mapping[str, str],
) -> dict[str, str]:
    """Returns the environment of one worker: what all share, and its TF_CONFIG."""
    shared = common_environment(
        len(addresses), replicas_per_worker=replicas_per_worker, restart=restart, base=base
    )
    return {**shared, "TF_CONFIG": tlb.ClusterTopology.from_addresses(addresses).tf_config(rank)}


def log_path(log_dir: Path, rank: int, restart: int) -> Path:
    """Where a worker's output goes; each restart has a file of its own."""
    return named_log_path(log_dir, f"worker_{rank:02d}", restart)


def named_log_path(log_dir: Path, name: str, restart: int) -> Path:
    return log_dir / f"{name}{f'.restart_{restart}' if restart else ''}.log"


class LocalCluster:
    """The workers of one command; a context manager that leaves no process behind.

    Each worker leads a session of its own, so that Ctrl-C in the terminal reaches the launcher
    alone. On Linux the launcher adopts orphans (PR_SET_CHILD_SUBREAPER): a grandchild is found even
    after its parent died or when it left its process group. If the launcher itself is killed by
    SIGKILL, the kernel kills the workers (PR_SET_PDEATHSIG), but not what they had started.
    """

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self.exited: list[Worker] = []  # in order of exit
        self._started_at = time.monotonic()
        if _LIBC is not None:
            _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()

    def start(
        self,
        command: Sequence[str],
        *,
        num_workers: int,
        replicas_per_worker: int,
        log_dir: Path,
        restart: int = 0,
    ) -> None:
        """Starts `num_workers` processes of `command`, chief first."""
        addresses = [f"{HOST}:{port}" for port in pick_ports(num_workers)]
        self._started_at = time.monotonic()
        for rank, address in enumerate(addresses):
            environment = worker_environment(
                addresses,
                rank,
                replicas_per_worker=replicas_per_worker,
                restart=restart,
                base=os.environ,
            )
            self._start_worker(address, command, environment, log_path(log_dir, rank, restart))

    def _start_worker(
        self,
        address: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log_path: Path,
        **options: Any,
    ) -> Worker:
        """Starts the next worker; by default it has no input, and dies with the launcher.

        Args:
            **options: of Popen, instead of these.
        """
        process = self._start_process(command, environment, log_path, **options)
        self.workers.append(Worker(len(self.workers), address, log_path, process))
        return self.workers[-1]

    @staticmethod
    def _start_process(
        command: Sequence[str], environment: Mapping[str, str], log_path: Path, **options: Any
    ) -> subprocess.Popen[bytes]:
        with log_path.open("wb") as log:
            return subprocess.Popen(
                command,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                **{
                    "stdin": subprocess.DEVNULL,
                    "preexec_fn": die_with_parent(os.getpid()),
                    **options,
                },
            )

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started_at

    @property
    def running(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.returncode is None]

    def poll(self) -> list[Worker]:
        """Notes who has exited; returns the workers that still run."""
        for worker in self.running:
            worker.returncode = worker.process.poll()
            if worker.returncode is not None:
                worker.seconds = self.elapsed
                self.exited.append(worker)
        return self.running

    # How much longer than asked it may take until a worker's SIGTERM becomes a SIGKILL.
    extra_terminate_seconds = 0.0

    def terminate(self) -> None:
        """SIGTERM to every process of every worker that still runs."""
        for worker in self.poll():
            worker.stopped_by_launcher = True
        for process in self._processes_to_terminate():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()

    def _processes_to_terminate(self) -> list[psutil.Process]:
        return self._descendants()

    def kill(self) -> None:
        """SIGKILL to all that is left, also to what exited workers left behind; waits for it."""
        for worker in self.poll():
            worker.stopped_by_launcher = True
        # Again until none is left: a process may start another between the listing and the kill.
        while descendants := self._descendants():
            for process in descendants:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            own = {worker.process.pid for worker in self.workers}
            for worker in self.running:
                worker.process.wait()
            # Popen waits for its own process: its return code would be lost to another waiter.
            psutil.wait_procs([process for process in descendants if process.pid not in own])
            self.poll()

    @staticmethod
    def _descendants() -> list[psutil.Process]:
        return psutil.Process().children(recursive=True)


def die_with_parent(parent_pid: int) -> Callable[[], None] | None:
    """A function for the new process, before its command starts: SIGKILL when the parent dies."""
    if _LIBC is None:
        return None

    def prepare() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent_pid:  # it died before the line above
            os._exit(1)

    return prepare
