"""Which workers are struck when, and how: drawn at random, the same for the same seed."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

SIGNALS = ("KILL", "STOP", "TERM")
_MOMENTS = {"training": 5, "saving": 3, "start": 2}  # and how often
_SEVERAL = 0.2  # how often more than one worker is struck at once
_SHORT_PAUSE = 0.25  # at most, as a part of the strategy's timeout_seconds
# TensorFlow ends a worker of which it has no sign for 10 s, and which gives one every 5 s.
_LONGEST_SHORT_PAUSE_SECONDS = 4.0
_LONG_PAUSE = 1.5
_TRAINING_DELAY_SECONDS = 0.05  # some batches
_SAVING_DELAY_SECONDS = 0.01  # less than a state takes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Strike:
    """One blow.

    Attributes:
        moment: `"start"`, before the first batch of a gang; `"training"`; or `"saving"`, when the
            temporary file of a state is seen.
        batch: as many have been trained; 0 for a start.
        delay_seconds: after that; for a start, after the start of the workers.
        signal: a name of `SIGNALS`.
        victims: ranks.
        pause_seconds: for STOP, until they may go on; None: until all others have given up.
        wakes: for STOP without a pause: whether the victims are let go on then, to find that all
            are gone. Else they are killed.
    """

    moment: str
    batch: int
    delay_seconds: float
    signal: str
    victims: tuple[int, ...]
    pause_seconds: float | None = None
    wakes: bool = True

    def may_end(self, *, timeout_seconds: float) -> bool:
        """Whether the gang may end by it; not by a short stop."""
        short = self.pause_seconds is not None and self.pause_seconds < timeout_seconds
        return not (self.signal == "STOP" and short)

    @property
    def may_go_on(self) -> bool:
        """Whether the gang may live on after it."""
        return self.signal == "STOP" and self.pause_seconds is not None

    def describe(self) -> str:
        """`KILL 0, 2`."""
        text = f"{self.signal} {', '.join(map(str, self.victims))}"
        return text if self.pause_seconds is None else f"{text} for {self.pause_seconds:.1f} s"


def plan_strikes(
    count: int,
    *,
    signals: Sequence[str],
    workers: int,
    batches: int,
    save_every_steps: int,
    start_seconds: float,
    timeout_seconds: float,
    seed: int,
) -> list[Strike]:
    """`count` strikes in the order in which they are due.

    Those on a start stand anywhere among the others, and are due at the next start there is.

    Args:
        signals: names, each as probable as the others.
        workers: of the gang.
        batches: of the whole training.
        save_every_steps: batches between states.
        start_seconds: from the start of the workers to their first batch.
        timeout_seconds: the strategy's.
        seed: of the drawing.
    """
    draw = random.Random(seed)
    strikes = []
    for _ in range(count):
        (moment,) = draw.choices(list(_MOMENTS), list(_MOMENTS.values()))
        several = draw.random() < _SEVERAL
        victims = draw.sample(range(workers), draw.randint(2, workers) if several else 1)
        batch, delay = 0, draw.uniform(0.0, start_seconds)
        if moment == "training":
            batch = draw.randrange(1, batches)
            delay = draw.uniform(0.0, _TRAINING_DELAY_SECONDS)
        elif moment == "saving":
            last = max(1, (batches - 1) // save_every_steps)
            batch = save_every_steps * draw.randint(1, last)
            delay = draw.uniform(0.0, _SAVING_DELAY_SECONDS)
        strikes.append(
            Strike(
                moment=moment,
                batch=batch,
                delay_seconds=delay,
                victims=tuple(sorted(victims)),
                **_drawn_signal(
                    draw, signals, timeout_seconds, all_at_once=len(victims) == workers
                ),
            )
        )
    return _in_order(strikes, draw)


def _drawn_signal(
    draw: random.Random, signals: Sequence[str], timeout_seconds: float, *, all_at_once: bool
) -> dict[str, Any]:
    signal = draw.choice(list(signals))
    if signal != "STOP":
        return {"signal": signal}
    pause: float | None = draw.uniform(
        0.0, min(_SHORT_PAUSE * timeout_seconds, _LONGEST_SHORT_PAUSE_SECONDS)
    )
    if draw.random() < 0.5:
        # Where all stand still, nobody is there to give up.
        pause = _LONG_PAUSE * timeout_seconds if all_at_once else None
    return {"signal": signal, "pause_seconds": pause, "wakes": draw.random() < 0.5}


def _in_order(strikes: Sequence[Strike], draw: random.Random) -> list[Strike]:
    placed = sorted((strike for strike in strikes if strike.batch), key=lambda each: each.batch)
    for strike in strikes:
        if not strike.batch:
            placed.insert(draw.randint(0, len(placed)), strike)
    return placed
