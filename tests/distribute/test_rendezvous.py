"""The meeting of all workers, over real sockets, with a thread for each worker."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_largebatch.core.errors import ConfigurationError, MismatchError, PeerTimeoutError
from tf_largebatch.core.topology import ClusterTopology
from tf_largebatch.distribute import _rendezvous
from tf_largebatch.distribute._rendezvous import meet, settings_that_differ, split_address

pytestmark = pytest.mark.timeout(60)
SETTINGS = {"tensorflow": "2.21.0", "timeout_seconds": 600.0}
PROTOCOL = _rendezvous._PROTOCOL


def free_addresses(count: int, host: str = "127.0.0.1") -> tuple[str, ...]:
    """Below the range of outgoing ports, which a worker that dials could be given otherwise."""
    addresses: list[str] = []
    with contextlib.ExitStack() as held:
        while len(addresses) < count:
            port = random.SystemRandom().randrange(15000, 25000)
            with contextlib.suppress(OSError):
                held.enter_context(socket.create_server(("", port)))
                addresses.append(f"{host}:{port}")
    return tuple(addresses)


def topology_of(addresses: Sequence[str], rank: int) -> ClusterTopology:
    return ClusterTopology(
        addresses=tuple(addresses), rank=rank, task_type="worker", task_index=rank
    )


class Meeting:
    """Workers in threads; `errors` and `seconds` by rank once they have ended."""

    def __init__(self, addresses: Sequence[str], timeout_seconds: float = 10.0) -> None:
        self.addresses = addresses
        self.errors: dict[int, Exception | None] = {}
        self.seconds: dict[int, float] = {}
        self._timeout_seconds = timeout_seconds
        self._threads: list[threading.Thread] = []

    def start(
        self, *ranks: int, settings: Mapping[str, Any] = SETTINGS, delay: float = 0.0
    ) -> Meeting:
        for rank in ranks:
            thread = threading.Thread(target=self._run, args=(rank, settings, delay), daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    def _run(self, rank: int, settings: Mapping[str, Any], delay: float) -> None:
        time.sleep(delay)
        begin = time.monotonic()
        error: Exception | None = None
        try:
            meet(
                topology_of(self.addresses, rank),
                settings=settings,
                timeout_seconds=self._timeout_seconds,
            )
        except Exception as caught:
            error = caught
        self.seconds[rank] = time.monotonic() - begin
        self.errors[rank] = error

    def end(self) -> dict[int, Exception | None]:
        for thread in self._threads:
            thread.join(30.0)
            assert not thread.is_alive()
        return dict(sorted(self.errors.items()))


def dial(address: str, timeout_seconds: float = 5.0) -> socket.socket:
    """A connection to a chief that may not listen yet."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            return socket.create_connection(split_address(address), timeout=timeout_seconds)
        except OSError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.01)


def hello(rank: Any = 1, settings: Any = SETTINGS, **more: Any) -> bytes:
    return json.dumps({"protocol": PROTOCOL, "rank": rank, "settings": settings, **more}).encode()


def test_one_worker_needs_nobody() -> None:
    meet(ClusterTopology(), settings=SETTINGS, timeout_seconds=0.0)


@pytest.mark.parametrize("num_workers", [2, 3, 12])
def test_all_meet(num_workers: int) -> None:
    meeting = Meeting(free_addresses(num_workers)).start(*range(num_workers))
    assert meeting.end() == dict.fromkeys(range(num_workers))


@pytest.mark.parametrize("late", [0, 1, 2])
def test_whoever_comes_last_is_waited_for(late: int) -> None:
    meeting = Meeting(free_addresses(3)).start(*{0, 1, 2} - {late}).start(late, delay=0.5)
    assert meeting.end() == {0: None, 1: None, 2: None}
    assert all(meeting.seconds[rank] > 0.4 for rank in {0, 1, 2} - {late})


def test_they_meet_again_on_the_same_ports() -> None:
    addresses = free_addresses(3)
    for _ in range(3):
        assert Meeting(addresses).start(0, 1, 2).end() == {0: None, 1: None, 2: None}
        # As TensorFlow's server does next.
        for address in addresses:
            socket.create_server(split_address(address)).close()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this host has no IPv6")
def test_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this host has no IPv6 loopback")
    assert Meeting(free_addresses(2, "[::1]")).start(0, 1).end() == {0: None, 1: None}


