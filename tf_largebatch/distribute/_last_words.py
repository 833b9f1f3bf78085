"""What a worker says when it ends: to the others why, to people which workers an error is about.

The others of a worker that raises an error wait in a collective. That its process is gone they
hear at once, or after ten seconds, by the number of its task at best: "Socket closed",
"/job:worker/task:1 stopped sending heartbeats". So it tells them what it raised; and that it has
ended, where it has raised nothing.

Where a peer dies without a word, TensorFlow's error is raised deep within `fit`, where nobody can
add to it. But the interpreter keeps an exception that nobody caught, and runs exit handlers after
it has shown it.
"""

from __future__ import annotations

import atexit
import os
import re
import sys
import time
from collections.abc import Callable

import tensorflow as tf

from tf_largebatch.core.errors import MismatchError
from tf_largebatch.core.topology import ClusterTopology
from tf_largebatch.distribute._progress import CALL_ON_ALL, NO_ERROR, ProgressWatch, in_time
from tf_largebatch.distribute._start_guard import listens

_PROBE_ALL_SECONDS = 2.0
_PROBE_SECONDS = 0.5
_TELL_SECONDS = 2.0
_LONGEST_TEXT = 2000


def speak_at_exit(
    topology: ClusterTopology, watch: ProgressWatch, tell: Callable[[str], None]
) -> None:
    """From now on, says at exit how this process ends.

    Args:
        topology: the workers.
        watch: knows where the others read it, and how they ended.
        tell: takes what all others shall stop for.
    """
    at_exit(lambda: _speak(topology, watch, tell))


def at_exit(action: Callable[[], None]) -> None:
    """Runs `action` at the exit of this process, and not at that of a fork of it."""
    process_id = os.getpid()
    atexit.register(lambda: action() if os.getpid() == process_id else None)


def _speak(topology: ClusterTopology, watch: ProgressWatch, tell: Callable[[str], None]) -> None:
    error = getattr(sys, "last_value", None)
    watch.publish_end(how_it_ended(error))
    if must_be_told(error):
        text = f"worker {topology.rank} at {topology.address} has ended {how_it_ended(error)}"
        in_time(lambda: tell(text), _TELL_SECONDS)
    if isinstance(error, tf.errors.OpError):
        _explain(error, topology, watch)


def how_it_ended(error: BaseException | None) -> str:
    """Completes "it has ended"; `error` is what ended it."""
    if error is None:
        return NO_ERROR
    text = str(error)
    shown = text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + " ..."
    return f"with {type(error).__name__}: {shown}"


def must_be_told(error: BaseException | None) -> bool:
    """Whether other workers do not know of the error that ended this one.

    They do where they raise it too, and where it is what TensorFlow makes of another worker's end.
    """
    if error is None or isinstance(error, MismatchError):
        return False
    return not (isinstance(error, tf.errors.OpError) and "Collective ops is aborted" in str(error))


def explanation(
    error: str,
    topology: ClusterTopology,
    *,
    listens: Callable[[str], bool],
    end_of: Callable[[int], str],
) -> str | None:
    """Rank and address of the peers that `error` is about, or that are gone; None without any.

    Args:
        error: the text of a TensorFlow error.
        topology: the workers; their ranks are TensorFlow's task numbers.
        listens: whether a server still listens at an address.
        end_of: how a worker said that it ended, or an empty text.
    """
    lines, ends = [], []
    for rank, address in topology.peers:
        is_named = re.search(rf"/task:{rank}\b", error) is not None
        # The service runs in the chief, and is not always named together with its task.
        is_named = is_named or (rank == 0 and "coordination" in error.lower())
        is_there = listens(address)
        if is_named or not is_there:
            ends.append("" if is_there else end_of(rank))
            lines.append(
                f"  worker {rank} at {address}"
                + (", which the error is about," if is_named else "")
                + (" still listens" if is_there else " is gone")
                + (f"; it has ended {ends[-1]}" if ends[-1] else "")
            )
    if not lines:
        return None
    head = f"tf_largebatch: worker {topology.rank} at {topology.address} was ended by the error"
    hint = [f"What it did not call, c{CALL_ON_ALL}"] if NO_ERROR in ends else []
    return "\n".join([f"{head} above. See the logs of", *lines, *hint])


def _explain(error: tf.errors.OpError, topology: ClusterTopology, watch: ProgressWatch) -> None:
    deadline = time.monotonic() + _PROBE_ALL_SECONDS

    def still_listens(address: str) -> bool:
        left = min(_PROBE_SECONDS, deadline - time.monotonic())
        return left <= 0 or listens(address, timeout_seconds=left)

    def end_of(rank: int) -> str:
        return watch.end_of(rank) if time.monotonic() < deadline else ""

    text = explanation(str(error), topology, listens=still_listens, end_of=end_of)
    if text is not None:
        print(text, file=sys.stderr, flush=True)
