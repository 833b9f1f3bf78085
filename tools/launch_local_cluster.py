"""Runs one command as several workers on this machine, each with its own TF_CONFIG.

    python tools/launch_local_cluster.py --workers=4 -- python examples/train.py --epochs=8

Every worker gets TF_CONFIG (all workers as 127.0.0.1:port, its own index), inherits the rest of the
environment (CUDA_VISIBLE_DEVICES is left alone), and, unless they are already set,
TF_NUM_INTRAOP_THREADS and OMP_NUM_THREADS = max(1, cores // workers), so that the workers together
do not start more compute threads than there are cores. With --replicas_per_worker above 1,
TF_LARGEBATCH_CPU_REPLICAS tells `LargeBatchStrategy` how many logical CPU devices to use.

The output of worker 0, the chief, is shown as it comes; each worker's output, standard error
included, is in DIR/worker_NN.log. When a worker fails the others get --grace_seconds to end by
themselves, then SIGTERM, then SIGKILL. Nothing is left running at the end;
only when the launcher itself is killed by SIGKILL, children of the workers may outlive them.

Exit code: 0 when every worker exited with 0; 1 when one failed; 2 for a wrong command line; 124
after --timeout_seconds; 130 after Ctrl-C (128 + the signal's number).
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from _cluster_display import ClusterDisplay
from _local_cluster import TERMINATE_SECONDS, LocalCluster
from absl import app, flags

_WORKERS = flags.DEFINE_integer("workers", 2, "Number of worker processes.", lower_bound=1)
_REPLICAS = flags.DEFINE_integer(
    "replicas_per_worker", 1, "Logical CPU replicas in each worker.", lower_bound=1
)
_LOG_DIR = flags.DEFINE_string(
    "log_dir",
    None,
    "Folder for the logs; default: a new one.",
    allow_override=True,  # absl.logging has a flag of this name for its own files
)
_TIMEOUT = flags.DEFINE_float(
    "timeout_seconds", 0.0, "Stop all workers after this time; 0 is no limit.", lower_bound=0.0
)
_GRACE = flags.DEFINE_float(
    "grace_seconds", 10.0, "What the others get to end when one has failed.", lower_bound=0.0
)
_STATUS = flags.DEFINE_float(
    "status_seconds",
    30.0,
    "Time between status lines where standard error is no terminal; 0 is none.",
    lower_bound=0.0,
)
_POLL_SECONDS = 0.05
_USAGE_ERROR, _WORKER_FAILED, _TIMED_OUT, _BROKEN_PIPE = 2, 1, 124, 141


class SignalWatch:
    """Notes SIGINT, SIGTERM and SIGHUP, so that the main loop decides when to act on them."""

    def __init__(self) -> None:
        self.received: list[int] = []
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup sets it
                signal.signal(number, lambda received, _frame: self.received.append(received))


def _supervise(cluster: LocalCluster, display: ClusterDisplay, signals: SignalWatch) -> int:
    """Waits for the end of the cluster, or for a reason to end it; returns the exit code."""
    failed_at = None
    while cluster.poll():
        display.update()
        if signals.received:
            return 128 + signals.received[0]
        if _TIMEOUT.value and cluster.elapsed >= _TIMEOUT.value:
            return _TIMED_OUT
        failed = [worker for worker in cluster.exited if worker.failed]
        if failed and failed_at is None:
            failed_at = cluster.elapsed
            display.say(
                f"worker {failed[0].rank} {failed[0].describe_exit()}; "
                f"the others get {_GRACE.value:g} s to end"
            )
        if failed_at is not None and cluster.elapsed >= failed_at + _GRACE.value:
            break
        time.sleep(_POLL_SECONDS)
    return _WORKER_FAILED if any(worker.failed for worker in cluster.exited) else 0


def _stop(cluster: LocalCluster, display: ClusterDisplay, signals: SignalWatch) -> None:
    """SIGTERM, a wait that a further signal cuts short, SIGKILL."""
    if cluster.running:
        signals_before = len(signals.received)
        cluster.terminate()
        deadline = time.monotonic() + TERMINATE_SECONDS
        while cluster.poll() and time.monotonic() < deadline:
            display.update()
            if len(signals.received) > signals_before:
                break
            time.sleep(_POLL_SECONDS)
    cluster.kill()


def _report(exit_code: int, cluster: LocalCluster, display: ClusterDisplay) -> None:
    if exit_code == 0:
        display.say(f"all {len(cluster.workers)} workers finished in {cluster.elapsed:.1f} s")
    elif exit_code == _WORKER_FAILED:
        first = next(worker for worker in cluster.exited if worker.failed)
        headline = f"worker {first.rank} failed first; in order of exit:"
        display.report(headline, show_logs_of=[first])
    elif exit_code == _TIMED_OUT:
        stopped = [worker for worker in cluster.workers if worker.stopped_by_launcher]
        headline = f"not finished after {_TIMEOUT.value:g} s, so stopped:"
        display.report(headline, show_logs_of=stopped)
    else:
        display.say(f"stopped by {signal.Signals(exit_code - 128).name}")


def _launch(command: Sequence[str], log_dir: Path) -> int:
    signals = SignalWatch()
    with LocalCluster() as cluster:
        cluster.start(
            command,
            num_workers=_WORKERS.value,
            replicas_per_worker=_REPLICAS.value,
            log_dir=log_dir,
        )
        display = ClusterDisplay(cluster, status_seconds=_STATUS.value)
        display.say(f"{_WORKERS.value} workers started, logs in {log_dir}")
        try:
            exit_code = _supervise(cluster, display, signals)
            _stop(cluster, display, signals)
            display.close()
        except BrokenPipeError:  # as in `launch_local_cluster.py ... | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return _BROKEN_PIPE
        _report(exit_code, cluster, display)
    return exit_code


def main(argv: Sequence[str]) -> int:
    command = list(argv[1:])
    if not command:
        print("No command given. Put it after --, as in: -- python train.py", file=sys.stderr)
        return _USAGE_ERROR
    if shutil.which(command[0]) is None:
        print(
            f"Command {command[0]!r} is neither an executable file nor found on PATH.",
            file=sys.stderr,
        )
        return _USAGE_ERROR
    log_dir = Path(_LOG_DIR.value or tempfile.mkdtemp(prefix="tf_largebatch_logs_"))
    log_dir.mkdir(parents=True, exist_ok=True)
    return _launch(command, log_dir)


def _parse_flags(argv: Sequence[str]) -> list[str]:
    flags.FLAGS.set_gnu_getopt(False)  # flags after the command belong to the command
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        print(f"{error}\nSee --help.", file=sys.stderr)
        sys.exit(_USAGE_ERROR)


if __name__ == "__main__":
    app.run(main, flags_parser=_parse_flags)
