"""What an all-reduce plan is, and the parts that its algorithms share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.core.scaling import require_count

Algorithm = Literal["ring", "halving_doubling", "binary_blocks", "hierarchical"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements `[begin, end)` of the buffer, to or from rank `peer`."""

    peer: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Step:
    """What one rank does in one step.

    All sends read the buffer as it was when the step began; receives are applied in the given
    order. Received elements are added to the rank's own (`reduce`) or replace them.
    """

    sends: tuple[Piece, ...]
    receives: tuple[Piece, ...]
    reduce: bool


Steps = tuple[Step, ...]

IDLE = Step(sends=(), receives=(), reduce=True)


@dataclass(frozen=True, eq=False)
class AllReducePlan:
    """One all-reduce of a buffer of `length` elements on `num_workers` ranks.

    Step i of a sender pairs with step i of the receiver. Between two ranks at most one piece
    travels each way in a step, and none is empty. Every rank has `num_steps` steps; one with
    nothing to do has a step without pieces.
    """

    algorithm: Algorithm
    num_workers: int
    length: int
    num_steps: int
    make_steps: Callable[[int], Steps] = field(repr=False)

    def steps_of(self, rank: int) -> Steps:
        """The steps of `rank`, made for it alone: 1,024 workers cost no more than their steps.

        Raises:
            ConfigurationError: there is no such rank.
        """
        rank = require_count("rank", rank, minimum=0)
        if rank >= self.num_workers:
            raise ConfigurationError(
                f"rank={rank}: the plan has {self.num_workers} workers, so the last rank is "
                f"{self.num_workers - 1}."
            )
        return self.make_steps(rank)


@dataclass(frozen=True)
class Cut:
    """A buffer cut into `parts`; edge i is `length * i // parts`, rounded up to `align`."""

    length: int
    parts: int
    align: int

    def edge(self, index: int) -> int:
        """The first element of part `index`."""
        unaligned = self.length * index // self.parts
        return min(-(-unaligned // self.align) * self.align, self.length)

    def pieces(self, peer: int, first: int, last: int) -> tuple[Piece, ...]:
        """Parts `[first, last)` as a piece, or none if they are empty."""
        begin, end = self.edge(first), self.edge(last)
        return (Piece(peer, begin, end),) if begin < end else ()


def segment(position: int, halvings: int, parts: int) -> tuple[int, int]:
    """The parts that `position` holds after so many halvings.

    Bit i of the position says which half of the segment is kept in halving i, so the lowest bit
    decides on the largest halves, and the segments stand in bit-reversed order.
    """
    index = 0
    for bit in range(halvings):
        index = 2 * index + (position >> bit & 1)
    width = parts >> halvings
    return index * width, (index + 1) * width


def exchange(cut: Cut, peer: int, *, given: tuple[int, int], kept: tuple[int, int]) -> Step:
    """Sends `peer` a segment and adds another; each is given as (position, halvings)."""
    return Step(
        sends=cut.pieces(peer, *segment(*given, cut.parts)),
        receives=cut.pieces(peer, *segment(*kept, cut.parts)),
        reduce=True,
    )


def halving_steps(cut: Cut, position: int, *, halvings: int, first_rank: int = 0) -> list[Step]:
    """Reduce-scatter among the ranks from `first_rank` on; `position` counts from there."""
    peers = [position ^ (1 << bit) for bit in range(halvings)]
    return [
        exchange(cut, first_rank + peer, given=(peer, done), kept=(position, done))
        for done, peer in enumerate(peers, start=1)
    ]


def with_gather(scatter: list[Step], middle: Steps = ()) -> Steps:
    """A reduce-scatter, what comes after it, and its mirror image, the all-gather."""
    gather = tuple(Step(step.receives, step.sends, reduce=False) for step in reversed(scatter))
    return (*scatter, *middle, *gather)
