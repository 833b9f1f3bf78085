from __future__ import annotations

import numpy as np
import pytest

from tf_largebatch.core.collective_plan import AllReducePlan, Piece, Step, ring, simulate

LENGTH = 4
INPUTS = [np.array([1.0, 2.0, 3.0, 4.0]), np.array([10.0, 20.0, 30.0, 40.0])]


def plan_of(*steps_of_ranks: tuple[Step, ...], num_steps: int = 1) -> AllReducePlan:
    return AllReducePlan("ring", len(steps_of_ranks), LENGTH, num_steps, steps_of_ranks.__getitem__)


def step(
    sends: tuple[Piece, ...] = (), receives: tuple[Piece, ...] = (), *, reduce: bool = True
) -> Step:
    return Step(sends, receives, reduce)


def test_sends_read_the_buffer_as_it_was_when_the_step_began() -> None:
    swap = plan_of(
        (step((Piece(1, 0, 4),), (Piece(1, 0, 4),), reduce=False),),
        (step((Piece(0, 0, 4),), (Piece(0, 0, 4),), reduce=False),),
    )
    first, second = simulate(swap, INPUTS)
    assert first.tolist() == [10, 20, 30, 40]
    assert second.tolist() == [1, 2, 3, 4]
    assert INPUTS[0].tolist() == [1, 2, 3, 4]


def test_only_the_piece_is_added() -> None:
    one_way = plan_of((step(sends=(Piece(1, 1, 3),)),), (step(receives=(Piece(0, 1, 3),)),))
    first, second = simulate(one_way, INPUTS)
    assert first.tolist() == [1, 2, 3, 4]
    assert second.tolist() == [10, 22, 33, 40]


def test_receives_are_applied_in_the_given_order() -> None:
    inputs = [np.full(LENGTH, value, np.float32) for value in (1.0, 2.0**24, -(2.0**24))]
    for peers, expected in (((1, 2), 0.0), ((2, 1), 1.0)):
        plan = plan_of(
            (step(receives=tuple(Piece(peer, 0, 4) for peer in peers)),),
            (step(sends=(Piece(0, 0, 4),)),),
            (step(sends=(Piece(0, 0, 4),)),),
        )
        # In float32, 1 + 2**24 is 2**24.
        assert simulate(plan, inputs)[0].tolist() == [expected] * LENGTH


def test_a_rank_rounds_its_own_copy_of_what_it_sends() -> None:
    plan = plan_of(
        (step(sends=(Piece(1, 0, 2),)), step(receives=(Piece(1, 0, 4),))),
        (step(receives=(Piece(0, 0, 2),)), step(sends=(Piece(0, 0, 4),))),
        num_steps=2,
    )
    # np.round goes to the even neighbour: 0.5 to 0, 1.5 to 2. Rank 0 sends the first two as 0, is
    # left with 0, and gets 1 back. The others it keeps as 0.5, adds 1, and rounds in the end.
    inputs = [np.full(LENGTH, 0.5), np.ones(LENGTH)]
    assert simulate(plan, inputs, to_wire=np.round)[0].tolist() == [1, 1, 2, 2]


def test_nothing_is_rounded_where_nothing_travels() -> None:
    (alone,) = simulate(ring(1, length=1), [np.array([1.4])], to_wire=np.round)
    assert alone.tolist() == [1.4]


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (((step((Piece(1, 0, 4),)),), (step(),)), "rank 0 sends .*0, 4.* rank 1, .*expects None"),
        (((step(),), (step((), (Piece(0, 0, 4),)),)), "rank 0 sends None to rank 1"),
        (
            ((step((Piece(1, 0, 4),)),), (step((), (Piece(0, 0, 3),)),)),
            r"sends \(0, 4\) to rank 1, which expects \(0, 3\)",
        ),
        (((step((Piece(0, 0, 4),)),), (step(),)), "rank 0 to rank 0: there is no such pair"),
        (((step((Piece(2, 0, 4),)),), (step(),)), "no such pair among 2 workers"),
        (((step((Piece(1, 2, 2),)),), (step((), (Piece(0, 2, 2),)),)), r"\[2, 2\) are none"),
        (((step((Piece(1, 2, 5),)),), (step((), (Piece(0, 2, 5),)),)), "outside the buffer of 4"),
        (((step((Piece(1, -1, 2),)),), (step((), (Piece(0, -1, 2),)),)), "outside the buffer"),
        (
            (
                (step((Piece(1, 0, 2), Piece(1, 2, 4))),),
                (step((), (Piece(0, 0, 2), Piece(0, 2, 4))),),
            ),
            "more than one piece in a step",
        ),
        (((step(),), (step(), step())), "Rank 1 has 2 steps, the plan 1"),
    ],
)
def test_a_broken_plan_is_refused(ranks: tuple[tuple[Step, ...], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(plan_of(*ranks), INPUTS)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (INPUTS[:1], "1 inputs for a plan of 2 workers"),
        ([INPUTS[0], INPUTS[1][:3]], r"Input 1 has shape \(3,\)"),
        ([INPUTS[0], INPUTS[1].reshape(2, 2)], r"Input 1 has shape \(2, 2\)"),
        ([INPUTS[0], INPUTS[1].astype(np.float32)], "Input 1 .* dtype float32"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(inputs: list[np.ndarray], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(ring(2, length=LENGTH), inputs)