def test_a_name_of_the_host() -> None:
    assert Meeting(free_addresses(2, "localhost")).start(0, 1).end() == {0: None, 1: None}


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("10.0.0.1:2222", ("10.0.0.1", 2222)),
        ("worker-0.example:80", ("worker-0.example", 80)),
        ("[::1]:2222", ("::1", 2222)),
    ],
)
def test_split_address(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts


# --- Somebody is absent


def test_absent_workers_are_named_to_all_who_are_there() -> None:
    addresses = free_addresses(4)
    meeting = Meeting(addresses, timeout_seconds=1.0).start(0, 2)
    for error in meeting.end().values():
        assert isinstance(error, PeerTimeoutError)
        assert f"worker 1 at {addresses[1]}, worker 3 at {addresses[3]} did not come" in str(error)
        assert "start_timeout_seconds=1" in str(error)
        assert f"worker 2 at {addresses[2]}" not in str(error)
    assert all(0.9 < seconds < 3.5 for seconds in meeting.seconds.values())


def test_an_absent_chief_is_named() -> None:
    addresses = free_addresses(3)
    meeting = Meeting(addresses, timeout_seconds=1.0).start(1, 2)
    for rank, error in meeting.end().items():
        assert isinstance(error, PeerTimeoutError)
        assert f"Worker {rank} at {addresses[rank]} got no answer" in str(error)
        assert f"the chief, worker 0 at {addresses[0]}" in str(error)
        assert "Connection refused" in str(error)
    assert all(0.9 < seconds < 3.5 for seconds in meeting.seconds.values())


def test_a_worker_tells_a_chief_that_waits_from_one_that_is_absent() -> None:
    addresses = free_addresses(3)
    late_chief = Meeting(addresses, timeout_seconds=3.2).start(0, delay=0.3)
    error = Meeting(addresses, timeout_seconds=0.5).start(1).end()[1]
    assert isinstance(error, PeerTimeoutError)
    assert "may itself wait for other workers" in str(error)
    assert "did not come" in str(late_chief.end()[0])


def test_a_worker_that_ends_while_it_waits_has_not_come() -> None:
    addresses = free_addresses(3)
    meeting = Meeting(addresses, timeout_seconds=1.5).start(0)
    with dial(addresses[0]) as connection:
        connection.sendall(hello(rank=1) + b"\n")
        time.sleep(0.3)
    meeting.start(2)
    error = meeting.end()[0]
    assert isinstance(error, PeerTimeoutError)
    assert f"worker 1 at {addresses[1]} did not come" in str(error)


# --- Settings differ


def test_all_see_the_table_of_settings_that_differ() -> None:
    meeting = Meeting(free_addresses(3)).start(0, 2, settings={"a": 1, "b": "x", "c": 2.5})
    meeting.start(1, settings={"a": 1, "b": "y", "d": None})
    errors = meeting.end()
    assert {type(error) for error in errors.values()} == {MismatchError}
    (text,) = {str(error) for error in errors.values()}
    assert text.splitlines()[1:] == [
        '  b: "x" on workers 0, 2; "y" on worker 1',
        "  c: 2.5 on workers 0, 2; null on worker 1",
    ]
    assert all(seconds < 5.0 for seconds in meeting.seconds.values())


def test_equal_settings_make_no_table() -> None:
    assert settings_that_differ([(0, SETTINGS), (1, dict(reversed(SETTINGS.items())))]) == ""


# --- Ports


@pytest.mark.parametrize("rank", [0, 1])
def test_a_port_in_use_is_named(rank: int) -> None:
    addresses = free_addresses(2)
    with socket.create_server(("", split_address(addresses[rank])[1])):
        error = Meeting(addresses, timeout_seconds=5.0).start(rank).end()[rank]
    assert isinstance(error, ConfigurationError)
    assert str(error).startswith(f"Worker {rank} is to serve at {addresses[rank]}")
    assert ": Address already in use. End the process" in str(error)


# --- Others at the chief's port


@contextlib.contextmanager
def chief_between(strangers: Callable[[str], Any]) -> Iterator[None]:
    """Worker 1 comes after `strangers` did what they do, and still meets the chief."""
    addresses = free_addresses(2)
    meeting = Meeting(addresses).start(0)
    yield strangers(addresses[0])
    assert meeting.start(1).end() == {0: None, 1: None}


def send_and_leave(data: bytes) -> Callable[[str], None]:
    def stranger(address: str) -> None:
        with dial(address) as connection, contextlib.suppress(OSError):
            connection.sendall(data)

    return stranger


DEEP = b"[" * 60_000
HOSTILE = {
    "nothing": b"",
    "empty line": b"\n",
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "TLS": bytes.fromhex("16030100a1010000"),
    "no end of line": b"x" * 1000,
    "too long": b"x" * 200_000 + b"\n",
    "no UTF-8": b"\xff\xfe\xff\n",
    "a number": b"1\n",
    "a list": b"[]\n",
    "other protocol": json.dumps({"protocol": "other", "rank": 1, "settings": {}}).encode() + b"\n",
    "protocol is a list": json.dumps({"protocol": [PROTOCOL], "rank": 1}).encode() + b"\n",
    "deep": DEEP + b"\n",
    "deep settings": hello()[:-1] + b', "more": ' + DEEP[:30_000] + b"\n",
    "no rank": json.dumps({"protocol": PROTOCOL, "settings": {}}).encode() + b"\n",
    "no settings": json.dumps({"protocol": PROTOCOL, "rank": 1}).encode() + b"\n",
    **{
        f"rank {rank!r}": hello(rank=rank) + b"\n"
        for rank in (True, -1, 0, 2, 1.0, "1", None, [1], {"1": 1}, 10**30)
    },
    **{
        f"settings {settings!r}": hello(settings=settings) + b"\n"
        for settings in (None, 1, "x", [], [["a", 1]], {"a": [1]}, {"a": {"b": 1}})
    },
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_what_no_worker_sends_is_ignored(data: bytes) -> None:
    with chief_between(send_and_leave(data)):
        pass


def test_connections_that_say_nothing_and_stay_are_ignored() -> None:
    def open_some(address: str) -> list[socket.socket]:
        connections = [dial(address) for _ in range(20)]
        connections[0].sendall(hello()[:10])  # half a message
        connections[1].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connections[1].close()  # a reset
        return connections

    kept: list[socket.socket] = []
    with chief_between(lambda address: kept.extend(open_some(address))):
        pass
    for connection in kept:
        connection.close()


def test_a_message_in_pieces_is_one_message() -> None:
    addresses = free_addresses(2)
    meeting = Meeting(addresses).start(0)
    with dial(addresses[0]) as connection:
        message = hello() + b"\n"
        for begin in range(0, len(message), 10):
            connection.sendall(message[begin : begin + 10])
            time.sleep(0.005)
        assert json.loads(connection.recv(1000)) == {"protocol": PROTOCOL, "error": None}
    assert meeting.end() == {0: None}


def test_a_worker_that_comes_twice_counts_once_and_the_newest_is_answered() -> None:
    addresses = free_addresses(3)
    meeting = Meeting(addresses).start(0)
    first, second = dial(addresses[0]), dial(addresses[0])
    with first, second:
        first.sendall(hello(settings={"old": 1}) + b"\n")
        time.sleep(0.3)
        second.sendall(hello() + b"\n")
        time.sleep(0.3)
        assert 0 not in meeting.errors  # still waits for worker 2
        meeting.start(2)
        assert json.loads(second.recv(1000))["error"] is None
        told = json.loads(first.recv(1000))["error"]
        assert told["kind"] == "configuration"
        assert "Two processes came to the chief" in told["text"]
        assert "as worker 1" in told["text"]
    assert meeting.end() == {0: None, 2: None}


def test_two_processes_of_one_rank_are_told() -> None:
    addresses = free_addresses(3)
    first = Meeting(addresses, timeout_seconds=1.5).start(0, 1)
    second = Meeting(addresses, timeout_seconds=1.5).start(1, delay=0.5)
    chief = first.end()[0]
    assert isinstance(chief, PeerTimeoutError)
    assert f"worker 2 at {addresses[2]} did not come" in str(chief)
    assert "Two processes came as worker 1" in str(chief)
    assert isinstance(first.errors[1], ConfigurationError)
    assert isinstance(second.end()[1], PeerTimeoutError)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.binary(max_size=200), max_size=5))
