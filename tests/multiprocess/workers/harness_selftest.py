"""Cases for the tests of the harness; no TensorFlow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import numpy as np


def setup() -> int:
    return json.loads(os.environ["TF_CONFIG"])["task"]["index"]


def case_rank(rank: int) -> dict[str, object]:
    return {"rank": rank, "array": np.arange(3, dtype=np.float32) / 3, "pair": (1, None)}


def case_environment(rank: int) -> dict[str, str]:
    names = ("TF_CONFIG", "TF_LARGEBATCH_CPU_REPLICAS", "CUDA_VISIBLE_DEVICES", "EXTRA")
    return {name: os.environ[name] for name in names if name in os.environ}


def case_raises_on_rank_1(rank: int) -> int:
    if rank == 1:
        raise ValueError("rank 1 does not like this")
    return rank


def case_not_plain(rank: int) -> object:
    return object()


def hang_with_grandchild(rank: int) -> None:
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    print(f"grandchild {child.pid} end", flush=True)
    print("rank", rank, "hangs", file=sys.stderr, flush=True)
    time.sleep(60)


def crash_on_rank_1(rank: int) -> None:
    if rank == 1:
        print("about to crash", flush=True)
        os._exit(3)
    time.sleep(60)


def crash_alone(rank: int) -> None:
    if rank == 1:
        os._exit(3)


def leave_an_orphan(rank: int) -> int:
    """Its parent is gone when the launch ends, and it has left the session of the worker."""
    script = "sleep 60 >/dev/null 2>&1 & echo $!"
    done = subprocess.run(
        ["sh", "-c", script], start_new_session=True, capture_output=True, check=True
    )
    return int(done.stdout)
