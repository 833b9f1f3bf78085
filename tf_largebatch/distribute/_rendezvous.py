"""The workers meet before TensorFlow's server starts, with a deadline.

TensorFlow waits without end, and without saying for whom, when a worker of the cluster is absent
(tensorflow 46931, 59573). So all workers first meet at the chief's address: rank 0 listens on the
port that its TensorFlow server will use a moment later, every other worker says who it is and
what it was told, and the chief answers all of them at once: go, or what is wrong.

The port is open to whoever reaches it for that moment. A message is one short line of JSON;
anything else is dropped.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import time
from collections.abc import Container, Mapping
from typing import Any

from tf_largebatch.core.errors import (
    ConfigurationError,
    LargeBatchError,
    MismatchError,
    PeerTimeoutError,
)
from tf_largebatch.core.topology import ClusterTopology
from tf_largebatch.distribute._comparison import differences

_PROTOCOL = "tf_largebatch/1"
_LONGEST_MESSAGE_BYTES = 64 * 1024
_POLL_SECONDS = 0.1
_GRACE_SECONDS = 2.0
_SETTING_TYPES = (str, int, float, type(None))
_ERRORS: dict[str, type[LargeBatchError]] = {
    "configuration": ConfigurationError,
    "mismatch": MismatchError,
    "timeout": PeerTimeoutError,
}


def meet(topology: ClusterTopology, *, settings: Mapping[str, Any], timeout_seconds: float) -> None:
    """Returns once all workers are there and agree on `settings`; on every worker, or on none.

    Args:
        topology: the cluster; one worker returns at once.
        settings: what must be equal on all workers, as versions and options: text, numbers, None.
        timeout_seconds: how long to wait for the others.

    Raises:
        PeerTimeoutError: somebody is absent; the message names rank and address.
        MismatchError: settings differ; the message shows who has what.
        ConfigurationError: this worker's own port is in use.
    """
    if topology.num_workers == 1:
        return
    deadline = time.monotonic() + timeout_seconds
    if topology.is_chief:
        with _listen(topology) as listener:
            _Chief(topology, settings, timeout_seconds).receive(listener, deadline)
    else:
        _listen(topology).close()  # a port in use is found here rather than inside TensorFlow
        _report_to_chief(topology, settings, timeout_seconds, deadline)


def split_address(address: str) -> tuple[str, int]:
    """`host:port` or `[IPv6]:port` in two."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _listen(topology: ClusterTopology) -> socket.socket:
    assert topology.address is not None
    _, port = split_address(topology.address)
    # As TensorFlow's server: on all interfaces, since the name in TF_CONFIG may be a service's.
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, dualstack_ipv6=dual)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise ConfigurationError(
            f"Worker {topology.rank} is to serve at {topology.address}, but cannot listen on port "
            f"{port}: {reason}. End the process that holds it (`ss -ltnp`), or give this "
            "worker another free port in every worker's TF_CONFIG (under SLURM, all of them by "
            "TF_LARGEBATCH_PORT)."
        ) from error


