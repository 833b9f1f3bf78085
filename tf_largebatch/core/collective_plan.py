"""All-reduce as a list of transfers: ring, recursive halving/doubling, binary blocks, hierarchical.

A plan says which elements each rank sends and receives in each step, and nothing about how they
travel. With every plan all ranks end with bitwise equal sums: one rank alone adds up an element
and hands the sum on, or both sides of a swap add the same two numbers (`a + b == b + a`).

A reduce-scatter leaves each rank with the sum of one segment; its mirror image (the same steps
last to first, with sends and receives exchanged) is the all-gather that returns it to all.

With a narrower type on the wire there are two rules. A rank replaces what it sends by the rounded
values in its own buffer too, and at the end it rounds its whole buffer. The second changes nothing
after an all-gather, in which every sum is sent. It matters with `halvings=0`, where ranks end with
sums of their own, and those from which a surplus rank gets the result have rounded theirs.

Sources: Goyal et al. 2017 (arXiv 1706.02677), section 4; Thakur, Rabenseifner, Gropp 2005,
"Optimization of Collective Communication Operations in MPICH"; Rabenseifner 2004, "Optimization
of Collective Reduction Operations" (binary blocks).
"""

from __future__ import annotations

from itertools import chain
from typing import Literal

from tf_largebatch.core.block_plan import binary_blocks
from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.core.plan_parts import (
    IDLE,
    AllReducePlan,
    Cut,
    Piece,
    Step,
    Steps,
    exchange,
    halving_steps,
    with_gather,
)
from tf_largebatch.core.plan_simulation import simulate
from tf_largebatch.core.scaling import require_count

__all__ = [
    "AllReducePlan",
    "Piece",
    "Step",
    "binary_blocks",
    "halving_doubling",
    "hierarchical",
    "ring",
    "simulate",
]

InterHostAlgorithm = Literal["ring", "halving_doubling"]


def ring(num_workers: int, *, length: int, align: int = 1) -> AllReducePlan:
    """The ring: `2 (p - 1)` steps, each with a p-th of the buffer, to a neighbour.

    A rank sends `2 b (p - 1) / p` bytes of a buffer of b bytes: no all-reduce has its busiest rank
    send less.

    Args:
        num_workers: p, at least 1.
        length: elements in the buffer; 0 gives a plan without transfers.
        align: edges between pieces are multiples of this many elements; pieces may get empty.

    Raises:
        ConfigurationError: a count is no integer or too small.
    """
    p = require_count("num_workers", num_workers)
    cut = Cut(require_count("length", length, minimum=0), p, require_count("align", align))

    def make_steps(rank: int) -> Steps:
        return with_gather([_ring_step(cut, rank, index) for index in range(p - 1)])

    return AllReducePlan("ring", p, cut.length, 2 * (p - 1), make_steps)


def _ring_step(cut: Cut, rank: int, index: int) -> Step:
    p = cut.parts
    given, kept = (rank - index) % p, (rank - index - 1) % p
    return Step(
        sends=cut.pieces((rank + 1) % p, given, given + 1),
        receives=cut.pieces((rank - 1) % p, kept, kept + 1),
        reduce=True,
    )


def halving_doubling(
    num_workers: int, *, length: int, halvings: int | None = None, align: int = 1
) -> AllReducePlan:
    """Recursive halving and doubling, with recursive doubling for the last of the sum.

    On `p = 2**k` ranks: h = `halvings` steps of a reduce-scatter (exchange halves of the segment
    with `rank ^ 1`, then `rank ^ 2`, ...), `k - h` swaps in which both sides send their segment
    and add what they receive, and h steps of an all-gather: `k + h` steps that send
    `b (2 (1 - 2**-h) + (k - h) 2**-h)` bytes. With h = k that is the paper's algorithm, `2 k`
    steps and `2 b (p - 1) / p` bytes; h = k - 1 sends as much in a step less; h = 0 is recursive
    doubling, k steps and `k b` bytes, for short buffers.

    For other p let `2**k` be the largest power of two below. The ranks from `2**k` on first send
    their buffer to `rank - 2**k`, which adds it, and get the result in the end: two steps and
    `2 b` bytes more.

    Args:
        num_workers: p, at least 1.
        length: elements in the buffer; 0 gives a plan without transfers.
        halvings: h, from 0 to k; None is k.
        align: edges between pieces are multiples of this many elements; pieces may get empty.

    Raises:
        ConfigurationError: a count is no integer or out of range.
    """
    p = require_count("num_workers", num_workers)
    exponent = p.bit_length() - 1
    core = 2**exponent
    h = _checked_halvings(halvings, p)
    cut = Cut(require_count("length", length, minimum=0), 2**h, require_count("align", align))

    def make_steps(rank: int) -> Steps:
        folding = [_fold_step(cut, rank, core=core, num_workers=p)] if core < p else []
        if rank >= core:
            return with_gather(folding + [IDLE] * h, middle=(IDLE,) * (exponent - h))
        swaps = tuple(
            exchange(cut, rank ^ (1 << bit), given=(rank, h), kept=(rank, h))
            for bit in range(h, exponent)
        )
        return with_gather(folding + halving_steps(cut, rank, halvings=h), middle=swaps)

    num_steps = exponent + h + 2 * (core < p)
    return AllReducePlan("halving_doubling", p, cut.length, num_steps, make_steps)


