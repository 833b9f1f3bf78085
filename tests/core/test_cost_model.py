from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_largebatch.core.collective_plan import (
    AllReducePlan,
    binary_blocks,
    halving_doubling,
    hierarchical,
    ring,
)
from tf_largebatch.core.cost_model import (
    LinkCost,
    PlanCost,
    algorithm_cost,
    best_halvings,
    binary_blocks_cost,
    halving_doubling_cost,
    hierarchical_cost,
    inside_host_cost,
    plan_cost,
    ring_cost,
)
from tf_largebatch.core.errors import ConfigurationError

WORKERS = (*range(1, 18), 24, 32)


def plans_and_costs(
    p: int, length: int, align: int = 1, members: int = 3
) -> list[tuple[AllReducePlan, PlanCost]]:
    """With four bytes an element."""
    size, cut = 4 * length, {"length": length, "align": align}
    pairs = [
        (ring(p, **cut), ring_cost(p, size_bytes=size)),
        (binary_blocks(p, **cut), binary_blocks_cost(p, size_bytes=size)),
    ]
    for h in range(p.bit_length()):
        plan = halving_doubling(p, halvings=h, **cut)
        pairs.append((plan, halving_doubling_cost(p, size_bytes=size, halvings=h)))
    for inter in ("ring", "halving_doubling"):
        shape = {"members_per_host": members, "inter": inter}
        pairs.append(
            (hierarchical(p, **shape, **cut), hierarchical_cost(p, size_bytes=size, **shape))
        )
    return pairs


@pytest.mark.parametrize("p", WORKERS)
def test_closed_forms_are_what_a_plan_counts_where_pieces_divide(p: int) -> None:
    # Parts of a host, of a ring and of the largest block: all divide 3 * 32 * p elements.
    for plan, cost in plans_and_costs(p, 3 * 32 * p):
        counted = plan_cost(plan, item_bytes=4)
        assert counted == cost, plan
        assert counted.steps == plan.num_steps


@settings(deadline=None, max_examples=60)
@given(
    p=st.integers(1, 24),
    length=st.integers(1, 3000),
    align=st.integers(1, 20),
    members=st.integers(1, 4),
)
def test_closed_forms_are_near_what_any_plan_counts(
    p: int, length: int, align: int, members: int
) -> None:
    for plan, cost in plans_and_costs(p, length, align, members):
        counted = plan_cost(plan, item_bytes=4)
        # One piece a step, but from each other member in the two steps inside a host.
        slack_bytes = 2 * align * 4 * (plan.num_steps + 2 * members)
        rounding_bytes = 1e-9 * length
        assert counted.steps == cost.steps
        assert -rounding_bytes <= counted.bytes_sent - cost.bytes_sent <= slack_bytes
        assert -rounding_bytes <= counted.bytes_reduced - cost.bytes_reduced <= slack_bytes


@pytest.mark.parametrize("p", [2, 4, 8, 16, 32])
def test_the_papers_figures(p: int) -> None:
    # Goyal et al. 2017, section 4: 2 (p - 1) steps and 2 log2 p; both move 2 b (p - 1) / p bytes.
    length = 32 * 5
    bytes_sent = 2 * (4 * length) * (p - 1) / p
    for plan, steps in (
        (ring(p, length=length), 2 * (p - 1)),
        (halving_doubling(p, length=length), 2 * math.log2(p)),
    ):
        assert plan_cost(plan, item_bytes=4) == PlanCost(int(steps), bytes_sent, bytes_sent / 2)
        for rank in range(p):
            pieces = [piece for step in plan.steps_of(rank) for piece in step.sends]
            assert sum(4 * (piece.end - piece.begin) for piece in pieces) == bytes_sent


@pytest.mark.parametrize("p", [3, 5, 6, 7, 9, 12, 17, 24])
def test_binary_blocks_take_two_steps_more_than_the_largest_block(p: int) -> None:
    assert binary_blocks(p, length=64).num_steps == 2 * math.floor(math.log2(p)) + 2


@pytest.mark.parametrize(
    ("cost", "expected"),
    [
        # Halvings by 1/2, 1/4, 1/8, and as many doublings; swaps of 1/4, twice 1/2, thrice 1.
        (halving_doubling_cost(8, size_bytes=800), PlanCost(6, 1400, 700)),
        (halving_doubling_cost(8, size_bytes=800, halvings=2), PlanCost(5, 1400, 800)),
        (halving_doubling_cost(8, size_bytes=800, halvings=1), PlanCost(4, 1600, 1200)),
        (halving_doubling_cost(8, size_bytes=800, halvings=0), PlanCost(3, 2400, 2400)),
        # The whole buffer in, and out.
        (halving_doubling_cost(9, size_bytes=800, halvings=0), PlanCost(5, 4000, 3200)),
        # {4, 2}: 1/2, 1/4, then the block of two sends halves, which are added as quarters.
        (binary_blocks_cost(6, size_bytes=800), PlanCost(6, 2000, 800)),
        # {4, 2, 1}: 1/2; then the whole from the single rank while others send 1/4; then halves.
        (binary_blocks_cost(7, size_bytes=800), PlanCost(6, 3200, 1000)),
        (ring_cost(5, size_bytes=800), PlanCost(8, 1280, 640)),
        (inside_host_cost(4, size_bytes=800), PlanCost(2, 1200, 600)),
        (inside_host_cost(1, size_bytes=800), PlanCost(0, 0, 0)),
        (
            hierarchical_cost(2, members_per_host=4, size_bytes=800, inter="ring"),
            PlanCost(4, 1200 + 200, 600 + 100),
        ),
    ],
)
def test_costs_reckoned_by_hand(cost: PlanCost, expected: PlanCost) -> None:
    assert cost == expected