class _Chief:
    """Collects one message from every other worker, then answers all of them."""

    def __init__(
        self, topology: ClusterTopology, settings: Mapping[str, Any], timeout_seconds: float
    ) -> None:
        self._topology = topology
        self._settings = dict(settings)
        self._timeout_seconds = timeout_seconds
        self._received: dict[socket.socket, bytes] = {}  # of each open connection
        self._arrived: dict[int, tuple[socket.socket, dict[str, Any]]] = {}
        self._replaced: dict[socket.socket, int] = {}  # a rank's connection before its newest one

    def receive(self, listener: socket.socket, deadline: float) -> None:
        listener.setblocking(False)  # who has gone again is not waited for
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as sockets:
            selector.register(listener, selectors.EVENT_READ)
            while len(self._arrived) < len(self._topology.peers) and time.monotonic() < deadline:
                for key, _ in selector.select(_POLL_SECONDS):
                    connection = key.fileobj
                    assert isinstance(connection, socket.socket)
                    if connection is listener:
                        self._accept(listener, selector, sockets)
                    elif not self._read(connection):
                        selector.unregister(connection)
                        connection.close()
            self._answer()

    def _accept(
        self,
        listener: socket.socket,
        selector: selectors.BaseSelector,
        sockets: contextlib.ExitStack,
    ) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:  # gone again
            return
        sockets.enter_context(connection)
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ)
        self._received[connection] = b""

    def _read(self, connection: socket.socket) -> bool:
        """Takes what has come; returns whether the connection is of further use."""
        try:
            chunk = connection.recv(_LONGEST_MESSAGE_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            chunk = b""
        if not chunk:
            self._forget(connection)
            return False
        if self._is_known(connection):  # it stays open, to show that the worker still waits
            return True
        received = self._received[connection] = self._received[connection] + chunk
        if b"\n" not in received:
            return len(received) < _LONGEST_MESSAGE_BYTES
        hello = _parse_hello(received, dict(self._topology.peers))
        if hello is None:
            return False
        rank, settings = hello
        if rank in self._arrived:
            # A worker that lost its connection comes again; the newest one counts.
            self._replaced[self._arrived[rank][0]] = rank
        self._arrived[rank] = (connection, settings)
        return True

    def _is_known(self, connection: socket.socket) -> bool:
        arrived = any(connection is holder for holder, _ in self._arrived.values())
        return arrived or connection in self._replaced

    def _forget(self, connection: socket.socket) -> None:
        """A worker that ends while it waits has not arrived."""
        self._replaced.pop(connection, None)
        for rank, (holder, _) in list(self._arrived.items()):
            if holder is connection:
                del self._arrived[rank]

    def _answer(self) -> None:
        error = self._complaint()
        for connection, rank in self._replaced.items():
            _send(connection, {"protocol": _PROTOCOL, "error": self._second_claim(rank)})
        for connection, _ in self._arrived.values():
            _send(connection, {"protocol": _PROTOCOL, "error": error})
        deadline = time.monotonic() + 1.0
        for connection, _ in self._arrived.values():
            # The worker closes first, so that no connection of ours lingers on the port.
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            with contextlib.suppress(OSError):
                connection.recv(1)
        if error is not None:
            raise _ERRORS[error["kind"]](error["text"])

    def _second_claim(self, rank: int) -> dict[str, str]:
        return {
            "kind": "configuration",
            "text": f"Two processes came to the chief at {self._topology.address} as worker "
            f"{rank}. Give each process a task index of its own in TF_CONFIG.",
        }

    def _complaint(self) -> dict[str, str] | None:
        absent = [peer for peer in self._topology.peers if peer[0] not in self._arrived]
        if absent:
            names = ", ".join(f"worker {rank} at {address}" for rank, address in absent)
            twice = "".join(
                f" Two processes came as worker {rank}." for rank in set(self._replaced.values())
            )
            return {
                "kind": "timeout",
                "text": f"{names} did not come to the chief at {self._topology.address}, or did "
                f"not stay, within start_timeout_seconds={self._timeout_seconds:g}.{twice} Start "
                "every worker of the cluster, check that they reach the chief's port, or raise the "
                "timeout.",
            }
        rows = [(0, self._settings)]
        rows += [(rank, settings) for rank, (_, settings) in sorted(self._arrived.items())]
        table = settings_that_differ(rows)
        return None if not table else {"kind": "mismatch", "text": table}


def settings_that_differ(rows: list[tuple[int, Mapping[str, Any]]]) -> str:
    """A text that shows, for each setting on which ranks differ, who has what; or empty."""
    return differences(rows, head="Workers must be started with the same settings")


def _report_to_chief(
    topology: ClusterTopology,
    settings: Mapping[str, Any],
    timeout_seconds: float,
    deadline: float,
) -> None:
    chief = topology.addresses[0]
    message = {"protocol": _PROTOCOL, "rank": topology.rank, "settings": dict(settings)}
    problem = "no try was made"
    while time.monotonic() < deadline:
        try:
            error = _ask(split_address(chief), message, deadline)
        except OSError as failure:  # not up yet, or cut off: come again
            problem = failure.strerror or str(failure)
            time.sleep(_POLL_SECONDS)
            continue
        if error is None:
            return
        raise _ERRORS[error["kind"]](error["text"])
    raise PeerTimeoutError(
        f"Worker {topology.rank} at {topology.address} got no answer from the chief, worker 0 at "
        f"{chief}, within start_timeout_seconds={timeout_seconds:g} (last try: {problem}). Start "
        "the chief, check that this host reaches its port, or raise the timeout."
    )


def _ask(chief: tuple[str, int], message: dict[str, Any], deadline: float) -> dict[str, str] | None:
    """The chief's answer: None for go, or what is wrong. OSError where none comes."""
    # The chief answers at its own deadline at the latest, which may lie a little after ours.
    latest = max(deadline, time.monotonic()) + _GRACE_SECONDS
    with socket.create_connection(chief, timeout=_left(latest, at_most=5.0)) as connection:
        if connection.getsockname() == connection.getpeername():
            # The kernel gave this end the chief's own port, and so connected it to itself.
            raise ConnectionRefusedError("nobody listens")
        _send(connection, message)
        received = b""
        while b"\n" not in received and len(received) < _LONGEST_MESSAGE_BYTES:
            connection.settimeout(_left(latest))
            try:
                chunk = connection.recv(_LONGEST_MESSAGE_BYTES)
            except TimeoutError as error:
                raise TimeoutError("it is up, but may itself wait for other workers") from error
            if not chunk:
                raise ConnectionError("it closed the connection")
            received += chunk
    return _parse_answer(received)


def _left(latest: float, *, at_most: float = float("inf")) -> float:
    return min(at_most, max(0.01, latest - time.monotonic()))


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # gone: its own deadline tells it
        connection.sendall(json.dumps(message).encode() + b"\n")


def _parse_hello(received: bytes, ranks: Container[int]) -> tuple[int, dict[str, Any]] | None:
    """(rank, settings), or None for anything that no worker of ours would send."""
    message = _parse(received)
    rank, settings = message.get("rank"), message.get("settings")
    if type(rank) is not int or rank not in ranks or not isinstance(settings, dict):
        return None
    if not all(isinstance(value, _SETTING_TYPES) for value in settings.values()):
        return None
    return rank, settings


def _parse_answer(received: bytes) -> dict[str, str] | None:
    message = _parse(received)
    error = message.get("error", "")
    if error is None:
        return None
    if (
        isinstance(error, dict)
        and isinstance(error.get("text"), str)
        and error.get("kind") in list(_ERRORS)
    ):
        return error
    raise ConnectionError("what answers there is no chief of this version")


def _parse(received: bytes) -> dict[str, Any]:
    """The first line as a message of ours; empty for anything else."""
    try:
        message = json.loads(received.split(b"\n", 1)[0])
    except (ValueError, RecursionError):
        return {}
    if not isinstance(message, dict) or message.get("protocol") != _PROTOCOL:
        return {}
    return message
