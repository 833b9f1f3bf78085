"""Ends this process if TensorFlow's server, or MPI, does not come up.

A worker may end after all have met and before TensorFlow's server has connected to it. TensorFlow
then waits for it without end, holds Python's global lock while it does, and swallows SIGTERM: no
thread of this process could act, and no signal short of SIGKILL ends it. MPI waits likewise for
ranks that do not start it. Two things need no lock: faulthandler's watchdog, which ends the
process, and a child process, which says who is absent.

The child runs this file as a script, so only the standard library is imported here.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tf_largebatch.core.topology import ClusterTopology

_PROBE_SECONDS = 1.0
_STANDARD_ERROR = 2


@contextlib.contextmanager
def end_if_server_hangs(topology: ClusterTopology, *, timeout_seconds: float) -> Iterator[None]:
    """Goes around the start of TensorFlow's server.

    If the block lasts longer than `timeout_seconds`, the text of a PeerTimeoutError that names
    the absent workers is written to standard error, and a moment later the process ends with
    return code 1, after a traceback. That is all that can be done: the block cannot be left.
    """
    if topology.num_workers == 1:
        yield
        return
    head = (
        f"TensorFlow's server of worker {topology.rank} at {topology.address} has not come up "
        f"within start_timeout_seconds={timeout_seconds:g}. It waits for all workers, of which "
    )
    with _end_after(timeout_seconds, head, topology.peers):
        yield


@contextlib.contextmanager
def end_if_mpi_hangs(
    launched: tuple[str, int, int] | None, *, timeout_seconds: float
) -> Iterator[None]:
    """Goes around the start of MPI; else as `end_if_server_hangs`.

    Args:
        launched: who started this process, of how many ranks it is one, and which; None where
            nobody else was started.
        timeout_seconds: how long the block may last.
    """
    if launched is None:
        yield
        return
    launcher, count, rank = launched
    head = (
        f"MPI of rank {rank}, one of {count} that {launcher} started, has not come up within "
        f"start_timeout_seconds={timeout_seconds:g}. It waits for all ranks to start MPI, of which "
        "it does not know who has not: see who of them stands before it makes its "
        "LargeBatchStrategy"
    )
    with _end_after(timeout_seconds, head, ()):
        yield


@contextlib.contextmanager
def _end_after(
    timeout_seconds: float, head: str, peers: tuple[tuple[int, str], ...]
) -> Iterator[None]:
    with _teller(timeout_seconds, head, peers):
        faulthandler.dump_traceback_later(
            timeout_seconds + 2 * _PROBE_SECONDS, exit=True, file=_STANDARD_ERROR
        )
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


def keep_terminate_handler() -> None:
    """Has SIGTERM do again what it did before TensorFlow's server started, which swallows it.

    Python's own notion of it, which TensorFlow does not know of; in the main thread, where alone
    Python allows it.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def _teller(
    timeout_seconds: float, head: str, peers: tuple[tuple[int, str], ...]
) -> Iterator[None]:
    task = json.dumps([timeout_seconds, head, peers])
    command = [sys.executable, "-I", "-S", __file__, task]
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE)
    except OSError:  # no interpreter to start, as in an embedded one: the watchdog alone acts
        yield
        return
    with process:  # closes its standard input, at which it ends
        yield


def tell_after(timeout_seconds: float, head: str, peers: list[tuple[int, str]]) -> None:
    """Says who is absent after `timeout_seconds`, unless standard input ends before.

    Args:
        timeout_seconds: of the wait.
        head: what has not come up; where there are peers, to be completed by who they are.
        peers: rank and address of those that can be asked.
    """
    if select.select([sys.stdin], [], [], timeout_seconds)[0]:
        return
    absent = [f"worker {rank} at {address}" for rank, address in peers if not listens(address)]
    missing = f"no longer there: {', '.join(absent)}" if absent else "all can be reached"
    print(
        f"tf_largebatch.core.errors.PeerTimeoutError: {head}{missing if peers else ''}"
        ". See their logs for why. This process ends now, as the wait cannot be interrupted.",
        file=sys.stderr,
        flush=True,
    )


def listens(address: str, *, timeout_seconds: float = _PROBE_SECONDS) -> bool:
    """Whether something accepts connections at `host:port`."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_seconds):
            return True
    except OSError:
        return False


def refuses(address: str, *, timeout_seconds: float = _PROBE_SECONDS) -> bool:
    """Whether a host answers that nobody listens at `host:port`; not, where none answers."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_seconds):
            return False
    except ConnectionRefusedError:
        return True
    except OSError:
        return False


if __name__ == "__main__":
    tell_after(*json.loads(sys.argv[1]))
