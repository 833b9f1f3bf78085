"""Workers as forks of one process that has imported TensorFlow; the side of that process.

32 imports would take minutes on few cores. A fork is safe as long as TensorFlow has not run an op,
since it has no threads by then. `_forked_run.py` starts that process.

Its folder holds `addresses.json`: `[rank][other]`, where worker `rank` reaches worker `other`. Each
worker writes `rank_NN.json` and `rank_NN.log` there.
"""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf
from _local_cluster import die_with_parent

import tf_largebatch as tlb

_POLL_SECONDS = 0.05
_GRACE_SECONDS = 10.0
_LOG_LINES = 10


def read_addresses(folder: Path) -> list[list[str]]:
    """`[rank][other]`."""
    return json.loads((folder / "addresses.json").read_text())


def run_forks(folder: Path, body: Callable[[int], Any]) -> int:
    """Forks the workers, which write what `body(rank)` returns; 0 if none of them failed."""
    assert tlb.LargeBatchStrategy  # the package is lazy: imported here, once for all forks
    tf.get_logger().setLevel("WARNING")  # the end of a log is to say why its worker failed
    gc.freeze()  # else a fork copies its parent's memory at its end, to look for garbage
    addresses = read_addresses(folder)
    return _join(
        {fork_worker(folder, rank, known, body): rank for rank, known in enumerate(addresses)},
        folder,
    )


def fork_worker(
    folder: Path, rank: int, addresses: Sequence[str], body: Callable[[int], Any]
) -> int:
    """Starts a worker; its process id."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    if (prepare := die_with_parent(parent)) is not None:
        prepare()
    log = os.open(folder / f"rank_{rank:02d}.log", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    task = {"type": "worker", "index": rank}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": list(addresses)}, "task": task})
    (folder / f"rank_{rank:02d}.json").write_text(json.dumps(body(rank)))
    sys.exit(0)


def _join(rank_of: dict[int, int], folder: Path) -> int:
    """Waits for the workers; says how those ended that failed. 0 if none did."""
    failed: dict[int, int] = {}
    deadline = math.inf
    while rank_of and time.monotonic() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            time.sleep(_POLL_SECONDS)
            continue
        rank = rank_of.pop(pid)
        if status:
            failed[rank] = os.waitstatus_to_exitcode(status)
            deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    for rank, code in list(failed.items())[:1]:
        log = (folder / f"rank_{rank:02d}.log").read_text(errors="replace")
        print("\n".join(log.rstrip().splitlines()[-_LOG_LINES:]))
        print(f"worker {rank} was the first to fail, with code {code}; failed: {sorted(failed)}")
    return 1 if failed else 0
