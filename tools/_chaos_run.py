"""Runs a training to its end, gang after gang, while its workers are struck down."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from _chaos_gangs import Gang, Nursery
from _chaos_plan import Strike
from _chaos_settings import Training
from _chaos_striker import Blow, Striker

_POLL_SECONDS = 0.004


class RunFailed(Exception):
    """The training has not come to its end; the message says why, with the ends of the logs."""

    def __init__(self, message: str, blows: Sequence[Blow]) -> None:
        super().__init__(message)
        self.blows = list(blows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """A training that has come to its end.

    Attributes:
        training: what was trained.
        folder: of the last gang.
        results: of its workers, by rank.
        seconds: from the first start to the last end.
        start_seconds: from the first start to the first batch.
        batches: of the whole run.
        gangs: how many starts it took.
        blows: what was done to it.
        left_over: strikes that it did not live to see.
    """

    training: Training
    folder: Path
    results: list[dict[str, Any]]
    seconds: float
    start_seconds: float
    batches: int
    gangs: int
    blows: list[Blow]
    left_over: int


class StruckRun:
    """One training.

    Args:
        nursery: open.
        training: what is trained; its folder must not exist.
        folder: of the gangs' folders.
        strikes: in order.
        hang_seconds: without any sign of life; then it has failed.
        strike_seconds: after which there are no more strikes.
        report: takes a line for each thing that happens.
    """

    def __init__(
        self,
        nursery: Nursery,
        training: Training,
        folder: Path,
        *,
        strikes: Sequence[Strike] = (),
        hang_seconds: float,
        strike_seconds: float = float("inf"),
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._nursery = nursery
        self._training = training
        self._folder = folder
        self._hang_seconds = hang_seconds
        self._report = report
        self._started_at = time.monotonic()
        self._striker = Striker(strikes, end_at=self._started_at + strike_seconds, report=report)
        self._start_seconds: float | None = None
        self._batches = 0

    def run(self) -> Outcome:
        """To the end.

        Raises:
            RunFailed: a worker ends though nothing was done to it, or nothing moves any more.
        """
        Path(self._training.run_dir).mkdir(parents=True)
        number = 0
        while True:  # each new gang needs a blow that ended the one before
            folder = self._folder / f"gang_{number:02d}"
            with Gang(self._nursery, self._training, folder) as gang:
                self._striker.turn_to(gang)
                self._live(gang, number)
                if self._is_finished(gang, number):
                    return Outcome(
                        training=self._training,
                        folder=folder,
                        results=gang.results(),
                        seconds=time.monotonic() - self._started_at,
                        start_seconds=self._start_seconds or 0.0,
                        batches=self._batches,
                        gangs=number + 1,
                        blows=self._striker.blows,
                        left_over=self._striker.left_over,
                    )
            number += 1

    def _live(self, gang: Gang, number: int) -> None:
        """One gang from its start to its end."""
        moved_at, seen = time.monotonic(), None
        while running := gang.poll():
            now_seen = [*map(gang.progress, gang.ranks), len(running)]
            self._note_progress(gang, number)
            acted = self._striker.act(running)
            if now_seen != seen or acted:
                seen, moved_at = now_seen, time.monotonic()
            elif time.monotonic() - moved_at >= self._hang_seconds:
                raise self._hang(gang, number, running)
            time.sleep(_POLL_SECONDS)

    def _note_progress(self, gang: Gang, number: int) -> None:
        known = [progress for progress in map(gang.progress, gang.ranks) if progress]
        if not known:
            return
        if self._start_seconds is None:
            self._start_seconds = time.monotonic() - self._started_at
        self._batches = max(self._batches, *(progress.batches for progress in known))
        for blow in reversed(self._striker.blows):
            if blow.gang == number or blow.resumed_at is not None:
                break
            blow.resumed_at = known[0].first

    def _hang(self, gang: Gang, number: int, running: Sequence[int]) -> RunFailed:
        gang.write_stacks()
        logs = "\n".join(map(gang.log_end, running))
        return RunFailed(
            f"hang: nothing moved for {self._hang_seconds:g} s in gang {number}; workers "
            f"{list(running)} still run, with these stacks at the ends of their logs:\n{logs}",
            self._striker.blows,
        )

    def _is_finished(self, gang: Gang, number: int) -> bool:
        """Whether the end of this gang is that of the training; notes who brought it about."""
        codes = {rank: gang.ends[rank].code for rank in gang.ranks}
        if not any(codes.values()):
            return True
        ender = self._striker.ender
        if ender is None:
            raise self._unprovoked(gang, number, codes)
        struck = ender.strike.victims if ender.strike.signal != "TERM" else ()
        ends = [gang.ends[rank].at for rank in gang.ranks if rank not in struck]
        ender.codes = codes
        ender.end_seconds = max(ends) - ender.at if ends else 0.0
        ender.left_partial_file = bool(self._striker.partial_files())
        self._report(f"gang {number}: ended {ender.end_seconds:.1f} s later")
        return False

    def _unprovoked(self, gang: Gang, number: int, codes: dict[int, int]) -> RunFailed:
        failed = [rank for rank in gang.ranks if codes[rank]]
        first = min(failed, key=lambda rank: gang.ends[rank].at)
        blows = [blow for blow in self._striker.blows if blow.gang == number]
        what = f"only {blows[-1].strike.describe()}" if blows else "nothing"
        return RunFailed(
            f"worker {first} of gang {number} ended with code {codes[first]}, though {what} was "
            f"done to it; codes: {codes}\n{gang.log_end(first)}",
            self._striker.blows,
        )
