"""Gangs of workers that can be struck: the side of whoever strikes; see `_chaos_worker.py`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from _chaos_settings import Progress, Training, progress_path
from _local_cluster import HOST, LocalCluster, pick_ports

_PROGRAM = Path(__file__).with_name("_chaos_worker.py")
_START_SECONDS = 120.0  # of an import of TensorFlow on a busy machine
_KILL_SECONDS = 30.0
_STACK_SECONDS = 0.5
_POLL_SECONDS = 0.005
_LOG_LINES = 40


@dataclasses.dataclass(frozen=True)
class End:
    """How a worker ended, and when, by `time.monotonic`."""

    code: int
    at: float


class Nursery(LocalCluster):
    """The process that gangs are forks of; a context manager that leaves no process behind."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._log = folder / "nursery.log"
        self._read_to = 0

    def open(self) -> None:
        """Starts it, and waits until it can start gangs.

        Raises:
            RuntimeError: it cannot.
        """
        worker = self._start_worker(
            HOST, [sys.executable, str(_PROGRAM)], os.environ, self._log, stdin=subprocess.PIPE
        )
        self._orders = worker.process.stdin
        deadline = time.monotonic() + _START_SECONDS
        while not any("ready" in fact for fact in self.facts()):
            if time.monotonic() >= deadline:
                raise RuntimeError(f"TensorFlow was not imported within {_START_SECONDS:g} s")
            time.sleep(_POLL_SECONDS)

    def order(self, **order: Any) -> None:
        """See `_chaos_worker.py`."""
        with contextlib.suppress(BrokenPipeError):  # `facts` says that it has ended, and how
            self._orders.write(json.dumps(order).encode() + b"\n")
            self._orders.flush()

    def facts(self) -> list[dict[str, Any]]:
        """What it has said since the last call.

        Raises:
            RuntimeError: it has ended.
        """
        if not self.poll():
            (worker,) = self.workers
            log = "\n".join(worker.last_log_lines(_LOG_LINES))
            raise RuntimeError(f"the process of all workers {worker.describe_exit()}\n{log}")
        with self._log.open("rb") as file:
            file.seek(self._read_to)
            text = file.read().rpartition(b"\n")[0]
        self._read_to += len(text) + bool(text)
        return [json.loads(line) for line in text.splitlines() if line.startswith(b"{")]


class Gang:
    """The workers of one start of a training; a context manager that ends them.

    Args:
        nursery: open.
        training: what they train.
        folder: of their logs and results; is made.
        ranks: those that are started; all by default.
    """

    def __init__(
        self,
        nursery: Nursery,
        training: Training,
        folder: Path,
        *,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self.folder = folder
        self.training = training
        self.ranks = list(range(training.workers)) if ranks is None else list(ranks)
        self.ends: dict[int, End] = {}
        self.addresses = [f"{HOST}:{port}" for port in pick_ports(training.workers)]
        self._nursery = nursery
        folder.mkdir(parents=True)
        self.started_at = time.monotonic()
        nursery.order(
            start={
                "folder": str(folder),
                "addresses": self.addresses,
                "ranks": self.ranks,
                "training": training.to_dict(),
            }
        )

    def __enter__(self) -> Gang:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.signal(signal.SIGKILL, self.ranks)
        deadline = time.monotonic() + _KILL_SECONDS
        while self.poll() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def poll(self) -> list[int]:
        """The ranks that still run."""
        for fact in self._nursery.facts():
            if fact.get("gang") == str(self.folder) and "code" in fact:
                self.ends[fact["rank"]] = End(fact["code"], fact["at"])
        return [rank for rank in self.ranks if rank not in self.ends]

    def signal(self, number: int, ranks: Collection[int]) -> None:
        """Sends a signal to those of `ranks` that still run."""
        self._nursery.order(signal=int(number), ranks=list(ranks))

    def progress(self, rank: int) -> Progress | None:
        return Progress.read(progress_path(self.folder, rank))

    def furthest(self) -> int:
        """The batches of the worker that has come furthest; -1 where none trains yet."""
        found = [self.progress(rank) for rank in self.ranks]
        return max((progress.batches for progress in found if progress), default=-1)

    def results(self) -> list[dict[str, Any]]:
        """What the workers handed back, all of which have ended well."""
        return [
            json.loads((self.folder / f"rank_{rank:02d}.json").read_text()) for rank in self.ranks
        ]

    def log(self, rank: int) -> str:
        path = self.folder / f"rank_{rank:02d}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def log_end(self, rank: int) -> str:
        lines = self.log(rank).rstrip().splitlines()[-_LOG_LINES:]
        return "\n".join(f"  {rank} | {line}" for line in lines)

    def write_stacks(self) -> None:
        """Lets all that run write into their logs where their threads are."""
        running = self.poll()
        self.signal(signal.SIGCONT, running)
        self.signal(signal.SIGUSR1, running)
        time.sleep(_STACK_SECONDS)
