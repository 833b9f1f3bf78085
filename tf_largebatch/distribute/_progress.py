"""Ends a wait that cannot end by itself, and says who is missing or who runs another program.

A collective waits for all workers. TensorFlow notices that a process is gone (its coordination
service misses the heartbeats of that task), but not that one hangs, is far behind, or came to
another collective. So each worker publishes where it stands (`_journal.Position`), and one that
has stood still for a while compares: workers that stand at equal numbers but at different
collectives run different programs; workers with lower numbers are who it waits for, in vain if
they have ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from tf_largebatch.core.topology import ClusterTopology
from tf_largebatch.distribute._journal import Position
from tf_largebatch.distribute._start_guard import refuses

_LONGEST_INTERVAL_SECONDS = 1.0
_MISMATCH_AFTER_SECONDS = 3.0
_SECONDS_PER_PEER = 0.05
_LAST_WORD_SECONDS = 1.0
NO_ERROR = "without an error"  # how a process ended that raised none
CALL_ON_ALL = (
    "all it on all workers: fit, evaluate, predict, reading a metric that trained since it was "
    "last read, strategy.reduce, gather and barrier are nothing for one worker alone, in a "
    "callback or after fit."
)


class Board(Protocol):
    """Where workers publish; TensorFlow's coordination service, or a dict in tests."""

    def publish(self, rank: int, text: str) -> None: ...

    def read(self, rank: int) -> str | None: ...


def judge(
    own: Position,
    peers: Mapping[int, Position | None],
    topology: ClusterTopology,
    *,
    stalled_seconds: float,
    timeout_seconds: float,
) -> str | None:
    """Why waiting on is of no use; or None.

    Args:
        own: where this worker has stood for `stalled_seconds`.
        peers: where the others stand, by rank; None for one that never published.
        topology: names them.
        stalled_seconds: how long `own` is unchanged.
        timeout_seconds: how long a worker may be late.
    """
    for rank, position in peers.items():
        if (
            position is not None
            and position.arrivals == own.arrivals
            and position.digest != own.digest
        ):
            return (
                "workers run different programs and came to different collectives (fingerprints "
                f"of what is exchanged):\n  worker {topology.rank} at {topology.address}, arrival "
                f"{own.arrivals}: [{own.digest}] {own.description}\n"
                f"  worker {rank} at {topology.addresses[rank]}, arrival {position.arrivals}: "
                f"[{position.digest}] {position.description}\n"
                "Build the same model, optimizer, metrics, inputs and callbacks on every worker. "
                f"What only one of them called, c{CALL_ON_ALL}"
            )
    gone = [
        (rank, position.ended)
        for rank, position in peers.items()
        if position is not None and position.ended and position.arrivals < own.arrivals
    ]
    if gone:
        ends = [
            f"worker {rank} at {topology.addresses[rank]}, which has ended {how}"
            for rank, how in gone
        ]
        has_left = any(how == NO_ERROR for _, how in gone)
        return (
            f"worker {topology.rank} at {topology.address} is at arrival {own.arrivals} "
            f"({own.description}), and would wait for ever for {'; '.join(ends)}."
            + (f" C{CALL_ON_ALL}" if has_left else "")
        )
    if stalled_seconds < timeout_seconds:
        return None
    late = [
        f"worker {rank} at {topology.addresses[rank]} "
        + ("has reached none" if position is None else f"stands at arrival {position.arrivals}")
        for rank, position in peers.items()
        if position is None or position.arrivals < own.arrivals
    ]
    if not late:
        return None
    return (
        f"worker {topology.rank} at {topology.address} has waited {stalled_seconds:.0f} s "
        f"(timeout_seconds={timeout_seconds:g}) at arrival {own.arrivals} ({own.description}) "
        f"for: {'; '.join(late)}. See that worker's log for what it does. "
        f"Unless it hangs or is cut off, c{CALL_ON_ALL}"
    )


def judge_wait(
    own: Position,
    peers: Mapping[int, Position | None],
    topology: ClusterTopology,
    *,
    waiting_for: str,
    is_gone: Callable[[str], bool],
) -> str | None:
    """Why it is of no use to wait for a bucket to travel, of which no collective tells; or None.

    Args:
        own: where this worker waits.
        peers: where the others stand, by rank; None for one that never published.
        topology: names them.
        waiting_for: the bucket, in words.
        is_gone: whether nobody serves at an address any more.
    """
    absent, has_left = [], False
    for rank, position in peers.items():
        address = topology.addresses[rank]
        if position is not None and position.arrivals > own.arrivals:
            continue
        if position is not None and position.ended:
            absent.append(f"worker {rank} at {address}, which has ended {position.ended}")
            has_left |= position.ended == NO_ERROR
        elif is_gone(address):
            absent.append(f"worker {rank} at {address}, which is gone: nobody listens there")
    if not absent:
        return None
    return (
        f"worker {topology.rank} at {topology.address} would wait for ever, with {waiting_for}, "
        f"for {'; '.join(absent)}. See the logs of those, or of what started them."
        + (f" What they did not call, c{CALL_ON_ALL}" if has_left else "")
    )


