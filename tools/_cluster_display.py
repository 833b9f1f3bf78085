"""What a person sees of a local cluster: the chief's output, one status line, a report."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from _local_cluster import LocalCluster, Worker
from rich.console import Console
from rich.status import Status

_QUIET_SECONDS = 1.0  # the spinner waits for the chief to be silent this long


class LogFollower:
    """Copies what is appended to a file to standard output, byte for byte."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self.at_line_start = True
        self.last_output_at = time.monotonic()

    def read(self) -> bytes:
        return self._file.read()

    def show(self, data: bytes) -> None:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        self.at_line_start = data.endswith(b"\n")
        self.last_output_at = time.monotonic()


class ClusterDisplay:
    """Shows a running cluster: call `update` often.

    On a terminal a spinner with the state of the workers stands in the last line whenever the chief
    is silent and not within a line, so it never mixes with a progress bar. Elsewhere (a file, a
    pipe) the state is a plain line every `status_seconds`. Both go to standard error; standard
    output holds the chief's bytes alone.

    Args:
        cluster: what is shown; started.
        status_seconds: time between the plain lines; 0 is none.
        label: what state lines begin with, as which restart this is.
    """

    def __init__(self, cluster: LocalCluster, *, status_seconds: float, label: str = "") -> None:
        self._cluster = cluster
        self._label = label
        self._status_seconds = status_seconds
        self._console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        self._status: Status | None = None
        self._next_line_at = status_seconds
        self._chief = LogFollower(cluster.workers[0].log_path)

    def update(self) -> None:
        """Passes on the chief's new bytes and brings the status line up to date."""
        if data := self._chief.read():
            self._hide_status()
            self._chief.show(data)
        if self._console.is_terminal:
            silent = time.monotonic() - self._chief.last_output_at
            if self._chief.at_line_start and silent >= _QUIET_SECONDS:
                self._show_status()
        elif self._status_seconds > 0 and self._cluster.elapsed >= self._next_line_at:
            self._next_line_at = self._cluster.elapsed + self._status_seconds
            self.say(self._state())

    def close(self) -> None:
        """Shows the rest of the chief's output and takes the status line away."""
        self._hide_status()
        if data := self._chief.read():
            self._chief.show(data)
        if not self._chief.at_line_start and self._console.is_terminal:
            self._console.print()

    def say(self, message: str) -> None:
        """One line on standard error."""
        self._hide_status()
        self._console.print(f"[launcher] {message}")

    def report(self, headline: str, *, show_logs_of: Sequence[Worker]) -> None:
        """What went wrong: every exit in order of time, then the logs' last 20 lines."""
        self.say(headline)
        for worker in self._cluster.exited:
            self.say(f"  worker {worker.rank} ({worker.address}) {worker.describe_exit()}")
        for worker in show_logs_of:
            self.say(f"last lines of worker {worker.rank}, {worker.log_path}:")
            for line in worker.last_log_lines(20):
                self._console.print(f"  | {line}")

    def _state(self) -> str:
        ranks = ", ".join(str(worker.rank) for worker in self._cluster.running) or "none"
        text = f"{self._label}{self._cluster.elapsed:.0f} s elapsed; running workers: {ranks}"
        exits = [f"worker {w.rank} {w.describe_exit()}" for w in self._cluster.exited]
        return "; ".join([text, *exits])

    def _show_status(self) -> None:
        if self._status is None:
            self._status = self._console.status("")
            self._status.start()
        self._status.update(self._state())

    def _hide_status(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
