"""Waits for the workers of a benchmark's run."""

from __future__ import annotations

import time

from _local_cluster import LocalCluster

_POLL_SECONDS = 0.1
_GRACE_SECONDS = 10.0
_LOG_LINES = 10


def wait_for_workers(cluster: LocalCluster, *, timeout_seconds: float) -> str | None:
    """Waits for all workers to exit; returns what went wrong, with the end of a log.

    Args:
        cluster: started; whoever still runs afterwards is left to it.
        timeout_seconds: from its start. Once a worker has failed, the others get 10 seconds.
    """
    failed_at = None
    while cluster.poll():
        if cluster.elapsed >= timeout_seconds:
            return f"not finished after {timeout_seconds:g} s"
        if failed_at is None and any(worker.failed for worker in cluster.exited):
            failed_at = cluster.elapsed
        if failed_at is not None and cluster.elapsed >= failed_at + _GRACE_SECONDS:
            break
        time.sleep(_POLL_SECONDS)
    for worker in cluster.exited:
        if worker.failed:
            lines = "\n".join(worker.last_log_lines(_LOG_LINES))
            return f"worker {worker.rank} {worker.describe_exit()}:\n{lines}"
    return None
