"""Says which workers are behind a TensorFlow error that ends this process.

Where a peer dies, TensorFlow's error comes at once, but names it by task number at best: "Socket
closed", "Deadline Exceeded", "/job:worker/task:1". It is raised deep within `fit`, where nobody
can add to it. But the interpreter keeps an exception that nobody caught, and runs exit handlers
after it has shown it.
"""

from __future__ import annotations

import atexit
import re
import sys
import time
from collections.abc import Callable

import tensorflow as tf

from tf_largebatch.core.topology import ClusterTopology
from tf_largebatch.distribute._start_guard import listens

_PROBE_ALL_SECONDS = 2.0
_PROBE_SECONDS = 0.5


def explain_at_exit(topology: ClusterTopology) -> None:
    """From now on, explains at exit the TensorFlow error that ends this process, if one does."""
    atexit.register(_explain, topology)


def explanation(
    error: str, topology: ClusterTopology, *, listens: Callable[[str], bool]
) -> str | None:
    """Rank and address of the peers that `error` is about, or that are gone; None without any.

    Args:
        error: the text of a TensorFlow error.
        topology: the workers; their ranks are TensorFlow's task numbers.
        listens: whether a server still listens at an address.
    """
    lines = []
    for rank, address in topology.peers:
        is_named = re.search(rf"/task:{rank}\b", error) is not None
        # The service runs in the chief, and is not always named together with its task.
        is_named = is_named or (rank == 0 and "coordination" in error.lower())
        is_there = listens(address)
        if is_named or not is_there:
            lines.append(
                f"  worker {rank} at {address}"
                + (", which the error is about," if is_named else "")
                + (" still listens" if is_there else " is gone")
            )
    if not lines:
        return None
    head = f"tf_largebatch: worker {topology.rank} at {topology.address} was ended by the error"
    return "\n".join([f"{head} above. See the logs of", *lines])


def _explain(topology: ClusterTopology) -> None:
    error = getattr(sys, "last_value", None)
    if not isinstance(error, tf.errors.OpError):
        return
    deadline = time.monotonic() + _PROBE_ALL_SECONDS

    def still_listens(address: str) -> bool:
        left = min(_PROBE_SECONDS, deadline - time.monotonic())
        return left <= 0 or listens(address, timeout_seconds=left)

    text = explanation(str(error), topology, listens=still_listens)
    if text is not None:
        print(text, file=sys.stderr, flush=True)
