"""Ranks of mpiexec as forks of one process that has imported TensorFlow: see `forked_cluster.py`.

mpiexec starts a small client for each rank (`_mpi_client.py`), which hands over what it was given.
A process of the cluster's own forks the ranks, tells the clients how they ended, and kills the rank
of a client that was killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from _worker_main import die_with_parent, fork
from forked_cluster import Cluster

from tests.mpi_processes import MpiLaunch

_CLIENT = Path(__file__).parents[1] / "_mpi_client.py"
_POLL_SECONDS = 0.02
_START_SECONDS = 30.0
_END_SECONDS = 10.0


class MpiCluster(Cluster):
    """Ranks that run `body(rank)`; an exception ends one with return code 1.

    Args:
        body: what each rank runs; what it prints is its log.
        num_workers: how many.
        flags: of mpiexec.
        env: more environment variables, one mapping a rank.
    """

    def __init__(
        self,
        body: Callable[[int], Any],
        *,
        num_workers: int = 2,
        flags: Sequence[str] = (),
        env: Sequence[Mapping[str, str]] = (),
    ) -> None:
        self.addresses = [""] * num_workers  # the ranks agree on them
        self.started = time.monotonic()
        self.pids: dict[int, int] = {}
        self._ends: dict[int, tuple[int, float]] = {}
        # No context managers: a fork would leave them too.
        self._logs: dict[int, IO[bytes]] = {
            rank: tempfile.TemporaryFile()  # noqa: SIM115
            for rank in range(num_workers)
        }
        self._reports = tempfile.TemporaryFile()  # noqa: SIM115
        name = f"test_mpi_cluster_{os.getpid()}_{time.monotonic_ns()}"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind("\0" + name)
        listener.listen(num_workers)
        self._fork_the_forker(_Forker(listener, body, env, self._logs, self._reports))
        listener.close()
        self._launch = MpiLaunch("-I", "-S", str(_CLIENT), name, num_ranks=num_workers, flags=flags)
        self._wait_until_started()

    def _fork_the_forker(self, forker: _Forker) -> None:
        parent = os.getpid()
        self._forker = os.fork()
        if self._forker:
            return
        os.environ["TEST_HARNESS_PID"] = str(parent)
        die_with_parent()
        try:
            forker.serve()  # each rank leaves it by SystemExit, and through the interpreter's exit
        except Exception as error:
            os.write(self._reports.fileno(), f"{error!r}\n".encode())
        os._exit(0)

    def _wait_until_started(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while len(self.pids) < len(self._logs):
            self._read_reports()
            if time.monotonic() > deadline:
                self.close()
                raise AssertionError(f"mpiexec started {len(self.pids)} rank(s): {self._says()}")
            time.sleep(_POLL_SECONDS)

    def _says(self) -> str:
        path = Path(f"/proc/self/fd/{self._reports.fileno()}")
        return path.read_text() + self._launch.log()

    def _read_reports(self) -> None:
        for line in Path(f"/proc/self/fd/{self._reports.fileno()}").read_text().splitlines():
            if line.startswith("{"):
                fact = json.loads(line)
                if "pid" in fact:
                    self.pids[fact["rank"]] = fact["pid"]
                else:
                    self._ends[fact["rank"]] = (fact["code"], fact["at"])

    def is_running(self, rank: int) -> bool:
        self._read_reports()
        return rank not in self._ends

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        with contextlib.suppress(ProcessLookupError):  # its end is known a moment later
            super().kill(rank, number)

    def join(
        self, timeout_seconds: float = 45.0, *, since: float | None = None
    ) -> dict[int, dict[str, Any]]:
        """As of `Cluster`; "mpiexec" is its return code, and "launcher" what it printed."""
        ends = super().join(timeout_seconds, since=since)
        launched = self._launch.wait(_END_SECONDS)
        more = {"mpiexec": launched.returncode, "launcher": launched.log}
        return {rank: {**end, **more} for rank, end in ends.items()}

    def close(self) -> None:
        super().close()
        with contextlib.suppress(ChildProcessError):
            if len(self.pids) < len(self._logs):
                os.kill(self._forker, signal.SIGKILL)
            os.waitpid(self._forker, 0)


class _Forker:
    """Forks a rank for each client, and keeps the two together until all have ended.

    Args:
        listener: to which clients connect.
        body, env: as of `MpiCluster`.
        logs: of the ranks.
        reports: is told, a line each, who has started and how who has ended.
    """

    def __init__(
        self,
        listener: socket.socket,
        body: Callable[[int], Any],
        env: Sequence[Mapping[str, str]],
        logs: Mapping[int, IO[bytes]],
        reports: IO[bytes],
    ) -> None:
        self._listener, self._body, self._env = listener, body, env
        self._logs, self._reports = logs, reports
        self._missing = len(logs)
        self._ranks: dict[int, tuple[int, socket.socket]] = {}  # by process

    def serve(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self._listener, selectors.EVENT_READ)
        while self._missing or self._ranks:
            for key, _ in selector.select(_POLL_SECONDS):
                if key.fileobj is self._listener:
                    client = self._listener.accept()[0]
                    self._start(client, selector)
                    selector.register(client, selectors.EVENT_READ)
                else:  # all it has to say, it has said; so it is gone
                    selector.unregister(key.fileobj)
                    self._kill_rank_of(key.fileobj)
            self._reap()

    def _start(self, client: socket.socket, selector: selectors.BaseSelector) -> None:
        first, lines, _, _ = socket.recv_fds(client, 1, 1)
        given = json.loads(first.decode() + client.makefile().readline())
        rank = int(given["PMI_RANK"])
        env = {**given, "PMI_FD": str(lines[0]), **(self._env[rank] if self._env else {})}

        def body() -> None:
            selector.close()
            for other in (self._listener, client, *(each for _, each in self._ranks.values())):
                other.close()
            os.environ.clear()
            os.environ.update(env)
            self._body(rank)

        log = self._logs[rank].fileno()
        pid = fork(body, seed=rank, env={}, stdout=log, stderr=log)
        os.close(lines[0])
        self._missing -= 1
        self._ranks[pid] = (rank, client)
        self._report(rank=rank, pid=pid)

    def _kill_rank_of(self, client: Any) -> None:
        for pid, (_, own) in self._ranks.items():
            if own is client:
                os.kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        while self._ranks and (found := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = found
            rank, client = self._ranks.pop(pid)
            code = os.waitstatus_to_exitcode(status)
            self._report(rank=rank, code=code, at=time.monotonic())
            with contextlib.suppress(OSError):  # it is gone as well
                client.sendall(f"{code}\n".encode())

    def _report(self, **fact: float) -> None:
        os.write(self._reports.fileno(), f"{json.dumps(fact)}\n".encode())
