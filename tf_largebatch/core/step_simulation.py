"""Simulates a training step on many hosts: backward, buckets, all-reduce plans, shared links.

The events are the steps of the buckets' plans, all ranks of a step at once, so that 4,096 hosts
take seconds. What is modelled:

- Each host computes in a time of its own (`host_factors`); a bucket can start on a host when the
  host's backward has made its gradients and the bucket `max_buckets_in_flight` before it is done
  there. No host waits for others but for their data.
- A host's network card sends one piece at a time and receives one at a time, of all buckets and
  all ranks of the host, in the order in which events come. A piece leaves for
  `bytes * seconds_per_byte`, and is there `latency_seconds` later; where the receiving card is busy
  it waits in the network. Ranks of a host reach one another by ports of their own.
- Received pieces are added one after another, which delays nothing but the bucket's next step.
- Where a plan is between hosts and each has several replicas, the sums inside a host come before
  and after it, by one port a host.

With one bucket, or one at a time, and even hosts it takes what `cost_model` says of the ring and of
powers of two. For other plans it may be less, as ranks wait for data and not for one another.

What is not modelled: switches and cables in common (each card has the whole network to itself),
losses, reading of data, and the processor time that communication takes from backward. Where
several buckets travel and hosts are uneven, or fold a surplus, a card's pieces may go in another
order than they come: an event takes its place in the queues of all its ranks when the last of them
is ready. Against a simulation of single pieces, on up to 12 hosts, the last bucket is done 9 %
earlier to 6 % later, and on average within 0.2 % (tests/core/test_step_simulation.py).

Against recorded runs on two cores with emulated delay (tests/core/test_recorded_runs.py), costs
being fitted to 4 workers without delay: buckets of a network's gradients on 4 and 8 workers within
10 %, and whole steps of 8 within 7 % where the processor time of communication is added to
computing; single buffers on 8, 16 and 32 workers up to 22, 19 and 36 % low, as processes that crowd
two cores cost each other more than in proportion.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tf_largebatch.core.cost_model import LinkCost
from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.core.scaling import require_count, require_number
from tf_largebatch.core.transfer_rounds import Round, Schedule

Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class SimulatedBucket:
    """A bucket of gradients and how it is summed.

    Args:
        size_bytes: on the wire.
        ready_seconds: after the step's start, when backward has made its gradients, on a host
            whose factor is 1.
        schedule: of its all-reduce plan; all buckets' must be of the same ranks and hosts.
        enter_seconds: before the plan, for sums inside a host.
        leave_seconds: after it.
    """

    size_bytes: float
    ready_seconds: float
    schedule: Schedule
    enter_seconds: float = 0.0
    leave_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("size_bytes", "ready_seconds", "enter_seconds", "leave_seconds"):
            require_number(name, getattr(self, name), may_equal_minimum=True)


@dataclass(frozen=True, eq=False)
class SimulatedStep:
    """What a step took.

    Attributes:
        step_seconds: until the last host is done.
        compute_seconds: what the slowest host computes.
        bucket_seconds: `[bucket]`, when each is done on the last rank.
        host_seconds: `[host]`, when each host is done.
    """

    step_seconds: float
    compute_seconds: float
    bucket_seconds: Seconds
    host_seconds: Seconds

    @property
    def exposed_seconds(self) -> float:
        """What the step takes beyond the slowest host's computing."""
        return self.step_seconds - self.compute_seconds


def simulate_step(
    buckets: Sequence[SimulatedBucket],
    *,
    between: LinkCost,
    inside: LinkCost | None = None,
    max_buckets_in_flight: int,
    backward_end_seconds: float,
    after_seconds: float = 0.0,
    host_factors: Seconds | None = None,
) -> SimulatedStep:
    """Runs one step, in which all hosts start at the same time.

    Args:
        buckets: in the order in which they start, one or more.
        between: links between hosts.
        inside: between ranks of a host; needed where schedules have several ranks a host.
        max_buckets_in_flight: a bucket waits for the one this many before it.
        backward_end_seconds: when a host whose factor is 1 is through with backward.
        after_seconds: what it computes once all gradients are summed.
        host_factors: `[host]`, what each host's computing takes, relative; None is 1 for all.

    Raises:
        ConfigurationError: there is no bucket, a number is out of range, buckets differ in ranks
            or hosts, factors do not fit them, or `inside` is missing.
    """
    in_flight = require_count("max_buckets_in_flight", max_buckets_in_flight)
    backward = require_number("backward_end_seconds", backward_end_seconds, may_equal_minimum=True)
    after = require_number("after_seconds", after_seconds, may_equal_minimum=True)
    ranks, hosts = _shape_of(buckets, inside)
    factors = _checked_factors(host_factors, hosts)
    host_of = np.arange(ranks) // (ranks // hosts)  # [rank]
    run = _Run(buckets, in_flight, between, inside or between, factors[host_of], host_of)
    done = run.to_the_end()  # [bucket, rank]
    summed = done.max(axis=0).reshape(hosts, -1).max(axis=1)  # [host]
    host_seconds = np.maximum(summed, backward * factors) + after * factors
    return SimulatedStep(
        step_seconds=float(host_seconds.max()),
        compute_seconds=float((backward + after) * factors.max()),
        bucket_seconds=done.max(axis=1),
        host_seconds=host_seconds,
    )


