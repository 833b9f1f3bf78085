"""A slow network between workers of one machine: delays and limits what they send one another.

Each worker is told other addresses of its peers than they listen on: ports of the relay, one for
each ordered pair of workers, so that the relay knows who talks to whom. It runs as a process of
its own, `python _relay.py SETTINGS`, with a single thread; see `open_relay`.

What a worker sends leaves `one_way_delay` later, however much is on the way, so throughput does
not fall with the delay. Each pair of workers has a link of its own in each direction, which carries
`bandwidth`: of all connections of the pair together. The relay itself adds about 0.1 ms. Setting
up a connection takes no time. One to a worker that does not listen is reset at once, which is as
near as a relay comes to refusing it. A peer that resets one takes with it what is on the way.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import heapq
import itertools
import json
import resource
import select
import selectors
import socket
import struct
import subprocess
import sys
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

HOST = "127.0.0.1"
_LARGEST_CHUNK_BYTES = 256 * 1024
_SMALLEST_CHUNK_BYTES = 4 * 1024
_CHUNK_SECONDS = 0.001  # of a limited link: what arrives as one piece
_MOST_QUEUED_BYTES = 64 * 1024 * 1024  # of one direction; then its sender has to wait
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing drops what is unsent and tells the peer


@dataclass
class Relay:
    """A running relay.

    Args:
        addresses: `[rank][other]`: the address at which worker `rank` reaches worker `other`; its
            own is the real one.
        facts: once it has ended: `cpu_seconds`, `chunks`, and `mean_late_ms` and `largest_late_ms`,
            how long after their time chunks were passed on, as relay or receiver were busy.
    """

    addresses: list[list[str]]
    facts: dict[str, float] = field(default_factory=dict)


@contextlib.contextmanager
def open_relay(
    addresses: Sequence[str], *, one_way_delay_seconds: float, bandwidth_bits_per_second: float
) -> Iterator[Relay]:
    """Runs a relay between the workers at `addresses`, until the block ends.

    Args:
        addresses: `host:port` of each worker, in rank order; nobody needs to listen there yet.
        one_way_delay_seconds: from a worker to another.
        bandwidth_bits_per_second: of each pair in each direction; 0 is without limit.
    """
    settings = [list(addresses), one_way_delay_seconds, bandwidth_bits_per_second / 8]
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, json.dumps(settings)],
        stdin=subprocess.PIPE,  # at whose end the relay ends, also if this process is killed
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C in the terminal is for the caller
    )
    assert process.stdin is not None and process.stdout is not None
    with process:
        first_line = process.stdout.readline()
        if not first_line:
            raise RuntimeError("The relay did not start; its traceback is above.")
        relay = Relay(json.loads(first_line))
        try:
            yield relay
        finally:
            process.stdin.close()
            relay.facts.update(json.loads(process.stdout.readline() or "{}"))


class _Link:
    """One direction between two workers: when a chunk that comes now reaches the other end."""

    def __init__(self, delay_seconds: float, bytes_per_second: float) -> None:
        self._delay_seconds = delay_seconds
        self._seconds_per_byte = 1.0 / bytes_per_second if bytes_per_second else 0.0
        self._free_at = 0.0

    def due(self, now: float, num_bytes: int) -> float:
        self._free_at = max(now, self._free_at) + num_bytes * self._seconds_per_byte
        return self._free_at + self._delay_seconds


class _Flow:
    """What one socket of a connection sends to the other."""

    def __init__(self, source: socket.socket, sink: socket.socket, link: _Link) -> None:
        self.source, self.sink, self.link = source, sink, link
        self.back = self  # the other direction, once there is one
        self.events = 0  # what the source is watched for
        self.chunks: deque[tuple[float, memoryview]] = deque()  # due, bytes; none: the end
        self.queued_bytes = 0
        self.has_ended = False  # nothing comes from the source any more
        self.is_delivered = False  # and the sink was told
        self.sink_is_full = False
        self.is_closed = False

    @property
    def reads(self) -> bool:
        return not self.has_ended and self.queued_bytes < _MOST_QUEUED_BYTES


class _Loop:
    """Waits for sockets and for chunks that are due."""

    def __init__(self, delay_seconds: float, bytes_per_second: float) -> None:
        a_while_bytes = int(bytes_per_second * _CHUNK_SECONDS) or _LARGEST_CHUNK_BYTES
        chunk_bytes = min(max(a_while_bytes, _SMALLEST_CHUNK_BYTES), _LARGEST_CHUNK_BYTES)
        # Once for all: a new one for each `recv` costs more than all else that is done.
        self._buffer = memoryview(bytearray(chunk_bytes))
        self._links: defaultdict[tuple[int, int], _Link] = defaultdict(
            lambda: _Link(delay_seconds, bytes_per_second)
        )
        self._selector = selectors.DefaultSelector()
        self._due: list[tuple[float, int, _Flow]] = []  # a heap of the flows' first chunks
        self._numbers = itertools.count()  # flows themselves have no order
        self.chunks, self.late_seconds, self.largest_late_seconds = 0, 0.0, 0.0

    def listen(self, source: int, target: int, address: str) -> str:
        """Opens the port at which worker `source` finds worker `target`; returns its address."""
        listener = socket.create_server((HOST, 0), backlog=128)
        listener.setblocking(False)
        there, back = self._links[source, target], self._links[target, source]
        accept = functools.partial(self._accept, listener, there, back, address)
        self._selector.register(listener, selectors.EVENT_READ, accept)
        return "{}:{}".format(*listener.getsockname())

    def run(self, until_readable: int) -> None:
        """Relays until something can be read from this file, or it ends."""
        self._selector.register(until_readable, selectors.EVENT_READ, None)
        while True:
            wait_seconds = max(0.0, self._due[0][0] - time.monotonic()) if self._due else None
            # Selectors wait for whole milliseconds; select() does not, and one is enough for all.
            if select.select([self._selector], [], [], wait_seconds)[0]:
                for key, events in self._selector.select(0):
                    if key.data is None:
                        return
                    key.data(events)
            self._pass_on_what_is_due()

    def _accept(
        self, listener: socket.socket, there: _Link, back: _Link, address: str, _: int
    ) -> None:
        try:
            client, _ = listener.accept()
        except (BlockingIOError, ConnectionError):  # gone again
            return
        server = socket.socket()
        for end in (client, server):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        flow, flow_back = _Flow(client, server, there), _Flow(server, client, back)
        flow.back, flow_back.back = flow_back, flow
        host, _, port = address.rpartition(":")
        if server.connect_ex((host, int(port))) not in (0, errno.EINPROGRESS):
            return self._reset(flow)
        # Nothing is read before the worker has taken the connection; then there is room to write.
        self._set_events(flow_back, selectors.EVENT_WRITE)

    def _watch(self, flow: _Flow) -> None:
        """Waits for what the flow from this source, and the one to it, need now."""
        events = selectors.EVENT_READ if flow.reads else 0
        self._set_events(flow, events | (selectors.EVENT_WRITE if flow.back.sink_is_full else 0))

    def _set_events(self, flow: _Flow, events: int) -> None:
        before, flow.events = flow.events, events
        if events == before:
            return
        if not events:
            self._selector.unregister(flow.source)
            return
        change = self._selector.modify if before else self._selector.register
        change(flow.source, events, functools.partial(self._ready, flow))

    def _ready(self, flow: _Flow, events: int) -> None:
        if events & selectors.EVENT_WRITE and not flow.is_closed:
            if flow.source.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):  # refused, or cut off
                return self._reset(flow)
            flow.back.sink_is_full = False
            self._send(flow.back)
        if events & selectors.EVENT_READ and not flow.is_closed:
            self._receive(flow)

    def _receive(self, flow: _Flow) -> None:
        try:
            num_bytes = flow.source.recv_into(self._buffer)
        except OSError:
            return self._reset(flow)
        flow.has_ended = not num_bytes
        flow.queued_bytes += num_bytes
        content = memoryview(bytes(self._buffer[:num_bytes]))
        flow.chunks.append((flow.link.due(time.monotonic(), num_bytes), content))
        if len(flow.chunks) == 1:
            self._schedule(flow)
        if not flow.reads:
            self._watch(flow)

    def _schedule(self, flow: _Flow) -> None:
        heapq.heappush(self._due, (flow.chunks[0][0], next(self._numbers), flow))

    def _pass_on_what_is_due(self) -> None:
        while self._due and self._due[0][0] <= time.monotonic():
            _, _, flow = heapq.heappop(self._due)
            if not flow.is_closed:
                self._send(flow)

    def _send(self, flow: _Flow) -> None:
        """Passes on all that is due, as far as the sink takes it."""
        try:
            while flow.chunks and not flow.sink_is_full:
                due, chunk = flow.chunks[0]
                late_seconds = time.monotonic() - due
                if late_seconds < 0.0:
                    self._schedule(flow)
                    break
                if not self._send_first(flow, chunk):
                    break
                self.chunks += 1
                self.late_seconds += late_seconds
                self.largest_late_seconds = max(self.largest_late_seconds, late_seconds)
        except OSError:
            return self._reset(flow)
        if flow.is_delivered and flow.back.is_delivered:
            return self._close(flow)
        self._watch(flow)
        self._watch(flow.back)

    def _send_first(self, flow: _Flow, chunk: memoryview) -> bool:
        """Sends the first chunk; whether all of it has gone."""
        if not chunk:
            flow.sink.shutdown(socket.SHUT_WR)
            flow.is_delivered = True
        else:
            try:
                sent = flow.sink.send(chunk)
            except BlockingIOError:
                sent = 0
            flow.queued_bytes -= sent
            if sent < len(chunk):
                flow.chunks[0] = (flow.chunks[0][0], chunk[sent:])
                flow.sink_is_full = True
                return False
        flow.chunks.popleft()
        return True

    def _reset(self, flow: _Flow) -> None:
        """One side is gone or was never there: the other is told."""
        for end in (flow.source, flow.sink):
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._close(flow)

    def _close(self, flow: _Flow) -> None:
        for half in (flow, flow.back):
            half.is_closed = True
            self._set_events(half, 0)
            half.source.close()


def _main(addresses: list[str], delay_seconds: float, bytes_per_second: float) -> dict[str, float]:
    # Two files a connection and one a pair of workers soon exceed the usual 1024.
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    loop = _Loop(delay_seconds, bytes_per_second)
    seen = [
        [
            address if source == target else loop.listen(source, target, address)
            for target, address in enumerate(addresses)
        ]
        for source in range(len(addresses))
    ]
    print(json.dumps(seen), flush=True)
    loop.run(until_readable=sys.stdin.fileno())
    return {
        "cpu_seconds": time.process_time(),
        "chunks": loop.chunks,
        "mean_late_ms": 1000.0 * loop.late_seconds / max(1, loop.chunks),
        "largest_late_ms": 1000.0 * loop.largest_late_seconds,
    }


if __name__ == "__main__":
    print(json.dumps(_main(*json.loads(sys.argv[1]))), flush=True)
