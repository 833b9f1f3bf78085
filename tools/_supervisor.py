"""Watches the workers of a launcher: one failure ends all of them, and all are started again.

Training is synchronous: no worker can go on when one is gone, and none can join a cluster that
runs. So the workers are one gang, which is stopped and started as a whole.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from _cluster_display import ClusterDisplay
from _local_cluster import LocalCluster, Worker

WORKER_FAILED, TIMED_OUT, BROKEN_PIPE = 1, 124, 141  # exit codes; a signal's is 128 + its number
Cluster = TypeVar("Cluster", bound=LocalCluster)
_POLL_SECONDS = 0.05
_LONGEST_BACKOFF_SECONDS = 60.0
_LONG_ATTEMPT_SECONDS = 600.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SupervisorOptions:
    """When to stop workers, and when to start them again.

    Attributes:
        log_dir: of the workers' logs.
        max_restarts: how often all workers are started again after a failure.
        backoff_seconds: the wait before the first restart.
        timeout_seconds: for all attempts together; 0 is no limit.
        grace_seconds: what the others get to end by themselves when one has failed.
        terminate_seconds: from SIGTERM to SIGKILL.
        status_seconds: between status lines where standard error is no terminal; 0 is none.
    """

    log_dir: Path
    max_restarts: int = 0
    backoff_seconds: float = 1.0
    timeout_seconds: float = 0.0
    grace_seconds: float = 10.0
    terminate_seconds: float = 10.0
    status_seconds: float = 30.0


class SignalWatch:
    """Notes SIGINT, SIGTERM and SIGHUP, so that the main loop decides when to act on them."""

    def __init__(self) -> None:
        self.received: list[int] = []
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup sets it
                signal.signal(number, lambda received, _frame: self.received.append(received))


def next_backoff(previous: float | None, *, ran_seconds: float, first: float) -> float:
    """Seconds to wait before the next restart: `first`, then doubled each time up to 60.

    An attempt that ran for 10 minutes shows that the start works: the waits begin anew.

    Args:
        previous: the wait before; None if there was none.
        ran_seconds: how long the attempt ran that has failed now.
        first: the shortest wait, which may be more than 60.
    """
    if previous is None or ran_seconds >= _LONG_ATTEMPT_SECONDS:
        return first
    return max(first, min(2 * previous, _LONGEST_BACKOFF_SECONDS))


class Supervisor(Generic[Cluster]):
    """Runs the workers to their end, by as many attempts as are allowed.

    Args:
        make_cluster: a cluster that has not started yet.
        start: starts it, given the number of the restart, which is 0 at first.
        options: limits.
    """

    def __init__(
        self,
        make_cluster: Callable[[], Cluster],
        start: Callable[[Cluster, int], None],
        options: SupervisorOptions,
    ) -> None:
        self._make_cluster = make_cluster
        self._start = start
        self._options = options
        self._signals = SignalWatch()
        self._started_at = time.monotonic()
        self._failures: list[str] = []  # of each attempt, who failed first

    def run(self) -> int:
        """Returns the launcher's exit code, when nothing is left running."""
        backoff = None
        try:
            while True:
                restart = len(self._failures)
                code, ran_seconds = self._attempt(restart)
                if code != WORKER_FAILED or restart >= self._options.max_restarts:
                    return code
                backoff = next_backoff(
                    backoff, ran_seconds=ran_seconds, first=self._options.backoff_seconds
                )
                _say(f"restart {restart + 1} of {self._options.max_restarts} in {backoff:g} s")
                if (code := self._wait(backoff)) is not None:
                    return code
        except BrokenPipeError:  # as in `launch_local_cluster.py ... | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return BROKEN_PIPE

    def _attempt(self, restart: int) -> tuple[int, float]:
        """One start of all workers; its exit code, and the seconds until the first failure."""
        cluster = self._make_cluster()
        with cluster:  # also while it starts: what a failing start leaves is killed
            self._start(cluster, restart)
            display = ClusterDisplay(
                cluster,
                status_seconds=self._options.status_seconds,
                label=f"restart {restart}: " if restart else "",
            )
            name = "logs" if restart == 0 else f"logs *.restart_{restart}.log"
            display.say(
                f"{len(cluster.workers)} workers started, {name} in {self._options.log_dir}"
            )
            code = self._watch(cluster, display)
            self._stop(cluster, display)
            if code and self._signals.received:  # maybe while the others were being stopped
                code = 128 + self._signals.received[0]
            display.close()
            failed = _first_failed(cluster)
            if code == WORKER_FAILED and failed is not None:
                self._failures.append(f"worker {failed.rank} {failed.describe_exit()}")
            self._report(code, cluster, display)
            return code, failed.seconds if failed else cluster.elapsed

    def _watch(self, cluster: LocalCluster, display: ClusterDisplay) -> int:
        """Waits for the end of the workers, or for a reason to end them; the exit code."""
        failed_at = None
        while cluster.poll():
            display.update()
            if (code := self._reason_to_end()) is not None:
                return code
            failed = _first_failed(cluster)
            if failed is not None and failed_at is None:
                failed_at = cluster.elapsed
                display.say(
                    f"worker {failed.rank} {failed.describe_exit()}; "
                    f"the others get {self._options.grace_seconds:g} s to end"
                )
            if failed_at is not None and cluster.elapsed >= failed_at + self._options.grace_seconds:
                break
            time.sleep(_POLL_SECONDS)
        return 0 if _first_failed(cluster) is None else WORKER_FAILED

    def _stop(self, cluster: LocalCluster, display: ClusterDisplay) -> None:
        """SIGTERM, a wait that a further signal cuts short, SIGKILL."""
        if cluster.running:
            signals_before = len(self._signals.received)
            cluster.terminate()
            allowed = self._options.terminate_seconds + cluster.extra_terminate_seconds
            deadline = time.monotonic() + allowed
            while cluster.poll() and time.monotonic() < deadline:
                display.update()
                if len(self._signals.received) > signals_before:
                    break
                time.sleep(_POLL_SECONDS)
        cluster.kill()

    def _wait(self, seconds: float) -> int | None:
        """Waits before a restart; the exit code if there is to be none."""
        deadline = time.monotonic() + seconds
        while True:
            code = self._reason_to_end()
            if code is not None:
                cause = "the time is over" if code == TIMED_OUT else f"stopped by {_signal(code)}"
                _say(f"{cause} before restart {len(self._failures)}")
                return code
            if time.monotonic() >= deadline:
                return None
            time.sleep(_POLL_SECONDS)

    def _reason_to_end(self) -> int | None:
        if self._signals.received:
            return 128 + self._signals.received[0]
        limit = self._options.timeout_seconds
        return TIMED_OUT if limit and time.monotonic() - self._started_at >= limit else None

    def _report(self, code: int, cluster: LocalCluster, display: ClusterDisplay) -> None:
        if code == 0:
            display.say(f"all {len(cluster.workers)} workers finished in {cluster.elapsed:.1f} s")
        elif code == TIMED_OUT:
            stopped = [worker for worker in cluster.workers if worker.stopped_by_launcher]
            headline = f"not finished after {self._options.timeout_seconds:g} s, so stopped:"
            display.report(headline, show_logs_of=stopped)
        elif code != WORKER_FAILED:
            display.say(f"stopped by {_signal(code)}")
        elif (first := _first_failed(cluster)) is not None:
            gives_up = len(self._failures) > self._options.max_restarts
            headline = f"worker {first.rank} failed first; in order of exit:"
            display.report(headline, show_logs_of=[first] if gives_up else [])
            if gives_up and self._options.max_restarts:
                display.say(
                    f"given up after {self._options.max_restarts} restart(s); who failed first:"
                )
                for attempt, failure in enumerate(self._failures):
                    display.say(f"  {f'restart {attempt}' if attempt else 'start'}: {failure}")


def _first_failed(cluster: LocalCluster) -> Worker | None:
    return next((worker for worker in cluster.exited if worker.failed), None)


def _signal(code: int) -> str:
    return signal.Signals(code - 128).name


def _say(message: str) -> None:
    print(f"[launcher] {message}", file=sys.stderr, flush=True)