def _shape_of(buckets: Sequence[SimulatedBucket], inside: LinkCost | None) -> tuple[int, int]:
    shapes = {(bucket.schedule.num_ranks, bucket.schedule.num_hosts) for bucket in buckets}
    if len(shapes) != 1:
        raise ConfigurationError(
            f"buckets are of (ranks, hosts) {sorted(shapes)}: must be one or more, all of the same."
        )
    ((ranks, hosts),) = shapes
    if ranks > hosts and inside is None:
        raise ConfigurationError(
            f"inside=None: {ranks} ranks on {hosts} hosts need the cost of links inside a host."
        )
    return ranks, hosts


def _checked_factors(host_factors: Seconds | None, hosts: int) -> Seconds:
    if host_factors is None:
        return np.ones(hosts)
    factors = np.asarray(host_factors, dtype=np.float64)
    if factors.shape != (hosts,) or not np.all((factors > 0) & np.isfinite(factors)):
        raise ConfigurationError(
            f"host_factors of shape {factors.shape}: must be {hosts} finite numbers above 0, one "
            "a host."
        )
    return factors


class _Run:
    """The state of one step: who is where, and when each port is free."""

    def __init__(
        self,
        buckets: Sequence[SimulatedBucket],
        in_flight: int,
        between: LinkCost,
        inside: LinkCost,
        rank_factors: Seconds,
        host_of: npt.NDArray[np.intp],
    ) -> None:
        self._buckets, self._in_flight = buckets, in_flight
        self._between, self._inside = between, inside
        self._factors, self._host_of = rank_factors, host_of
        ranks, hosts = len(rank_factors), int(host_of[-1]) + 1
        self._out_free = np.zeros(hosts + ranks)
        self._in_free = np.zeros(hosts + ranks)
        self._sums_free = np.zeros(ranks)  # of the port by which a host sums inside
        self._at = [np.zeros(0) for _ in buckets]  # [bucket][rank], when its last event ended
        self._events: list[tuple[float, int, int]] = []  # a heap of (seconds, bucket, step)

    def to_the_end(self) -> Seconds:
        """When each bucket is done, `[bucket, rank]`."""
        for number in range(min(self._in_flight, len(self._buckets))):
            self._start(number, np.zeros_like(self._factors))
        while self._events:
            _, number, step = heapq.heappop(self._events)
            bucket = self._buckets[number]
            if step == -1:
                self._at[number] = self._sum_inside(self._at[number], bucket.enter_seconds)
            elif step < len(bucket.schedule.steps):
                rounds = bucket.schedule.steps[step]
                self._at[number] = self._transfer(self._at[number], rounds, bucket.size_bytes)
            else:
                self._at[number] = self._sum_inside(self._at[number], bucket.leave_seconds)
                if number + self._in_flight < len(self._buckets):
                    self._start(number + self._in_flight, self._at[number])
                continue
            self._push(number, step + 1)
        return np.stack(self._at)

    def _start(self, number: int, before: Seconds) -> None:
        self._at[number] = np.maximum(self._buckets[number].ready_seconds * self._factors, before)
        self._push(number, -1)

    def _push(self, number: int, step: int) -> None:
        heapq.heappush(self._events, (float(self._at[number].max()), number, step))

    def _sum_inside(self, at: Seconds, seconds: float) -> Seconds:
        if not seconds:
            return at
        summed: Seconds = np.maximum(at, self._sums_free) + seconds
        self._sums_free = summed
        return summed

    def _transfer(self, at: Seconds, rounds: Sequence[Round], size_bytes: float) -> Seconds:
        end: Seconds = at.copy()
        for each in rounds:
            link = self._between if each.is_between_hosts else self._inside
            num_bytes = each.shares * size_bytes
            seconds = link.seconds_per_byte * num_bytes
            begin = np.maximum(at[each.senders], self._out_free[each.out_ports])
            self._out_free[each.out_ports] = begin + seconds
            landing = np.maximum(begin + link.latency_seconds, self._in_free[each.in_ports])
            landed = landing + seconds
            self._in_free[each.in_ports] = landed
            arrived = np.maximum(end[each.receivers], landed)
            if each.reduce:
                arrived += link.reduce_seconds_per_byte * num_bytes
            end[each.receivers] = arrived
        return end