def _checked_halvings(halvings: int | None, num_workers: int) -> int:
    most = num_workers.bit_length() - 1
    h = most if halvings is None else require_count("halvings", halvings, minimum=0)
    if h > most:
        raise ConfigurationError(
            f"halvings={h}: {num_workers} workers can halve the buffer {most} times at most."
        )
    return h


def _fold_step(cut: Cut, rank: int, *, core: int, num_workers: int) -> Step:
    if rank >= core:
        return Step(sends=cut.pieces(rank - core, 0, cut.parts), receives=(), reduce=True)
    surplus = rank + core
    received = cut.pieces(surplus, 0, cut.parts) if surplus < num_workers else ()
    return Step(sends=(), receives=received, reduce=True)


def hierarchical(
    num_hosts: int,
    *,
    members_per_host: int,
    length: int,
    inter: InterHostAlgorithm,
    halvings: int | None = None,
    align: int = 1,
) -> AllReducePlan:
    """Reduce-scatter inside each host, all-reduce between hosts, all-gather inside each host.

    Rank is `host * members_per_host + member`. Inside a host each member sends every other member
    that one's part, in one step. Part m is then summed among the members m of all hosts, by
    `inter`. With one member a host the plan is that of `inter`; with one host it has two steps.

    Args:
        num_hosts: at least 1.
        members_per_host: L, at least 1.
        length: elements in the buffer; 0 gives a plan without transfers.
        inter: `"ring"` or `"halving_doubling"`, between hosts.
        halvings: of `"halving_doubling"`, counted by hosts.
        align: edges between pieces are multiples of this many elements; pieces may get empty.

    Raises:
        ConfigurationError: a count is no integer or out of range, an unknown `inter`, or
            `halvings` given with the ring.
    """
    hosts = require_count("num_hosts", num_hosts)
    members = require_count("members_per_host", members_per_host)
    cut = Cut(require_count("length", length, minimum=0), members, require_count("align", align))
    between = _between_hosts(inter, hosts, length=cut.length, halvings=halvings, align=align)

    def make_steps(rank: int) -> Steps:
        host, member = divmod(rank, members)
        begin, end = cut.edge(member), cut.edge(member + 1)
        part = _between_hosts(inter, hosts, length=end - begin, halvings=halvings, align=align)
        middle = tuple(
            Step(
                sends=_moved(step.sends, begin, members, member),
                receives=_moved(step.receives, begin, members, member),
                reduce=step.reduce,
            )
            for step in part.steps_of(host)
        )
        return with_gather(_inside_host(cut, host, member), middle)

    num_steps = between.num_steps + 2 * (members > 1)
    return AllReducePlan("hierarchical", hosts * members, cut.length, num_steps, make_steps)


def _between_hosts(
    inter: InterHostAlgorithm, num_hosts: int, *, length: int, halvings: int | None, align: int
) -> AllReducePlan:
    if inter == "halving_doubling":
        return halving_doubling(num_hosts, length=length, halvings=halvings, align=align)
    if inter != "ring":
        raise ConfigurationError(f"inter={inter!r}: must be 'ring' or 'halving_doubling'.")
    if halvings is not None:
        raise ConfigurationError(
            f"halvings={halvings}: the ring has none; leave it out, or use "
            "inter='halving_doubling'."
        )
    return ring(num_hosts, length=length, align=align)


def _inside_host(cut: Cut, host: int, member: int) -> list[Step]:
    first_rank = host * cut.parts
    others = [other for other in range(cut.parts) if other != member]
    if not others:
        return []
    sends = [cut.pieces(first_rank + other, other, other + 1) for other in others]
    receives = [cut.pieces(first_rank + other, member, member + 1) for other in others]
    return [Step(tuple(chain(*sends)), tuple(chain(*receives)), reduce=True)]


def _moved(pieces: tuple[Piece, ...], begin: int, members: int, member: int) -> tuple[Piece, ...]:
    """Pieces of a part that starts at `begin`, with hosts for peers, as those of the buffer."""
    return tuple(
        Piece(piece.peer * members + member, begin + piece.begin, begin + piece.end)
        for piece in pieces
    )
