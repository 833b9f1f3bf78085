"""The relay between real sockets: delay, bandwidth, content, and how connections end."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from tool_runs import load

HOST = "127.0.0.1"
DELAY_SECONDS = 0.02
SLACK_SECONDS = 0.25  # for a machine that is busy with other tests
MEGABYTE = 1_000_000
pytestmark = [pytest.mark.alone, pytest.mark.timeout(60)]

relay_module = load("_relay")


class Pair:
    """Two workers with a relay between them."""

    def __init__(
        self, stack: contextlib.ExitStack, *, delay_seconds: float = 0.0, megabits: float = 0.0
    ) -> None:
        self._stack = stack
        self._listeners = [stack.enter_context(socket.create_server((HOST, 0))) for _ in range(2)]
        addresses = [f"{HOST}:{listener.getsockname()[1]}" for listener in self._listeners]
        self.relay = stack.enter_context(
            relay_module.open_relay(
                addresses,
                one_way_delay_seconds=delay_seconds,
                bandwidth_bits_per_second=megabits * 1e6,
            )
        )
        assert [self.relay.addresses[rank][rank] for rank in range(2)] == addresses

    def connect(self, source: int = 0) -> tuple[socket.socket, socket.socket]:
        """A connection that `source` opens to the other worker: its end, the other's end."""
        near = self.dial(source)
        far, _ = self._listeners[1 - source].accept()
        self._stack.enter_context(far)
        far.settimeout(20.0)
        far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return near, far

    def dial(self, source: int = 0) -> socket.socket:
        host, port = self.relay.addresses[source][1 - source].split(":")
        near = self._stack.enter_context(socket.create_connection((host, int(port)), 20.0))
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return near

    def stop_listening(self, rank: int) -> int:
        """Returns the port at which nobody listens any more."""
        port = self._listeners[rank].getsockname()[1]
        self._listeners[rank].close()
        return port


MakePair = Callable[..., Pair]


@pytest.fixture
def make_pair() -> Iterator[MakePair]:
    with contextlib.ExitStack() as stack:
        yield lambda **settings: Pair(stack, **settings)


def receive(sock: socket.socket, num_bytes: int) -> bytes:
    parts = []
    while num_bytes and (part := sock.recv(min(num_bytes, 1 << 20))):
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)


@contextlib.contextmanager
def sending(sock: socket.socket, data: bytes) -> Iterator[None]:
    thread = threading.Thread(target=sock.sendall, args=(data,))
    thread.start()
    yield
    thread.join()


@pytest.mark.parametrize("source", [0, 1])
def test_a_round_trip_takes_two_delays(make_pair: MakePair, source: int) -> None:
    near, far = make_pair(delay_seconds=DELAY_SECONDS).connect(source)
    round_trips = []
    for _ in range(5):
        start = time.monotonic()
        near.sendall(b"ping")
        assert receive(far, 4) == b"ping"
        far.sendall(b"pong")
        assert receive(near, 4) == b"pong"
        round_trips.append(time.monotonic() - start)
    assert min(round_trips) >= 2 * DELAY_SECONDS  # never early
    assert min(round_trips) < 2 * DELAY_SECONDS + 0.01


def test_chunks_travel_together(make_pair: MakePair) -> None:
    """50 chunks, sent 2 ms apart, take 50 * 2 ms + a delay, not 50 delays (1 s)."""
    near, far = make_pair(delay_seconds=DELAY_SECONDS).connect()
    arrivals = []
    start = time.monotonic()

    def send_all() -> None:
        for number in range(50):
            near.sendall(bytes([number]))
            time.sleep(0.002)

    thread = threading.Thread(target=send_all)
    thread.start()
    for number in range(50):
        assert far.recv(1) == bytes([number])
        arrivals.append(time.monotonic() - start)
    thread.join()
    assert arrivals[0] >= DELAY_SECONDS
    assert arrivals[-1] >= 49 * 0.002 + DELAY_SECONDS
    assert arrivals[-1] < 49 * 0.002 + DELAY_SECONDS + SLACK_SECONDS


@pytest.mark.parametrize("delay_seconds", [0.0, DELAY_SECONDS])
def test_content_both_ways_at_once(make_pair: MakePair, delay_seconds: float) -> None:
    """Faster than a delay for each of its pieces: 16 MB in 256 KiB are at least 61 of them."""
    pair = make_pair(delay_seconds=delay_seconds)
    near, far = pair.connect()
    there, back = (random.Random(seed).randbytes(16 * MEGABYTE) for seed in range(2))
    received = []
    start = time.monotonic()
    with sending(near, there), sending(far, back):
        reader = threading.Thread(target=lambda: received.append(receive(near, len(back))))
        reader.start()
        received.append(receive(far, len(there)))
        reader.join()
    assert sorted(received) == sorted([there, back])
    assert delay_seconds <= time.monotonic() - start < 61 * DELAY_SECONDS


def test_a_receiver_that_does_not_read_stops_the_sender(make_pair: MakePair) -> None:
    near, far = make_pair().connect()
    data = random.Random(1).randbytes(96 * MEGABYTE)  # more than the relay and sockets hold
    with sending(near, data):
        time.sleep(0.5)
        assert receive(far, len(data)) == data


