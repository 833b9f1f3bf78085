"""All-reduces of a block over MPI, as generators: each yields requests, and goes on when all are
done.

So one thread can keep several under way, and none of them holds Python's global lock while it
waits: whoever runs them asks MPI for progress.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from tf_largebatch.core.collective_plan import AllReducePlan, Piece, Step
from tf_largebatch.distribute._packed_blocks import BlockPool, PackedLayout

# Below 32 MiB, from which glibc always hands memory back to the system.
_PART_BYTES = 4 * 2**20
_PARTS_UNDER_WAY = 2
Array = npt.NDArray[Any]
Transfer = Iterator[list[Any]]


def library_all_reduce(mpi: Any, comm: Any, flat: Array) -> Transfer:
    """By MPI's own algorithm, in place.

    In parts, as MPICH asks for memory of a part's size each time: where that is so large that the
    system hands it out anew, its page faults take longer than the sum.
    """
    length = _PART_BYTES // flat.itemsize
    under_way: deque[Any] = deque()
    for begin in range(0, len(flat), length):
        if len(under_way) == _PARTS_UNDER_WAY:
            yield [under_way.popleft()]
        part = flat[begin : begin + length]
        under_way.append(comm.Iallreduce(mpi.IN_PLACE, part, op=mpi.SUM))
    yield list(under_way)


def library_all_gather(mpi: Any, comm: Any, flat: Array) -> Transfer:
    """By MPI's own algorithm, in place: each rank has an equal part of `flat`, in their order."""
    yield [comm.Iallgather(mpi.IN_PLACE, flat)]


def all_reduce_by_plan(
    plan: AllReducePlan,
    comm: Any,
    flat: Array,
    *,
    tag: int,
    pool: BlockPool,
    wire_dtype: np.dtype[Any] | None = None,
) -> Transfer:
    """By a plan, in place; what `core.plan_simulation.simulate` says comes out, to the bit.

    What arrives to be added, and whatever travels in another dtype, needs memory of its own; other
    pieces are sent from `flat`, and received into it, without a copy of ours.

    Args:
        plan: what is sent when.
        comm: whose ranks are the plan's.
        flat: this rank's values, `[plan.length]`.
        pool: has the memory for pieces that have none in `flat`.
        tag: of this all-reduce alone while it runs; its messages follow one another by rank.
        wire_dtype: in which pieces travel; None for that of `flat`, in which sums are kept.
    """
    for step in plan.steps_of(comm.rank):
        lent: list[Array] = []  # kept, as views of them are used

        def borrow(length: int, dtype: np.dtype[Any], lent: list[Array] = lent) -> Array:
            lent.append(pool.take(PackedLayout(((length,),), dtype)))
            return lent[-1].reshape(-1)[:length]

        arriving = [
            (
                piece,
                borrow(piece.end - piece.begin, wire_dtype or flat.dtype)
                if step.reduce or wire_dtype is not None
                else flat[piece.begin : piece.end],
            )
            for piece in step.receives
        ]
        # Receives first: what comes finds its place.
        requests = [
            comm.Irecv(_bytes_of(landing), source=piece.peer, tag=tag)
            for piece, landing in arriving
        ]
        leaving = _rounded_pieces(flat, step, wire_dtype)
        requests += [comm.Isend(_bytes_of(sent), dest=peer, tag=tag) for peer, sent in leaving]
        if requests:
            yield requests
        for piece, landing in arriving:
            own = flat[piece.begin : piece.end]
            if step.reduce:
                np.add(own, landing.astype(flat.dtype, copy=False), out=own)
            elif wire_dtype is not None:
                own[:] = landing
    if wire_dtype is not None and plan.num_steps > 0:
        # A sum that was sent to some ranks is rounded there; so all round all of it.
        flat[:] = flat.astype(wire_dtype)


def _rounded_pieces(
    flat: Array, step: Step, wire_dtype: np.dtype[Any] | None
) -> list[tuple[int, Array]]:
    """(peer, what it is sent), rounded in `flat` as well."""
    if wire_dtype is None:
        return [(piece.peer, _outgoing(flat, piece, step)) for piece in step.sends]
    rounded: dict[tuple[int, int], Array] = {}
    for piece in step.sends:
        span = (piece.begin, piece.end)
        if span not in rounded:
            rounded[span] = flat[piece.begin : piece.end].astype(wire_dtype)
            flat[piece.begin : piece.end] = rounded[span]
    return [(piece.peer, rounded[piece.begin, piece.end]) for piece in step.sends]


def _outgoing(flat: Array, piece: Piece, step: Step) -> Array:
    """A piece to be sent from where it lies, unless it is received into meanwhile.

    A step's sums are formed once all of it has been sent; what replaces values may land earlier.
    """
    overlaps = not step.reduce and any(
        other.begin < piece.end and piece.begin < other.end for other in step.receives
    )
    sent = flat[piece.begin : piece.end]
    return sent.copy() if overlaps else sent


def _bytes_of(array: Array) -> Array:
    """MPI has no bfloat16; pieces are not added up on the way, so that bytes are enough."""
    return array.view(np.uint8)
