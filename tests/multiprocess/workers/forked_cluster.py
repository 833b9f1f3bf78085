"""Workers as forks of one process that has imported TensorFlow: a cluster starts at once.

A test of a failure needs a cluster of its own, as nothing works in it afterwards, and importing
TensorFlow in each of dozens of processes would take minutes. A fork is safe as long as TensorFlow
has not run an op, since it has no threads by then. Each fork then lives and ends as any process:
with its own log, and through the interpreter's exit.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from _worker_main import fork

_POLL_SECONDS = 0.02
_RELAY = Path(__file__).parents[3] / "tools" / "_relay.py"


class Cluster:
    """Workers that run `body(rank)`; an exception ends one with return code 1.

    Args:
        body: what each worker runs; what it prints is its log.
        num_workers: workers in TF_CONFIG.
        addresses: theirs; on free ports of this host by default.
        ranks: those that are started; all by default.
        env: more environment variables, one mapping a rank.
    """

    def __init__(
        self,
        body: Callable[[int], Any],
        *,
        num_workers: int = 2,
        addresses: Sequence[str] = (),
        ranks: Sequence[int] | None = None,
        env: Sequence[Mapping[str, str]] = (),
    ) -> None:
        self.addresses = list(addresses) or [
            f"127.0.0.1:{port}" for port in _free_ports(num_workers)
        ]
        self.started = time.monotonic()
        self.pids: dict[int, int] = {}
        self._logs: dict[int, IO[bytes]] = {}
        self._ends: dict[int, tuple[int, float]] = {}
        for rank in range(num_workers) if ranks is None else ranks:
            # No context manager: a fork would leave it too.
            self._logs[rank] = tempfile.TemporaryFile()  # noqa: SIM115
            self._fork(rank, body, env[rank] if env else {})

    def _fork(self, rank: int, body: Callable[[int], Any], env: Mapping[str, str]) -> None:
        cluster = {"worker": self.addresses}
        task = {"type": "worker", "index": rank}
        log = self._logs[rank].fileno()
        self.pids[rank] = fork(
            lambda: body(rank),
            seed=rank,
            env={"TF_CONFIG": json.dumps({"cluster": cluster, "task": task}), **env},
            stdout=log,
            stderr=log,
        )

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Sends a signal, unless the worker has ended."""
        if self.is_running(rank):
            os.kill(self.pids[rank], number)

    def is_running(self, rank: int) -> bool:
        if rank not in self._ends:
            pid, status = os.waitpid(self.pids[rank], os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                self._ends[rank] = (code, time.monotonic())
        return rank not in self._ends

    def log(self, rank: int) -> str:
        path = f"/proc/self/fd/{self._logs[rank].fileno()}"
        return Path(path).read_text(errors="replace")  # not `read`: forks share the position

    def wait_for(self, rank: int, text: str, timeout_seconds: float = 30.0) -> None:
        """Returns once the worker has printed `text`."""
        deadline = time.monotonic() + timeout_seconds
        while text not in self.log(rank):
            if time.monotonic() >= deadline or not self.is_running(rank):
                raise AssertionError(f"worker {rank} did not print {text!r}:\n{self.log(rank)}")
            time.sleep(_POLL_SECONDS)

    def wait_until_ended(self, rank: int, timeout_seconds: float = 45.0) -> None:
        """Returns once the worker has ended, or the time is over."""
        deadline = time.monotonic() + timeout_seconds
        while self.is_running(rank) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def join(
        self, timeout_seconds: float = 45.0, *, since: float | None = None
    ) -> dict[int, dict[str, Any]]:
        """How each worker ended: return code (None: it had to be killed), seconds, log.

        Args:
            timeout_seconds: then what still runs is killed.
            since: the `time.monotonic()` that seconds are counted from; default the start.
        """
        deadline = time.monotonic() + timeout_seconds
        while any([self.is_running(rank) for rank in self.pids]) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        hung = [rank for rank in self.pids if self.is_running(rank)]
        for rank in hung:
            self._logs[rank].flush()
            self.kill(rank, signal.SIGUSR1)  # writes its stacks to the log
        time.sleep(0.2 if hung else 0.0)
        self.close()
        origin = self.started if since is None else since
        return {
            rank: {
                "address": self.addresses[rank],
                "returncode": None if rank in hung else code,
                "seconds": end - origin,
                "log": self.log(rank),
            }
            for rank, (code, end) in sorted(self._ends.items())
        }

    def close(self) -> None:
        """Kills what still runs."""
        for rank in self.pids:
            self.kill(rank)
            while self.is_running(rank):
                time.sleep(_POLL_SECONDS)


class RelayedCluster(Cluster):
    """A cluster one worker of which reaches the others, and they it, through `relay`.

    A relay that is stopped is a network that passes nothing on; one that is killed resets all
    connections.

    Args:
        body, num_workers: as for `Cluster`.
        relayed: the rank.
    """

    def __init__(self, body: Callable[[int], Any], *, num_workers: int, relayed: int) -> None:
        addresses = [f"127.0.0.1:{port}" for port in _free_ports(num_workers)]
        settings = json.dumps([addresses, 0.0, 0.0])
        self.relay = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_RELAY), settings],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.relay.stdout is not None
        through = json.loads(self.relay.stdout.readline())  # [rank][other]
        env = []
        for rank in range(num_workers):
            known = [
                through[rank][other] if relayed in (rank, other) else addresses[other]
                for other in range(num_workers)
            ]
            task = {"type": "worker", "index": rank}
            env.append({"TF_CONFIG": json.dumps({"cluster": {"worker": known}, "task": task})})
        super().__init__(body, num_workers=num_workers, addresses=addresses, env=env)

    def close(self) -> None:
        super().close()
        self.relay.kill()
        self.relay.wait()


def _free_ports(count: int) -> list[int]:
    """Different free ports below the range that the kernel takes for outgoing connections."""
    ports: list[int] = []
    with contextlib.ExitStack() as held:
        while len(ports) < count:
            sock = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                sock.bind(("127.0.0.1", random.randrange(15000, 25000)))
                ports.append(sock.getsockname()[1])
    return ports