class ProgressWatch:
    """A daemon thread that publishes this worker's position and judges when it stands still."""

    def __init__(
        self,
        topology: ClusterTopology,
        *,
        position: Callable[[], Position],
        board: Board,
        abort: Callable[[str], None],
        timeout_seconds: float,
        waiting: Callable[[], tuple[float, str]] = lambda: (0.0, ""),
        is_gone: Callable[[str], bool] = refuses,
    ) -> None:
        self._waiting = waiting
        self._is_gone = is_gone
        self._topology = topology
        self._position = position
        self._board = board
        self._abort = abort
        self._timeout_seconds = timeout_seconds
        self._mismatch_after = min(_MISMATCH_AFTER_SECONDS, timeout_seconds / 2)
        self._interval = min(_LONGEST_INTERVAL_SECONDS, timeout_seconds / 5)
        # Each comparison reads all peers' positions from the chief.
        self._comparison_interval = max(self._interval, _SECONDS_PER_PEER * len(topology.peers))
        self._next_comparison = 0.0
        self._own: Position | None = None
        self._published: Position | None = None
        self._since = time.monotonic()
        self._peers: dict[int, Position | None] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="tf_largebatch_watch")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def publish_end(self, how: str) -> None:
        """Lets the others know that this process ends, for which they need not wait any more.

        Args:
            how: completes "it has ended".
        """
        self.stop()
        if self._thread.is_alive():
            self._thread.join(_LAST_WORD_SECONDS)  # it may be about to publish as well
        end = dataclasses.replace(self._position(), ended=how)
        in_time(lambda: self._board.publish(self._topology.rank, end.to_json()), _LAST_WORD_SECONDS)

    def end_of(self, rank: int) -> str:
        """How another worker said that it ended; empty if it said nothing, or cannot be asked."""
        found: list[Position | None] = []
        in_time(lambda: found.append(self._read(rank)), _LAST_WORD_SECONDS)
        return found[0].ended if found and found[0] is not None else ""

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            try:
                complaint = self.look()
            except Exception as error:  # the board is busy, or gone with the chief
                complaint = self.without_board(error)
            if complaint is not None:
                self._abort(complaint)
                return

    def look(self) -> str | None:
        """One round: publishes, compares if due, and returns what is wrong."""
        own = self._position()
        now = time.monotonic()
        if own != self._own:
            self._own, self._since, self._peers = own, now, {}
        if own != self._published:
            self._board.publish(self._topology.rank, own.to_json())
            self._published = own
            return None
        if now < max(self._since + self._mismatch_after, self._next_comparison):
            return None
        self._next_comparison = now + self._comparison_interval
        peers = {rank: self._read(rank) for rank, _ in self._topology.peers}
        # A position seen once may be passed already; only what stands still is compared.
        still = {rank: place for rank, place in peers.items() if self._peers.get(rank) == place}
        seen_before, self._peers = bool(self._peers), peers
        if not seen_before:
            return None
        complaint = judge(
            own,
            still,
            self._topology,
            stalled_seconds=now - self._since,
            timeout_seconds=self._timeout_seconds,
        )
        seconds, waiting_for = self._waiting()
        if complaint is None and seconds >= self._mismatch_after:
            complaint = judge_wait(
                own, still, self._topology, waiting_for=waiting_for, is_gone=self._is_gone
            )
        return complaint

    def without_board(self, error: Exception) -> str | None:
        """What is wrong when the board fails and this worker stands still for too long."""
        stalled_seconds = time.monotonic() - self._since
        seconds, waiting_for = self._waiting()
        if self._own is not None and seconds >= self._mismatch_after:
            chief = {0: None} if self._topology.rank else {}
            complaint = judge_wait(
                self._own, chief, self._topology, waiting_for=waiting_for, is_gone=self._is_gone
            )
            if complaint is not None:
                return complaint
        if self._own is None or stalled_seconds < self._timeout_seconds:
            return None
        return (
            f"worker {self._topology.rank} at {self._topology.address} has waited "
            f"{stalled_seconds:.0f} s (timeout_seconds={self._timeout_seconds:g}) at arrival "
            f"{self._own.arrivals} ({self._own.description}). For whom cannot be told, as the "
            f"chief, worker 0 at {self._topology.addresses[0]}, does not answer: {error}"
        )

    def _read(self, rank: int) -> Position | None:
        text = self._board.read(rank)
        return None if text is None else Position.from_json(text)


def in_time(action: Callable[[], None], seconds: float) -> None:
    """Returns when `action` has, or has failed, or after so many seconds.

    The service may be gone, or cut off, and some of its calls have no deadline.
    """

    def act() -> None:
        with contextlib.suppress(Exception):
            action()

    thread = threading.Thread(target=act, daemon=True, name="tf_largebatch_last_words")
    thread.start()
    thread.join(seconds)
