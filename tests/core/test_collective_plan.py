from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_largebatch.core.collective_plan import (
    AllReducePlan,
    Piece,
    Step,
    binary_blocks,
    halving_doubling,
    hierarchical,
    ring,
    simulate,
)
from tf_largebatch.core.errors import ConfigurationError

WORKERS = (*range(1, 18), 24, 32)
LENGTHS = (0, 1, 2, 3, 7, 64, 1000, 10007)


def all_plans(p: int, length: int, align: int) -> Iterator[AllReducePlan]:
    yield ring(p, length=length, align=align)
    yield binary_blocks(p, length=length, align=align)
    for h in range(p.bit_length()):
        yield halving_doubling(p, length=length, halvings=h, align=align)
    # With one member a host the plan is that between hosts.
    for members in (m for m in range(2, p + 1) if p % m == 0):
        hosts = p // members
        yield hierarchical(
            hosts, members_per_host=members, length=length, inter="ring", align=align
        )
        for h in {0, hosts.bit_length() - 1}:
            yield hierarchical(
                hosts,
                members_per_host=members,
                length=length,
                inter="halving_doubling",
                halvings=h,
                align=align,
            )


def bits(array: np.ndarray) -> bytes:
    return array.tobytes()


@pytest.mark.parametrize("p", WORKERS)
def test_every_rank_ends_with_the_exact_sum(p: int) -> None:
    generator = np.random.default_rng(p)
    for length in LENGTHS:
        inputs = list(generator.integers(-(2**40), 2**40, size=(p, length)))
        expected = np.sum(inputs, axis=0)
        for align in (1, 16):
            for plan in all_plans(p, length, align):
                for result in simulate(plan, inputs):
                    assert bits(result) == bits(expected), plan


@pytest.mark.parametrize("p", WORKERS)
def test_floats_end_bitwise_equal_on_all_ranks(p: int) -> None:
    generator = np.random.default_rng(p)
    # Sums of such values differ with the order of the additions.
    inputs = [
        (generator.normal(size=333) * 10.0 ** generator.integers(-6, 6, 333)).astype(np.float32)
        for _ in range(p)
    ]
    exact = np.sum(np.asarray(inputs, np.float64), axis=0)
    magnitude = np.sum(np.abs(inputs), axis=0)
    for plan in all_plans(p, 333, 1):
        results = simulate(plan, inputs)
        assert {bits(result) for result in results} == {bits(results[0])}, plan
        assert results[0].dtype == np.float32
        assert (np.abs(results[0] - exact) <= p * 2.0**-24 * magnitude).all()


@pytest.mark.parametrize("p", WORKERS)
def test_values_rounded_on_the_wire_end_bitwise_equal_on_all_ranks(p: int) -> None:
    generator = np.random.default_rng(p)
    inputs = [generator.normal(size=333).astype(np.float32) for _ in range(p)]
    exact = np.sum(np.asarray(inputs, np.float64), axis=0)
    magnitude = np.sum(np.abs(inputs), axis=0)
    for plan in all_plans(p, 333, 1):
        results = simulate(plan, inputs, to_wire=lambda piece: piece.astype(np.float16))
        assert {bits(result) for result in results} == {bits(results[0])}, plan
        if p > 1:
            np.testing.assert_array_equal(results[0], results[0].astype(np.float16))
        # A partial sum is rounded once per send, by 2**-11 of it at most (2**-25 below the
        # smallest normal number), and no value passes through more than p + 1 of them.
        assert (np.abs(results[0] - exact) <= (p + 1) * (2.0**-11 * magnitude + 2.0**-25)).all()


@settings(deadline=None, max_examples=150)
@given(p=st.integers(1, 40), length=st.integers(0, 300), align=st.integers(1, 40), data=st.data())
def test_any_plan_sums_and_keeps_its_rules(
    p: int, length: int, align: int, data: st.DataObject
) -> None:
    plans = list(all_plans(p, length, align))
    plan = plans[data.draw(st.integers(0, len(plans) - 1))]
    inputs = [np.arange(length) * 41**2 + rank**2 for rank in range(p)]
    for result in simulate(plan, inputs):
        assert result.tolist() == np.sum(inputs, axis=0).tolist()
    sent: Counter[tuple[int, int, int, int, int]] = Counter()
    received: Counter[tuple[int, int, int, int, int]] = Counter()
    for rank in range(p):
        steps = plan.steps_of(rank)
        assert len(steps) == plan.num_steps
        for index, step in enumerate(steps):
            sent.update((index, rank, x.peer, x.begin, x.end) for x in step.sends)
            received.update((index, x.peer, rank, x.begin, x.end) for x in step.receives)
    assert sent == received
    assert len({transfer[:3] for transfer in sent}) == sent.total()
    for _, sender, receiver, begin, end in sent:
        assert sender != receiver
        assert 0 <= begin < end <= length
        assert begin % align == 0
        assert end % align == 0 or end == length


