"""The thread in which buckets travel by MPI, while the program goes on.

MPI matches the collectives of a communicator by their order alone, and adds up whatever meets. So
each bucket first sends a header, some bytes on a communicator of their own, which says what is to
be summed; its values travel once all ranks have said the same. Headers start in the order in which
buckets are handed in, values in that order as well, and several may be under way.

Data moves only while MPI is asked for it. Between two questions the core is offered to whoever
needs it; or it is given up for a moment, a longer one the longer other ranks are waited for.

To wake a thread, and to be woken by it, takes longer than a small bucket travels. So a caller that
has nothing else to do drives its bucket itself, unless the thread is at it already.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt

from tf_largebatch.core.errors import LargeBatchError, MismatchError, PeerTimeoutError
from tf_largebatch.core.topology import ClusterTopology
from tf_largebatch.distribute._mpi_cluster import collect
from tf_largebatch.distribute._mpi_transfers import Transfer

# For so long after something has moved, and while values travel, MPI is asked without a pause,
# unless ranks share cores: a rank that asks all the time then keeps another one from coming.
# (Linux sleeps 50 us longer than asked.)
_EAGER_SECONDS = 0.002
_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1e-5, 1e-3
_PAUSE_OF_WAIT = 0.02  # for others, who may be late by minutes
_TELL_SECONDS = 5.0
_WATCH_SECONDS = 3.0  # which the watch over all workers has to find out more: see `_progress.py`
_TAGS = 2**14  # MPI has as many at least


@dataclass(eq=False)
class Bucket:
    """One all-reduce.

    Args:
        description: what is summed, in words.
        key: the same on all ranks, and only where the same is summed.
        start: makes its transfer, given a `tag`.
        deliver: takes None, or why the sum will never come; called once, in any thread.
    """

    description: str
    key: int
    start: Callable[..., Transfer]
    deliver: Callable[[str | None], None]
    header: npt.NDArray[np.int64] = field(init=False)
    request: Any = None  # of the header
    transfer: Transfer | None = None
    pending: list[Any] = field(default_factory=list)
    since: float = 0.0  # handed in; or its values started to travel

    def __post_init__(self) -> None:
        self.header = np.array([self.key, -self.key], np.int64)


class TransferEngine:
    """Sums buckets over the ranks of a communicator, in a thread of its own.

    Args:
        mpi: `mpi4py.MPI`.
        comm: whose ranks are the workers'; this engine's alone.
        topology: names them.
        timeout_seconds: how long the values of a bucket may travel.
        share_cores: whether there are more ranks than cores.

    Attributes:
        mpi, comm: as given.
        failure: why nothing is summed any more; None while all is well.
    """

    def __init__(
        self,
        mpi: Any,
        comm: Any,
        topology: ClusterTopology,
        *,
        timeout_seconds: float,
        share_cores: bool = False,
    ) -> None:
        self.mpi = mpi
        self.comm = comm
        self._headers = comm.Dup()
        self._topology = topology
        self._timeout_seconds = timeout_seconds
        self._share_cores = share_cores
        self._lock = threading.Lock()  # of the next four
        self._handed_in: deque[Bucket] = deque()
        self._outstanding: dict[Bucket, None] = {}  # in order
        self.failure: str | None = None
        self._is_closed = False
        self._driving = threading.Lock()  # whoever has it asks MPI; of the next four
        self._announced: deque[Bucket] = deque()
        self._travelling: list[Bucket] = []
        self._started = 0
        self._moved = 0.0  # when anything last did
        self._calls: SimpleQueue[None] = SimpleQueue()  # wake the thread
        self._thread = threading.Thread(target=self._run, daemon=True, name="tf_largebatch_mpi")
        self._thread.start()

    def submit(self, bucket: Bucket, *, linger: bool = False) -> None:
        """Hands in a bucket; all ranks must hand in the same ones in the same order.

        Args:
            bucket: what is to be summed.
            linger: whether the caller has nothing else to do, and comes back once it is summed.
        """
        with self._lock:
            failure = self.failure
            if failure is None:
                bucket.since = time.monotonic()
                self._handed_in.append(bucket)
                self._outstanding[bucket] = None
        if failure is not None:
            bucket.deliver(failure)
            return
        if linger and self._driving.acquire(blocking=False):
            try:
                while bucket in self._outstanding:
                    self._drive()
            finally:
                self._driving.release()
        if self._outstanding:
            self._calls.put(None)

    def fail(self, reason: str) -> None:
        """Ends all waits, those to come as well, with `reason`; from any thread."""
        with self._lock:
            self.failure = self.failure or reason
            reason = self.failure
            outstanding, self._outstanding = list(self._outstanding), {}
        self._calls.put(None)
        for bucket in outstanding:
            bucket.deliver(reason)

    def waiting(self) -> tuple[float, str]:
        """For how many seconds the oldest bucket has been waiting, and what it is; 0.0 for none."""
        with self._lock:
            oldest = next(iter(self._outstanding), None)
        if oldest is None:
            return 0.0, ""
        return time.monotonic() - oldest.since, oldest.description

    def close(self, *, timeout_seconds: float) -> bool:
        """Ends the thread; whether it has ended, so that MPI is left alone."""
        self._is_closed = True
        self._calls.put(None)
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while self.failure is None:
            self._calls.get()
            with self._driving:
                while self.failure is None and self._outstanding:
                    self._drive()
            if self._is_closed:
                return

    def _drive(self) -> None:
        """One round over all that is under way."""
        try:
            self._take()
            if self._announce() | self._advance():
                self._moved = time.monotonic()
            else:
                self._pause()
        except LargeBatchError as error:
            self.fail(str(error))
        except Exception as error:
            self.fail(f"MPI failed on worker {self._topology.rank}: {error}")

    def _take(self) -> None:
        """Sends the headers of what was handed in."""
        while self._handed_in and self.failure is None:
            bucket = self._handed_in.popleft()
            bucket.request = self._headers.Iallreduce(
                self.mpi.IN_PLACE, bucket.header, op=self.mpi.MAX
            )
            self._announced.append(bucket)
            self._moved = time.monotonic()

    def _announce(self) -> bool:
        """Starts the values of the buckets whose headers are there, in order; whether any are."""
        moved = False
        while self._announced and self._announced[0].request.Test():
            bucket = self._announced.popleft()
            if not bucket.header[0] == -bucket.header[1] == bucket.key:
                self._refuse(bucket)
            bucket.since = time.monotonic()
            bucket.transfer = bucket.start(tag=self._started % _TAGS)
            self._started += 1
            self._travelling.append(bucket)
            self._go_on(bucket)
            moved = True
        if self._announced and self._is_overdue(self._announced[0], _WATCH_SECONDS):
            self._name_the_late(self._announced[0])
        return moved

    def _is_overdue(self, bucket: Bucket, more_seconds: float = 0.0) -> bool:
        return time.monotonic() - bucket.since > self._timeout_seconds + more_seconds

    def _advance(self) -> bool:
        """Takes buckets further whose messages have come; whether any have."""
        moved = False
        for bucket in list(self._travelling):
            if self.mpi.Request.Testall(bucket.pending):
                self._go_on(bucket)
                moved = True
            elif self._is_overdue(bucket):
                raise LargeBatchError(
                    f"{self._name(self._topology.rank)}: the values of {bucket.description} have "
                    f"not come within timeout_seconds={self._timeout_seconds:g}, though all "
                    "workers have announced theirs. One of them hangs, or the network does."
                )
        return moved

    def _go_on(self, bucket: Bucket) -> None:
        assert bucket.transfer is not None
        bucket.pending = next(bucket.transfer, [])
        if bucket.pending:
            return
        self._travelling.remove(bucket)
        bucket.transfer = None  # and what it holds
        with self._lock:
            is_expected = self._outstanding.pop(bucket, bucket) is None
        if is_expected:
            bucket.deliver(None)

    def _pause(self) -> None:
        waited = time.monotonic() - self._moved
        if not self._share_cores and (self._travelling or waited < _EAGER_SECONDS):
            os.sched_yield()
            return
        longest = _SHORTEST_PAUSE_SECONDS if self._travelling else _LONGEST_PAUSE_SECONDS
        # Not a queue's `get` with a timeout: SimpleQueue's may overlook so short a one, and hang.
        time.sleep(min(longest, max(_SHORTEST_PAUSE_SECONDS, waited * _PAUSE_OF_WAIT)))

    def _name(self, rank: int) -> str:
        return f"worker {rank} at {self._topology.addresses[rank]}"

    def _name_the_late(self, bucket: Bucket) -> None:
        """Raises PeerTimeoutError; all who wait for this bucket come here at about this time."""
        came = collect(self.mpi, self._headers, "waits", timeout_seconds=_TELL_SECONDS)
        late = [self._name(rank) for rank in range(self.comm.size) if rank not in came]
        waited = time.monotonic() - bucket.since
        raise PeerTimeoutError(
            f"{self._name(self._topology.rank)} has waited {waited:.0f} s "
            f"(timeout_seconds={self._timeout_seconds:g}) with {bucket.description} for: "
            f"{'; '.join(late) or 'nobody, as all wait alike'}. See that worker's log for what it "
            "does: it has come to this step, but not to this bucket."
        )

    def _refuse(self, bucket: Bucket) -> None:
        """Raises MismatchError, on every rank; nothing of the bucket has travelled."""
        said = collect(self.mpi, self._headers, bucket.description, timeout_seconds=_TELL_SECONDS)
        lines = [f"  {self._name(rank)}: {said[rank]}" for rank in sorted(said)]
        raise MismatchError(
            "workers run different programs: they are about to sum different buckets:\n"
            + "\n".join(lines)
            + "\nBuild the same model, optimizer and metrics on every worker, and call fit, "
            "evaluate and strategy.reduce on all of them alike."
        )
