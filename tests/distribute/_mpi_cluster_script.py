"""What each of 3 ranks runs: joining the others under various environments; saves what came out."""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from _mpi_alone import save, without_tensorflow

without_tensorflow()

from tf_largebatch.core.errors import LargeBatchError  # noqa: E402
from tf_largebatch.distribute._mpi import load_mpi  # noqa: E402
from tf_largebatch.distribute._mpi_cluster import join_mpi  # noqa: E402

MPI = load_mpi(timeout_seconds=60.0)
WORLD = MPI.COMM_WORLD
RANK = WORLD.rank
NAMES = ("TF_CONFIG", "TF_LARGEBATCH_PORT", "TF_LARGEBATCH_HOST")


def joined(environment: Mapping[str, str], *, timeout_seconds: float = 10.0) -> dict[str, Any]:
    for name in NAMES:
        os.environ.pop(name, None)
    os.environ.update(environment)
    begin = time.monotonic()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            topology, comm, cores_per_rank = join_mpi(MPI, timeout_seconds=timeout_seconds)
    except LargeBatchError as error:
        seconds = time.monotonic() - begin
        return {"error": type(error).__name__, "text": str(error), "seconds": seconds}
    # In the order of the communicator, whose ranks are to be the workers'.
    order = comm.allgather((topology.rank, RANK))
    return {
        "rank": topology.rank,
        "addresses": topology.addresses,
        "order": order,
        "share_cores": cores_per_rank < 1,
        "is_own": comm.handle != WORLD.handle,
        "warnings": [str(each.message) for each in caught],
    }


def tf_config(workers: int, worker: int) -> dict[str, str]:
    addresses = [f"127.0.0.1:{14_900 + each}" for each in range(workers)]
    task = {"type": "worker", "index": worker}
    return {"TF_CONFIG": json.dumps({"cluster": {"worker": addresses}, "task": task})}


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "alone in the environment": lambda: joined({}),
    "once more": lambda: joined({}),
    "empty": lambda: joined(dict.fromkeys(NAMES, "")),
    "of TF_CONFIG": lambda: joined(tf_config(3, 2 - RANK)),
    "with ports": lambda: joined({"TF_LARGEBATCH_PORT": "21000"}),
    "with hosts": lambda: joined({"TF_LARGEBATCH_HOST": f"10.0.0.{1 + RANK}"}),
    "with IPv6": lambda: joined({"TF_LARGEBATCH_HOST": f"fd00::{1 + RANK}"}),
    "with one host": lambda: joined({"TF_LARGEBATCH_HOST": "10.0.0.9"} if RANK == 1 else {}),
    "of two workers": lambda: joined(tf_config(2, min(RANK, 1))),
    "of one TF_CONFIG": lambda: joined(tf_config(3, 0) if RANK == 0 else {}),
    "all worker 0": lambda: joined(tf_config(3, 0)),
    "said to be alone": lambda: joined({"TF_CONFIG": "{}"}),
    "a word as port": lambda: joined({"TF_LARGEBATCH_PORT": "many"}),
    "a port too high": lambda: joined({"TF_LARGEBATCH_PORT": "65534"}),
}


def main() -> None:
    results = {}
    for name, case in CASES.items():
        print(f"rank {RANK}: {name}", flush=True)
        results[name] = case()
        WORLD.Barrier()
    if RANK != 1:  # the last one, as something is left of it
        results["without one"] = joined({}, timeout_seconds=0.5)
    save(sys.argv[1], RANK, results)
    WORLD.Barrier()
    WORLD.Abort(0)


main()
