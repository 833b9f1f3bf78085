"""What an all-reduce costs: steps, bytes, and seconds by the alpha-beta-gamma model.

`seconds = alpha * steps + beta * bytes_sent + gamma * bytes_reduced` along the critical path, all
ranks in step with one another (Thakur, Rabenseifner, Gropp 2005, section 3). A link carries both
directions at once, and a rank that exchanges with several others in a step shares its link among
them.

`plan_cost` counts what a plan does. The closed forms take the size as a real number: they are exact
where the pieces divide evenly, and otherwise low by less than two elements (or twice `align`) for
each piece on the critical path. They count the steps of an empty buffer too, which costs nothing.

Where ranks wait for data rather than for one another, a plan whose ranks have unequal parts takes
less than that: binary blocks, as a small block can send its sums while a larger one still halves.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from tf_largebatch.core.collective_plan import AllReducePlan, Piece
from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.core.scaling import require_count, require_number

FlatAlgorithm = Literal["ring", "halving_doubling", "binary_blocks"]


@dataclass(frozen=True)
class LinkCost:
    """What was measured between workers; each is a finite number, 0 or more.

    Raises:
        ConfigurationError: one of them is not.
    """

    latency_seconds: float  # alpha: of one step, from the send to the receipt
    seconds_per_byte: float  # beta: of what travels
    reduce_seconds_per_byte: float = 0.0  # gamma: of what is added

    def __post_init__(self) -> None:
        for name in ("latency_seconds", "seconds_per_byte", "reduce_seconds_per_byte"):
            require_number(name, getattr(self, name), may_equal_minimum=True)


@dataclass(frozen=True)
class PlanCost:
    """The critical path of a plan; costs of plans that follow one another add up.

    `bytes_sent` is the sum over the steps of the most that any rank sends, or that any receives
    if that is more, in the step; `bytes_reduced` that of the most that any rank adds.
    """

    steps: int
    bytes_sent: float
    bytes_reduced: float

    def seconds(self, link: LinkCost) -> float:
        """`alpha * steps + beta * bytes_sent + gamma * bytes_reduced`."""
        return (
            link.latency_seconds * self.steps
            + link.seconds_per_byte * self.bytes_sent
            + link.reduce_seconds_per_byte * self.bytes_reduced
        )

    def __add__(self, other: PlanCost) -> PlanCost:
        return PlanCost(
            self.steps + other.steps,
            self.bytes_sent + other.bytes_sent,
            self.bytes_reduced + other.bytes_reduced,
        )


def plan_cost(plan: AllReducePlan, *, item_bytes: int) -> PlanCost:
    """Counted from the plan, over all ranks; steps in which nobody sends are not counted.

    Takes `num_workers * num_steps` steps to make: for a ring of 1,024 workers that lasts, and
    the closed forms are there.

    Raises:
        ConfigurationError: `item_bytes`, of an element, is no integer or below 1.
    """
    item_bytes = require_count("item_bytes", item_bytes)
    most_moved = [0] * plan.num_steps
    most_reduced = [0] * plan.num_steps
    for rank in range(plan.num_workers):
        for index, step in enumerate(plan.steps_of(rank)):
            received = _elements(step.receives)
            moved = max(_elements(step.sends), received)
            most_moved[index] = max(most_moved[index], moved)
            if step.reduce:
                most_reduced[index] = max(most_reduced[index], received)
    return PlanCost(
        steps=sum(moved > 0 for moved in most_moved),
        bytes_sent=item_bytes * sum(most_moved),
        bytes_reduced=item_bytes * sum(most_reduced),
    )


def _elements(pieces: Iterable[Piece]) -> int:
    return sum(piece.end - piece.begin for piece in pieces)


def ring_cost(num_workers: int, *, size_bytes: float) -> PlanCost:
    """`2 (p - 1)` steps, `2 b (p - 1) / p` bytes sent, half of them added."""
    p, b = _checked(num_workers, size_bytes)
    return PlanCost(2 * (p - 1), 2 * b * (p - 1) / p, b * (p - 1) / p)


def halving_doubling_cost(
    num_workers: int, *, size_bytes: float, halvings: int | None = None
) -> PlanCost:
    """With `2**k <= p < 2**(k + 1)` and h halvings, k by default:

    `k + h` steps, `b (2 (1 - 2**-h) + (k - h) 2**-h)` bytes sent,
    `b (1 - 2**-h + (k - h) 2**-h)` added; and 2 steps, 2 b and b more if p is no power of two.

    Raises:
        ConfigurationError: an argument is no number or out of range.
    """
    p, b = _checked(num_workers, size_bytes)
    k = p.bit_length() - 1
    h = k if halvings is None else require_count("halvings", halvings, minimum=0)
    if h > k:
        raise ConfigurationError(f"halvings={h}: {p} workers can halve the buffer {k} times.")
    gathered, swapped = b * (1 - 2.0**-h), b * (k - h) * 2.0**-h
    cost = PlanCost(k + h, 2 * gathered + swapped, gathered + swapped)
    return cost if p == 2**k else cost + PlanCost(2, 2 * b, b)


def binary_blocks_cost(num_workers: int, *, size_bytes: float) -> PlanCost:
    """As halving/doubling for powers of two; for other p `2 floor(log2 p) + 2` steps.

    With blocks of `2**a` ranks, the largest with `a = k`: step `s < k` of the reduce-scatter moves
    and adds `b / 2**(s + 1)`, as the largest block halves. In the step after a block of `2**a`
    has halved, it adds `b / 2**a` from the next smaller block of `2**c`, whose ranks send
    `b / 2**c` each. A step costs what the slowest rank has to do; the way back costs the same
    without the additions.
    """
    p, b = _checked(num_workers, size_bytes)
    exponents = [bit for bit in range(p.bit_length()) if p >> bit & 1]
    largest = exponents[-1]
    moved = [b / 2 ** (step + 1) for step in range(largest)]
    reduced = list(moved)
    if len(exponents) > 1:
        moved.append(0.0)
        reduced.append(0.0)
    for smaller, larger in itertools.pairwise(exponents):
        moved[larger] = b / 2**smaller
        reduced[larger] = b / 2**larger
    return PlanCost(2 * len(moved), 2 * sum(moved), sum(reduced))


def algorithm_cost(
    algorithm: FlatAlgorithm, num_workers: int, *, size_bytes: float, halvings: int | None = None
) -> PlanCost:
    """The closed form of `algorithm`, by its name.

    Raises:
        ConfigurationError: an unknown name, an argument out of range, or `halvings` given for an
            algorithm without.
    """
    if algorithm == "halving_doubling":
        return halving_doubling_cost(num_workers, size_bytes=size_bytes, halvings=halvings)
    if halvings is not None:
        raise ConfigurationError(f"halvings={halvings}: only 'halving_doubling' takes halvings.")
    if algorithm == "ring":
        return ring_cost(num_workers, size_bytes=size_bytes)
    if algorithm == "binary_blocks":
        return binary_blocks_cost(num_workers, size_bytes=size_bytes)
    raise ConfigurationError(
        f"algorithm={algorithm!r}: must be 'ring', 'halving_doubling' or 'binary_blocks'."
    )


def inside_host_cost(members_per_host: int, *, size_bytes: float) -> PlanCost:
    """The reduce-scatter and all-gather among L members of a host, one step each.

    `2 b (L - 1) / L` bytes sent, half of them added; nothing for one member.
    """
    members = require_count("members_per_host", members_per_host)
    b = require_number("size_bytes", size_bytes, may_equal_minimum=True)
    scattered = b * (members - 1) / members
    return PlanCost(2 * (members > 1), 2 * scattered, scattered)


def hierarchical_cost(
    num_hosts: int,
    *,
    members_per_host: int,
    size_bytes: float,
    inter: Literal["ring", "halving_doubling"],
    halvings: int | None = None,
) -> PlanCost:
    """`inside_host_cost`, and `inter` between hosts on a buffer of `size_bytes / L`.

    That is for links all alike. Where those inside a host are not, give each of the two costs its
    own link, and mind that L members of a host may share the one to other hosts.

    Raises:
        ConfigurationError: an argument is no number or out of range.
    """
    inside = inside_host_cost(members_per_host, size_bytes=size_bytes)
    hosts = require_count("num_hosts", num_hosts)
    part_bytes = size_bytes / members_per_host
    return inside + algorithm_cost(inter, hosts, size_bytes=part_bytes, halvings=halvings)


def best_halvings(num_workers: int, *, size_bytes: float, link: LinkCost) -> int:
    """The `halvings` for which `halving_doubling` has the least predicted seconds.

    Among equals the fewest. For `2**k` workers or more, k halvings send as much as k - 1 and take
    a step more; they win only where the `b / 2**k` additions that they save last longer.

    Raises:
        ConfigurationError: an argument is no number or out of range.
    """

    def seconds(halvings: int) -> float:
        cost = halving_doubling_cost(num_workers, size_bytes=size_bytes, halvings=halvings)
        return cost.seconds(link)

    p = require_count("num_workers", num_workers)
    return min(range(p.bit_length()), key=seconds)


def _checked(num_workers: int, size_bytes: float) -> tuple[int, float]:
    return (
        require_count("num_workers", num_workers),
        require_number("size_bytes", size_bytes, may_equal_minimum=True),
    )