def test_ring_of_three() -> None:
    assert ring(3, length=9).steps_of(0) == (
        Step((Piece(1, 0, 3),), (Piece(2, 6, 9),), reduce=True),
        Step((Piece(1, 6, 9),), (Piece(2, 3, 6),), reduce=True),
        Step((Piece(2, 3, 6),), (Piece(1, 6, 9),), reduce=False),
        Step((Piece(2, 6, 9),), (Piece(1, 0, 3),), reduce=False),
    )


def test_the_nearest_neighbour_gets_the_largest_piece() -> None:
    assert halving_doubling(8, length=16).steps_of(5) == (
        Step((Piece(4, 0, 8),), (Piece(4, 8, 16),), reduce=True),
        Step((Piece(7, 12, 16),), (Piece(7, 8, 12),), reduce=True),
        Step((Piece(1, 8, 10),), (Piece(1, 10, 12),), reduce=True),
        Step((Piece(1, 10, 12),), (Piece(1, 8, 10),), reduce=False),
        Step((Piece(7, 8, 12),), (Piece(7, 12, 16),), reduce=False),
        Step((Piece(4, 8, 16),), (Piece(4, 0, 8),), reduce=False),
    )


def test_both_sides_of_a_swap_send_their_segment() -> None:
    assert halving_doubling(4, length=8, halvings=1).steps_of(1) == (
        Step((Piece(0, 0, 4),), (Piece(0, 4, 8),), reduce=True),
        Step((Piece(3, 4, 8),), (Piece(3, 4, 8),), reduce=True),
        Step((Piece(0, 4, 8),), (Piece(0, 0, 4),), reduce=False),
    )


def test_a_surplus_rank_is_folded_into_a_partner() -> None:
    plan = halving_doubling(3, length=5, halvings=0)
    whole, idle = 5, Step((), (), reduce=True)
    assert plan.steps_of(2) == (
        Step((Piece(0, 0, whole),), (), reduce=True),
        idle,
        Step((), (Piece(0, 0, whole),), reduce=False),
    )
    assert plan.steps_of(1)[1] == Step((Piece(0, 0, whole),), (Piece(0, 0, whole),), reduce=True)
    assert plan.steps_of(1)[::2] == (idle, Step((), (), reduce=False))


def test_blocks_of_six_workers() -> None:
    # Blocks {0, 1, 2, 3} and {4, 5}. Rank 5 keeps the upper half, whose quarters belong to 1 and 3.
    plan = binary_blocks(6, length=8)
    scatter = (
        Step((Piece(4, 0, 4),), (Piece(4, 4, 8),), reduce=True),
        Step((), (), reduce=True),
        Step((Piece(1, 4, 6), Piece(3, 6, 8)), (), reduce=True),
    )
    assert plan.steps_of(5)[:3] == scatter
    assert plan.steps_of(5)[3:] == tuple(
        Step(step.receives, step.sends, reduce=False) for step in reversed(scatter)
    )
    assert plan.steps_of(3)[2] == Step((), (Piece(5, 6, 8),), reduce=True)


@pytest.mark.parametrize("p", [1, 2, 4, 8, 16, 32])
def test_one_block_is_halving_and_doubling(p: int) -> None:
    blocks, halving = binary_blocks(p, length=1000), halving_doubling(p, length=1000)
    assert blocks.num_steps == halving.num_steps
    for rank in range(p):
        assert blocks.steps_of(rank) == halving.steps_of(rank)