def test_any_bytes_are_a_hello_or_none(chunks: list[bytes]) -> None:
    hellos = _rendezvous._parse_hello(b"\n".join(chunks), {1, 2})
    assert hellos is None  # random bytes never hold the protocol's name


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@settings(deadline=None, max_examples=50)
@given(rank=JSON, options=JSON | st.dictionaries(st.text(max_size=5), JSON))
def test_any_json_is_a_hello_of_a_known_rank_or_none(rank: Any, options: Any) -> None:
    parsed = _rendezvous._parse_hello(hello(rank=rank, settings=options) + b"\n", {1, 2})
    if parsed is not None:
        assert type(parsed[0]) is int and parsed[0] in (1, 2)
        shown = settings_that_differ([(0, {}), parsed])
        assert all(f"  {name}: " in shown for name, value in parsed[1].items() if value is not None)


# --- Others at the address of the chief


def serve_once(address: str, answer: bytes) -> threading.Thread:
    listener = socket.create_server(("", split_address(address)[1]))

    def run() -> None:
        with listener:
            while True:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(10_000)
                    connection.sendall(answer)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"x" * 100_000,
        hello() + b"\n",  # a worker's own words, as from an echo server
        *(
            json.dumps({"protocol": PROTOCOL, "error": error}).encode() + b"\n"
            for error in ("text", {}, {"kind": "no such", "text": ""}, {"kind": [], "text": ""})
        ),
    ],
)
def test_an_answer_that_is_no_chiefs_is_no_go(answer: bytes) -> None:
    addresses = free_addresses(2)
    serve_once(addresses[0], answer)
    meeting = Meeting(addresses, timeout_seconds=0.5).start(1)
    error = meeting.end()[1]
    assert isinstance(error, PeerTimeoutError)
    assert "last try: " in str(error) and "Connection refused" not in str(error)
    assert meeting.seconds[1] < 3.5