@pytest.mark.parametrize("algorithm", ["ring", "halving_doubling", "binary_blocks"])
def test_one_worker_costs_nothing(algorithm: str) -> None:
    assert algorithm_cost(algorithm, 1, size_bytes=8) == PlanCost(0, 0, 0)  # type: ignore[arg-type]


def test_a_thousand_workers() -> None:
    size_bytes = 100e6
    assert ring_cost(1024, size_bytes=size_bytes).steps == 2046
    assert halving_doubling_cost(1024, size_bytes=size_bytes).steps == 20
    assert binary_blocks_cost(1023, size_bytes=size_bytes).steps == 20


def test_no_elements_cost_nothing() -> None:
    assert plan_cost(ring(4, length=0), item_bytes=4) == PlanCost(0, 0, 0)


def test_seconds() -> None:
    link = LinkCost(latency_seconds=0.5, seconds_per_byte=0.25, reduce_seconds_per_byte=2.0)
    assert PlanCost(steps=3, bytes_sent=8, bytes_reduced=5).seconds(link) == 1.5 + 2.0 + 10.0
    assert PlanCost(3, 8, 5).seconds(LinkCost(0.5, 0.25)) == 3.5


@pytest.mark.parametrize(
    ("algorithm", "cost"),
    [
        ("ring", ring_cost(12, size_bytes=96)),
        ("halving_doubling", halving_doubling_cost(12, size_bytes=96)),
        ("binary_blocks", binary_blocks_cost(12, size_bytes=96)),
    ],
)
def test_costs_by_name(algorithm: str, cost: PlanCost) -> None:
    assert algorithm_cost(algorithm, 12, size_bytes=96) == cost  # type: ignore[arg-type]


def test_best_halvings_by_hand() -> None:
    link = LinkCost(latency_seconds=1.0, seconds_per_byte=1.0)
    # Of 8 workers h = 0, 1, 2, 3 take 3 + 3 b, 4 + 2 b, 5 + 7/4 b, 6 + 7/4 b seconds: equal at
    # b = 1 for the first two, and at b = 4 for the next.
    assert [best_halvings(8, size_bytes=b, link=link) for b in (0, 0.9, 1.1, 3.9, 4.1, 1e9)] == [
        0, 0, 1, 1, 2, 2,
    ]  # fmt: skip
    # The last halving saves b / 8 additions for one step more.
    adding = LinkCost(latency_seconds=1.0, seconds_per_byte=0.0, reduce_seconds_per_byte=1.0)
    assert [best_halvings(8, size_bytes=b, link=adding) for b in (7.9, 8.1)] == [2, 3]
    assert best_halvings(1, size_bytes=5, link=link) == 0


@given(
    p=st.integers(1, 2000),
    size_bytes=st.floats(0, 1e9),
    alpha=st.floats(0, 1),
    beta=st.floats(0, 1e-6),
)
def test_no_number_of_halvings_beats_the_best(
    p: int, size_bytes: float, alpha: float, beta: float
) -> None:
    link = LinkCost(alpha, beta)
    seconds = [
        halving_doubling_cost(p, size_bytes=size_bytes, halvings=h).seconds(link)
        for h in range(int(math.log2(p)) + 1)
    ]
    assert seconds[best_halvings(p, size_bytes=size_bytes, link=link)] == min(seconds)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: LinkCost(-1e-6, 0.0), "latency_seconds=-1e-06: must be a finite number"),
        (lambda: LinkCost(0.0, math.nan), "seconds_per_byte=nan"),
        (lambda: LinkCost(0.0, 0.0, math.inf), "reduce_seconds_per_byte=inf"),
        (lambda: ring_cost(0, size_bytes=1), "num_workers=0"),
        (lambda: ring_cost(2, size_bytes=-1), "size_bytes=-1"),
        (lambda: halving_doubling_cost(4, size_bytes=1, halvings=3), "halvings=3: .* 2 times"),
        (lambda: inside_host_cost(0, size_bytes=1), "members_per_host=0"),
        (
            lambda: hierarchical_cost(0, members_per_host=2, size_bytes=1, inter="ring"),
            "num_hosts=0",
        ),
        (lambda: algorithm_cost("tree", 4, size_bytes=1), "algorithm='tree': must be"),  # type: ignore[arg-type]
        (
            lambda: algorithm_cost("ring", 4, size_bytes=1, halvings=1),
            "only 'halving_doubling' takes halvings",
        ),
        (lambda: plan_cost(ring(2, length=2), item_bytes=0), "item_bytes=0"),
    ],
)
def test_refused(call, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        call()
