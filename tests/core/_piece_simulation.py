"""A simulator of single pieces, in plain Python: the exact order in which ports take them.

What `step_simulation` is checked against; slow, for a few hosts of one rank.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Sequence

from tf_largebatch.core.collective_plan import AllReducePlan
from tf_largebatch.core.cost_model import LinkCost


class _Pieces:
    def __init__(
        self,
        plans: Sequence[AllReducePlan],
        sizes: Sequence[float],
        ready: Sequence[Sequence[float]],
        link: LinkCost,
        in_flight: int,
    ) -> None:
        self.plans, self.ready, self.link, self.in_flight = plans, ready, link, in_flight
        self.item_bytes = [size / plan.length for size, plan in zip(sizes, plans, strict=True)]
        ranks = range(plans[0].num_workers)
        self.steps = [[plan.steps_of(rank) for rank in ranks] for plan in plans]
        self.out_free, self.in_free = [0.0 for _ in ranks], [0.0 for _ in ranks]
        self.done = [[-1.0 for _ in ranks] for _ in plans]
        self.began: dict[tuple[int, int, int], float] = {}  # (bucket, rank, step)
        self.arrived: defaultdict[tuple[int, int, int], list[tuple[float, float]]] = defaultdict(
            list
        )
        self.events: list = []
        self.numbers = itertools.count()

    def push(self, seconds: float, what: str, place: tuple[int, int, int], size: float = 0.0):
        heapq.heappush(self.events, (seconds, next(self.numbers), what, place, size))

    def run(self) -> list[list[float]]:
        for rank in range(self.plans[0].num_workers):
            for bucket in range(min(self.in_flight, len(self.plans))):
                self.push(self.ready[bucket][rank], "begin", (bucket, rank, 0))
        while self.events:
            seconds, _, what, place, size = heapq.heappop(self.events)
            getattr(self, what)(seconds, place, size)
        return self.done

    def begin(self, seconds: float, place: tuple[int, int, int], _: float) -> None:
        bucket, rank, step = place
        if step == self.plans[bucket].num_steps:
            self.done[bucket][rank] = seconds
            later = bucket + self.in_flight
            if later < len(self.plans):
                self.push(max(seconds, self.ready[later][rank]), "begin", (later, rank, 0))
            return
        self.began[place] = seconds
        for piece in self.steps[bucket][rank][step].sends:
            size = (piece.end - piece.begin) * self.item_bytes[bucket]
            start = max(seconds, self.out_free[rank])
            self.out_free[rank] = start + size * self.link.seconds_per_byte
            landing = start + self.link.latency_seconds
            self.push(landing, "land", (bucket, piece.peer, step), size)
        self.end_if_complete(place)

    def land(self, seconds: float, place: tuple[int, int, int], size: float) -> None:
        rank = place[1]
        landed = max(seconds, self.in_free[rank]) + size * self.link.seconds_per_byte
        self.in_free[rank] = landed
        self.push(landed, "arrive", place, size)

    def arrive(self, seconds: float, place: tuple[int, int, int], size: float) -> None:
        self.arrived[place].append((seconds, size))
        self.end_if_complete(place)

    def end_if_complete(self, place: tuple[int, int, int]) -> None:
        bucket, rank, number = place
        step = self.steps[bucket][rank][number]
        if place not in self.began or len(self.arrived[place]) < len(step.receives):
            return
        seconds = self.began[place]
        for at, size in self.arrived[place]:
            seconds = max(seconds, at) + self.link.reduce_seconds_per_byte * size * step.reduce
        self.push(seconds, "begin", (bucket, rank, number + 1))


def done_seconds(
    plans: Sequence[AllReducePlan],
    *,
    sizes: Sequence[float],
    ready: Sequence[Sequence[float]],
    link: LinkCost,
    in_flight: int,
) -> list[list[float]]:
    """When each bucket is done on each rank, `[bucket][rank]`; `ready` likewise."""
    return _Pieces(plans, sizes, ready, link, in_flight).run()