def test_two_hosts_of_two_members() -> None:
    plan = hierarchical(2, members_per_host=2, length=8, inter="halving_doubling")
    assert plan.num_workers == 4
    assert plan.steps_of(3) == (
        Step((Piece(2, 0, 4),), (Piece(2, 4, 8),), reduce=True),
        Step((Piece(1, 4, 6),), (Piece(1, 6, 8),), reduce=True),
        Step((Piece(1, 6, 8),), (Piece(1, 4, 6),), reduce=False),
        Step((Piece(2, 4, 8),), (Piece(2, 0, 4),), reduce=False),
    )


@pytest.mark.parametrize("inter", ["ring", "halving_doubling"])
def test_hierarchical_at_its_edges(inter: str) -> None:
    flat = ring if inter == "ring" else halving_doubling
    one_member = hierarchical(6, members_per_host=1, length=100, inter=inter)  # type: ignore[arg-type]
    one_host = hierarchical(1, members_per_host=6, length=100, inter=inter)  # type: ignore[arg-type]
    for rank in range(6):
        assert one_member.steps_of(rank) == flat(6, length=100).steps_of(rank)
        scatter, gather = one_host.steps_of(rank)
        assert {piece.peer for piece in scatter.sends} == set(range(6)) - {rank}
        assert (gather.sends, gather.receives) == (scatter.receives, scatter.sends)


@pytest.mark.parametrize("make", [ring, halving_doubling, binary_blocks])
def test_one_worker_has_no_steps_and_no_elements_no_transfers(make) -> None:
    assert make(1, length=9).steps_of(0) == ()
    for rank in range(6):
        assert not any(step.sends or step.receives for step in make(6, length=0).steps_of(rank))


def test_edges_are_rounded_up_to_align_and_cut_at_the_end() -> None:
    # Thirds of 40 at 0, 13, 26, 40; with align=16 at 0, 16, 32, 40, with align=64 all in one piece.
    sent = [ring(3, length=40, align=16).steps_of(rank)[0].sends[0] for rank in range(3)]
    assert [(piece.begin, piece.end) for piece in sent] == [(0, 16), (16, 32), (32, 40)]
    assert [len(ring(3, length=40, align=64).steps_of(r)[0].sends) for r in range(3)] == [1, 0, 0]


@pytest.mark.parametrize(
    "plan",
    [
        ring(1024, length=25_000_000, align=16),
        halving_doubling(1024, length=25_000_000, align=16),
        halving_doubling(1023, length=25_000_000, halvings=4, align=16),
        binary_blocks(1023, length=25_000_000, align=16),
        binary_blocks(513, length=25_000_000, align=16),
        hierarchical(128, members_per_host=8, length=25_000_000, inter="ring", align=16),
    ],
    ids=str,
)
def test_a_rank_of_a_thousand_makes_its_steps_alone(plan: AllReducePlan) -> None:
    rank = plan.num_workers - 1
    began_seconds = time.process_time()
    steps = plan.steps_of(rank)
    # Milliseconds when made alone; all ranks' steps would take several seconds.
    assert time.process_time() - began_seconds < 0.5
    assert len(steps) == plan.num_steps
    for index in {0, plan.num_steps // 2, plan.num_steps - 1}:
        for piece in steps[index].sends:
            theirs = plan.steps_of(piece.peer)[index].receives
            assert Piece(rank, piece.begin, piece.end) in theirs


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ring(0, length=1), "num_workers=0: must be an integer, 1 or more"),
        (lambda: ring(2, length=-1), "length=-1: must be an integer, 0 or more"),
        (lambda: ring(2, length=1, align=0), "align=0"),
        (lambda: binary_blocks(2.0, length=1), "num_workers=2.0"),  # type: ignore[arg-type]
        (lambda: halving_doubling(7, length=1, halvings=-1), "halvings=-1"),
        (lambda: halving_doubling(7, length=1, halvings=3), "7 workers can halve .* 2 times at"),
        (
            lambda: hierarchical(2, members_per_host=2, length=1, inter="tree"),  # type: ignore[arg-type]
            "inter='tree': must be 'ring' or 'halving_doubling'",
        ),
        (
            lambda: hierarchical(2, members_per_host=2, length=1, inter="ring", halvings=1),
            "halvings=1: the ring has none",
        ),
        (lambda: hierarchical(2, members_per_host=0, length=1, inter="ring"), "members_per_host=0"),
        (lambda: ring(3, length=1).steps_of(3), "rank=3: .* the last rank is 2"),
        (lambda: ring(3, length=1).steps_of(-1), "rank=-1"),
    ],
)
def test_refused(call, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        call()
