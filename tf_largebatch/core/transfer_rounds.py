"""An all-reduce plan as arrays: rounds in which each port sends and receives at most one piece.

What `step_simulation` runs: NumPy takes all transfers of a round at once, where a plan's steps are
Python objects for each rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.core.plan_parts import AllReducePlan
from tf_largebatch.core.scaling import require_count

# A slice for consecutive ones: a view, where an array of indices copies.
Indices = npt.NDArray[np.intp] | slice
_Transfer = tuple[int, int, float, bool]  # sender, receiver, share, reduce
_GroupKey = tuple[bool, bool, int]  # between hosts, reduce, number of the round


@dataclass(frozen=True, eq=False)
class Round:
    """Transfers that can go at the same time, all of a kind.

    Attributes:
        senders, receivers: ranks; in each none stands twice.
        out_ports, in_ports: what they send from and receive at. A host's network card is port
            `host`, for all its ranks; within a host each rank has port `num_hosts + rank`.
        shares: of the buffer, that each carries.
        reduce: whether they are added to what the receiver has.
        is_between_hosts: whether they go by the network.
    """

    senders: Indices
    receivers: Indices
    out_ports: Indices
    in_ports: Indices
    shares: npt.NDArray[np.float64]
    reduce: bool
    is_between_hosts: bool


@dataclass(frozen=True, eq=False)
class Schedule:
    """What a plan does in each step, for a buffer of any size: pieces are shares of it.

    Attributes:
        num_ranks: of the plan.
        num_hosts: on which they are, rank r on host `r // (num_ranks // num_hosts)`.
        steps: the rounds of each; no step is without.
    """

    num_ranks: int
    num_hosts: int
    steps: Sequence[tuple[Round, ...]]


def schedule_of(plan: AllReducePlan, *, ranks_per_host: int = 1) -> Schedule:
    """The plan's transfers, step by step.

    Steps in which nobody sends are left out. A ring of equal pieces takes no time to make, whatever
    its size; other plans take some microseconds for each piece.

    Args:
        plan: of one element or more. As pieces become shares, give it a length that its pieces
            divide (as a high power of two, times the number of workers).
        ranks_per_host: how many consecutive ranks share a host's network card.

    Raises:
        ConfigurationError: the plan has no elements, or `ranks_per_host` does not divide its
            workers.
    """
    members = require_count("ranks_per_host", ranks_per_host)
    if plan.num_workers % members:
        raise ConfigurationError(
            f"ranks_per_host={members}: must divide the plan's {plan.num_workers} workers."
        )
    if plan.length < 1:
        raise ConfigurationError("A plan for a buffer of 0 elements has no shares; use 1 or more.")
    hosts = plan.num_workers // members
    if plan.algorithm == "ring" and members == 1 and plan.length % plan.num_workers == 0:
        return Schedule(hosts, hosts, _ring_steps(hosts))
    by_step: list[list[_Transfer]] = [[] for _ in range(plan.num_steps)]
    for rank in range(plan.num_workers):
        for transfers, step in zip(by_step, plan.steps_of(rank), strict=True):
            transfers += [
                (piece.peer, rank, (piece.end - piece.begin) / plan.length, step.reduce)
                for piece in step.receives
            ]
    rounds = [_rounds(transfers, members, hosts) for transfers in by_step if transfers]
    return Schedule(plan.num_workers, hosts, rounds)


def _ring_steps(hosts: int) -> Sequence[tuple[Round, ...]]:
    """All steps of a half are the same, but for which piece it is, which takes no time."""
    ranks = slice(0, hosts)
    following = (np.arange(hosts) + 1) % hosts
    shares = np.full(hosts, 1.0 / hosts)
    scatter = (Round(ranks, following, ranks, following, shares, True, True),)
    gather = (Round(following, ranks, following, ranks, shares, False, True),)  # the mirror image
    return [scatter] * (hosts - 1) + [gather] * (hosts - 1)


def _rounds(transfers: Sequence[_Transfer], members: int, hosts: int) -> tuple[Round, ...]:
    """Each transfer in the first round, of its kind, in which both of its ports are free."""
    groups: defaultdict[_GroupKey, list[tuple[int, int, int, int, float]]] = defaultdict(list)
    busy_out: defaultdict[int, set[int]] = defaultdict(set)  # port: numbers of rounds
    busy_in: defaultdict[int, set[int]] = defaultdict(set)
    for sender, receiver, share, reduce in sorted(transfers):
        is_between = sender // members != receiver // members
        out_port = sender // members if is_between else hosts + sender
        in_port = receiver // members if is_between else hosts + receiver
        number = 0
        while number in busy_out[out_port] or number in busy_in[in_port]:
            number += 1
        busy_out[out_port].add(number)
        busy_in[in_port].add(number)
        groups[is_between, reduce, number].append((sender, receiver, out_port, in_port, share))
    made = []
    for (is_between, reduce, _), group in sorted(groups.items(), key=lambda item: item[0][2]):
        senders, receivers, out_ports, in_ports, shares = zip(*group, strict=True)
        made.append(
            Round(
                senders=_indices(senders),
                receivers=_indices(receivers),
                out_ports=_indices(out_ports),
                in_ports=_indices(in_ports),
                shares=np.array(shares),
                reduce=reduce,
                is_between_hosts=is_between,
            )
        )
    return tuple(made)


def _indices(numbers: Sequence[int]) -> Indices:
    first = numbers[0]
    if list(numbers) == list(range(first, first + len(numbers))):
        return slice(first, first + len(numbers))
    return np.array(numbers, dtype=np.intp)