@pytest.mark.parametrize("source", [0, 1])
def test_bandwidth_of_one_connection(make_pair: MakePair, source: int) -> None:
    near, far = make_pair(megabits=80.0).connect(source)
    start = time.monotonic()
    with sending(near, bytes(5 * MEGABYTE)):
        receive(far, 5 * MEGABYTE)
    assert 0.5 <= time.monotonic() - start < 0.5 + SLACK_SECONDS  # 40 Mbit


def test_bandwidth_is_that_of_a_direction_of_a_pair(make_pair: MakePair) -> None:
    """Connections that either side opened share it; the way back has its own."""
    pair = make_pair(megabits=80.0)
    (near, far), (other_near, other_far) = pair.connect(0), pair.connect(1)
    start = time.monotonic()
    with (
        sending(near, bytes(2 * MEGABYTE)),  # from 0 to 1
        sending(other_far, bytes(2 * MEGABYTE)),  # from 0 to 1
        sending(far, bytes(4 * MEGABYTE)),  # from 1 to 0
    ):
        receive(far, 2 * MEGABYTE)
        receive(other_near, 2 * MEGABYTE)
        there_seconds = time.monotonic() - start
        receive(near, 4 * MEGABYTE)
        back_seconds = time.monotonic() - start
    assert 0.4 <= there_seconds < 0.4 + SLACK_SECONDS  # 4 MB
    assert 0.4 <= back_seconds < 0.4 + SLACK_SECONDS


def test_the_end_of_one_direction_arrives_after_its_content(make_pair: MakePair) -> None:
    near, far = make_pair(delay_seconds=DELAY_SECONDS).connect()
    start = time.monotonic()
    near.sendall(b"question")
    near.shutdown(socket.SHUT_WR)
    assert receive(far, 100) == b"question"  # up to the end
    assert time.monotonic() - start >= DELAY_SECONDS
    far.sendall(b"answer")  # the other direction is still open
    far.close()
    assert receive(near, 100) == b"answer"


def test_a_closed_peer_is_noticed_by_its_writer(make_pair: MakePair) -> None:
    near, far = make_pair(delay_seconds=DELAY_SECONDS).connect()
    far.close()
    assert near.recv(1) == b""
    with pytest.raises(ConnectionError):
        for _ in range(1000):
            near.sendall(b"into the void")
            time.sleep(0.005)


def test_a_reset_is_passed_on(make_pair: MakePair) -> None:
    near, far = make_pair(delay_seconds=DELAY_SECONDS).connect()
    near.sendall(b"never read")
    time.sleep(4 * DELAY_SECONDS)
    far.close()  # with unread content: the kernel resets the connection
    with pytest.raises(ConnectionResetError):
        near.recv(1)


def test_a_worker_that_listens_late(make_pair: MakePair) -> None:
    """A connection is cut off at once until the worker listens; then it works."""
    pair = make_pair(delay_seconds=DELAY_SECONDS)
    port = pair.stop_listening(1)
    for _ in range(3):
        start = time.monotonic()
        with contextlib.suppress(ConnectionResetError):  # at the first send, or the next
            near = pair.dial()
            near.sendall(b"hello")
            assert near.recv(1) == b""
        assert time.monotonic() - start < SLACK_SECONDS
    with socket.create_server((HOST, port)) as listener:
        near = pair.dial()
        near.sendall(b"hello")
        far, _ = listener.accept()
        with far:
            assert receive(far, 5) == b"hello"


def test_many_connections(make_pair: MakePair) -> None:
    pair = make_pair(delay_seconds=DELAY_SECONDS)
    ends = [pair.connect(source=number % 2) for number in range(200)]
    start = time.monotonic()
    for number, (near, far) in enumerate(ends):
        near.sendall(b"there %03d" % number)
        far.sendall(b"back %04d" % number)
    for number, (near, far) in enumerate(ends):
        assert receive(far, 9) == b"there %03d" % number
        assert receive(near, 9) == b"back %04d" % number
    assert time.monotonic() - start < 2.0  # 200 delays one after the other would be 4 s


def test_three_workers_have_their_own_ports_for_one_another() -> None:
    addresses = [f"{HOST}:{port}" for port in (15001, 15002, 15003)]
    with relay_module.open_relay(
        addresses, one_way_delay_seconds=0.0, bandwidth_bits_per_second=0.0
    ) as relay:
        seen = [address for row in relay.addresses for address in row]
    assert [relay.addresses[rank][rank] for rank in range(3)] == addresses
    assert len(set(seen)) == 9


def test_the_facts_of_a_relay(make_pair: MakePair) -> None:
    with contextlib.ExitStack() as stack:
        pair = Pair(stack, delay_seconds=DELAY_SECONDS)
        near, far = pair.connect()
        for _ in range(10):
            near.sendall(b"ping")
            receive(far, 4)
    facts = pair.relay.facts
    assert facts["chunks"] >= 10
    assert 0.0 <= facts["mean_late_ms"] <= facts["largest_late_ms"]
    assert 0.0 < facts["cpu_seconds"] < 1.0
