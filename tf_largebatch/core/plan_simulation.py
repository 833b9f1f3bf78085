"""Runs an all-reduce plan on NumPy arrays: the oracle for transports, and the check of a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt

from tf_largebatch.core.plan_parts import AllReducePlan, Piece, Step

Array = npt.NDArray[Any]
_Transfers = dict[tuple[int, int], tuple[int, int]]  # (sender, receiver): (begin, end)


def simulate(
    plan: AllReducePlan,
    inputs: Sequence[Array],
    *,
    to_wire: Callable[[Array], Array] | None = None,
) -> list[Array]:
    """What each rank holds after `plan`, when rank i starts with `inputs[i]`.

    Args:
        plan: the plan to run.
        inputs: a one-dimensional array of `plan.length` elements for each rank, of one dtype, in
            which the sums are formed. They are left as they are.
        to_wire: rounds what travels, as `lambda piece: piece.astype(np.float16)`. A rank's own
            copy of what it sends is rounded too, and so is every buffer in the end, so that all
            ranks end bitwise equal.

    Raises:
        ValueError: the inputs do not fit the plan, or the plan breaks a rule of `AllReducePlan`.
    """
    _check_inputs(plan, inputs)
    buffers = [array.copy() for array in inputs]
    steps_of = [plan.steps_of(rank) for rank in range(plan.num_workers)]
    for rank, steps in enumerate(steps_of):
        if len(steps) != plan.num_steps:
            raise ValueError(f"Rank {rank} has {len(steps)} steps, the plan {plan.num_steps}.")
    for index, step_of in enumerate(zip(*steps_of, strict=True)):
        _check_step(plan, index, step_of)
        _run_step(step_of, buffers, to_wire)
    if to_wire is not None and plan.num_steps > 0:
        for buffer in buffers:
            buffer[:] = to_wire(buffer)
    return buffers


def _run_step(
    steps: Sequence[Step], buffers: list[Array], to_wire: Callable[[Array], Array] | None
) -> None:
    in_flight: dict[tuple[int, int], Array] = {}
    for rank, step in enumerate(steps):
        for piece in step.sends:
            sent = buffers[rank][piece.begin : piece.end]
            if to_wire is not None:
                sent[:] = to_wire(sent)
            in_flight[rank, piece.peer] = sent.copy()
    for rank, step in enumerate(steps):
        for piece in step.receives:
            received = in_flight[piece.peer, rank]
            if step.reduce:
                buffers[rank][piece.begin : piece.end] += received
            else:
                buffers[rank][piece.begin : piece.end] = received


def _check_inputs(plan: AllReducePlan, inputs: Sequence[Array]) -> None:
    if len(inputs) != plan.num_workers:
        raise ValueError(f"{len(inputs)} inputs for a plan of {plan.num_workers} workers.")
    for rank, array in enumerate(inputs):
        if array.shape != (plan.length,) or array.dtype != inputs[0].dtype:
            raise ValueError(
                f"Input {rank} has shape {array.shape} and dtype {array.dtype}; all must have "
                f"shape {(plan.length,)} and the dtype of the first, {inputs[0].dtype}."
            )


def _check_step(plan: AllReducePlan, index: int, steps: Sequence[Step]) -> None:
    sent: _Transfers = {}
    received: _Transfers = {}
    for rank, step in enumerate(steps):
        for piece in step.sends:
            _note(sent, (rank, piece.peer), piece, plan, index)
        for piece in step.receives:
            _note(received, (piece.peer, rank), piece, plan, index)
    if sent != received:
        (sender, receiver), _ = min(sent.items() ^ received.items())
        raise ValueError(
            f"Step {index}: rank {sender} sends {sent.get((sender, receiver))} to rank {receiver}, "
            f"which expects {received.get((sender, receiver))}."
        )


def _note(
    transfers: _Transfers, pair: tuple[int, int], piece: Piece, plan: AllReducePlan, index: int
) -> None:
    where = f"Step {index}, rank {pair[0]} to rank {pair[1]}"
    if not 0 <= piece.peer < plan.num_workers or pair[0] == pair[1]:
        raise ValueError(f"{where}: there is no such pair among {plan.num_workers} workers.")
    if not 0 <= piece.begin < piece.end <= plan.length:
        raise ValueError(
            f"{where}: elements [{piece.begin}, {piece.end}) are none, or lie outside the buffer "
            f"of {plan.length}."
        )
    if pair in transfers:
        raise ValueError(f"{where}: more than one piece in a step.")
    transfers[pair] = (piece.begin, piece.end)
