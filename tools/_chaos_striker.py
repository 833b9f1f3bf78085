"""Carries out what `_chaos_plan.py` has planned, on one gang after the other."""

from __future__ import annotations

import dataclasses
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence

from _chaos_gangs import Gang
from _chaos_plan import Strike

_SOON_SECONDS = 0.005  # worth waiting for
_WATCH_SECONDS = 0.0005  # between looks for a state that is being written
_LONGEST_WATCH_SECONDS = 0.3


@dataclasses.dataclass(kw_only=True)
class Blow:
    """A strike that was carried out, and what came of it.

    Attributes:
        strike: as planned.
        gang: number of the start that it fell into, from 0.
        at: when, by `time.monotonic`.
        epoch: that the furthest worker was in; None before its first batch.
        batches: that it had trained; None likewise.
        left_partial_file: whether a state was being written, and was left unfinished.
        end_seconds: until all but the victims had ended, after a TERM with these; None if the gang
            went on.
        resumed_at: the batch at which the next gang began; None if this one went on.
        codes: exit codes by rank; None if this gang went on.
    """

    strike: Strike
    gang: int
    at: float
    epoch: int | None
    batches: int | None
    left_partial_file: bool = False
    end_seconds: float | None = None
    resumed_at: int | None = None
    codes: dict[int, int] | None = None


class Striker:
    """Strikes when it is time to.

    Args:
        strikes: in order.
        end_at: by `time.monotonic`; then there are no more strikes.
        report: takes a line for each strike.

    Attributes:
        blows: what was done.
        ender: that by which the present gang may end; None without one.
    """

    def __init__(
        self, strikes: Sequence[Strike], *, end_at: float, report: Callable[[str], None]
    ) -> None:
        self.blows: list[Blow] = []
        self.ender: Blow | None = None
        self._plan = deque(strikes)
        self._end_at = end_at
        self._report = report
        self._stopped: Blow | None = None
        self._due_at: float | None = None
        self._number = -1

    @property
    def left_over(self) -> int:
        """Strikes that were not carried out."""
        return len(self._plan)

    def turn_to(self, gang: Gang) -> None:
        """From now on, strikes the next gang."""
        self._gang = gang
        self._number += 1
        self._old_files = self._temporary_files()
        self.ender = self._stopped = self._due_at = None

    def act(self, running: Sequence[int]) -> bool:
        """Strikes, or ends a stop, if it is time to; whether it was.

        Args:
            running: ranks.
        """
        if self._stopped is not None:
            return self._release(self._stopped, running)
        if self.ender is not None and not self.ender.strike.may_go_on:
            return False
        if not self._plan or time.monotonic() >= self._end_at or not self._is_due(self._plan[0]):
            return False
        self._due_at = None
        self._strike(self._plan.popleft())
        return True

    def partial_files(self) -> set[str]:
        """States that this gang is writing, or was when the writer died."""
        return self._temporary_files() - self._old_files

    def _temporary_files(self) -> set[str]:
        folder = self._gang.training.state_dir
        return {path.name for path in folder.glob(".*.tmp")} if folder.is_dir() else set()

    def _is_due(self, strike: Strike) -> bool:
        if self._due_at is None:
            begin = self._gang.started_at
            if strike.moment != "start":
                if self._gang.furthest() < strike.batch:
                    return False
                if strike.moment == "saving":
                    self._watch_for_saving()
                begin = time.monotonic()
            self._due_at = begin + strike.delay_seconds
        wait = self._due_at - time.monotonic()
        if wait > _SOON_SECONDS:
            return False
        time.sleep(max(0.0, wait))
        return True

    def _watch_for_saving(self) -> None:
        deadline = time.monotonic() + _LONGEST_WATCH_SECONDS
        while not self.partial_files() and time.monotonic() < deadline:
            time.sleep(_WATCH_SECONDS)

    def _strike(self, strike: Strike) -> None:
        self._gang.signal(signal.Signals[f"SIG{strike.signal}"], strike.victims)
        at = time.monotonic()
        found = [self._gang.progress(rank) for rank in self._gang.ranks]
        furthest = max(filter(None, found), key=lambda each: each.batches, default=None)
        blow = Blow(
            strike=strike,
            gang=self._number,
            at=at,
            epoch=furthest.epoch if furthest else None,
            batches=furthest.batches if furthest else None,
        )
        self.blows.append(blow)
        where = f"batch {blow.batches}, epoch {blow.epoch}" if furthest else "its start"
        self._report(f"gang {self._number}: {strike.describe()} at {where} ({strike.moment})")
        if strike.signal == "STOP":
            self._stopped = blow
        if strike.may_end(timeout_seconds=self._gang.training.timeout_seconds):
            self.ender = blow

    def _release(self, blow: Blow, running: Sequence[int]) -> bool:
        strike = blow.strike
        if strike.pause_seconds is None:
            is_over = set(running) <= set(strike.victims)
        else:
            is_over = time.monotonic() - blow.at >= strike.pause_seconds
        if is_over:
            wakes = strike.wakes or strike.pause_seconds is not None
            self._gang.signal(signal.SIGCONT if wakes else signal.SIGKILL, strike.victims)
            self._stopped = None
        return is_over
