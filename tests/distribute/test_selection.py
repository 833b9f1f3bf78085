"""Which plan a buffer gets, and what is told about it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import tensorflow as tf

from tf_largebatch.core.algorithm_choice import AllReduceCosts, Candidate
from tf_largebatch.core.collective_plan import AllReducePlan
from tf_largebatch.core.cost_model import LinkCost
from tf_largebatch.distribute._selection import AlgorithmSelector


def selector_of(
    workers: int = 8,
    replicas: int = 1,
    *,
    step: float = 1e-3,
    byte: float = 1e-6,
    overhead: float = 2e-3,
    tensorflow: tuple[float, float] = (50e-3, 4e-6),
) -> AlgorithmSelector:
    selector = AlgorithmSelector(num_workers=workers, replicas_per_worker=replicas)
    costs = AllReduceCosts(
        num_workers=workers,
        replicas_per_worker=replicas,
        link=LinkCost(step, byte),
        overhead_seconds=overhead,
        tensorflow_seconds=tensorflow[0],
        tensorflow_seconds_per_byte=tensorflow[1],
    )
    selector.use(costs, "made up")
    return selector


def steps(plan: AllReducePlan | None) -> list[Any] | None:
    """All that a plan says, as plans do not compare."""
    if plan is None:
        return None
    return [plan.algorithm, *(plan.steps_of(rank) for rank in range(plan.num_workers))]


def test_equal_costs_give_equal_plans_in_whatever_order_they_are_asked_for() -> None:
    asked = [
        (option, length, item_bytes, wider)
        for option in ("auto", "ring", "halving_doubling")
        for length in (1, 100, 3_000, 1_000_000)
        for item_bytes, wider in ((4, False), (2, True), (8, False))
    ]

    def plans(selector: AlgorithmSelector, order: list[Any]) -> dict[Any, Any]:
        return {
            key: steps(
                selector.plan(key[0], length=key[1], item_bytes=key[2], sums_wider_than_wire=key[3])
            )
            for key in order
        }

    for workers, replicas in ((6, 1), (2, 2)):
        first, second = selector_of(workers, replicas), selector_of(workers, replicas)
        assert plans(first, asked) == plans(second, asked[::-1])
        assert plans(first, asked) == plans(first, asked), "a decision once made stays"


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        # Of eight workers, in ms with b in kB: swaps 2 + 3 + 3 b, one halving 2 + 4 + 2 b, two
        # 2 + 5 + 7/4 b, the ring 2 + 14 + 7/4 b.
        (200, ("halving_doubling", 3)),
        (500, ("halving_doubling", 4)),  # 2 kB: 11, 10, 10.5
        (2500, ("halving_doubling", 5)),  # 10 kB: 35, 26, 24.5, 33.5
    ],
)
def test_auto_takes_what_is_predicted_to_be_the_fastest(
    length: int, expected: tuple[str, int]
) -> None:
    plan = selector_of().plan("auto", length=length, item_bytes=4)
    assert plan is not None and (plan.algorithm, plan.num_steps) == expected
    assert (plan.num_workers, plan.length) == (8, length)


def test_tensorflows_own_is_no_plan() -> None:
    cheap = selector_of(tensorflow=(1e-3, 1e-9))
    assert cheap.plan("auto", length=1000, item_bytes=4) is None
    assert cheap.plan("tensorflow", length=1000, item_bytes=4) is None
    # 50 ms and 4 ms a kB never win, but are what was asked for.
    assert selector_of().plan("tensorflow", length=1000, item_bytes=4) is None


def test_tensorflows_own_is_out_where_sums_are_wider_than_what_travels() -> None:
    cheap = selector_of(tensorflow=(0.0, 0.0))
    plan = cheap.plan("auto", length=500, item_bytes=2, sums_wider_than_wire=True)
    # 1 kB by 8 workers: 2 + 3 + 3, 2 + 4 + 2, 2 + 5 + 1.75; of equals the first.
    assert plan is not None and (plan.algorithm, plan.num_steps) == ("halving_doubling", 3)
    # The same bytes as float32 may still be TensorFlow's.
    assert cheap.plan("auto", length=250, item_bytes=4) is None


def test_the_bytes_that_travel_decide() -> None:
    # 2 kB take four steps (see above), 1 kB three.
    as_float32 = selector_of().plan("auto", length=500, item_bytes=4)
    as_half = selector_of().plan("auto", length=500, item_bytes=2, sums_wider_than_wire=True)
    assert as_float32 is not None and as_float32.num_steps == 4
    assert as_half is not None and as_half.num_steps == 3


def test_a_worker_of_several_replicas_has_a_hierarchical_plan() -> None:
    plan = selector_of(3, 2).plan("ring", length=100, item_bytes=4)
    assert plan is not None and plan.algorithm == "hierarchical"
    assert (plan.num_workers, plan.num_steps) == (6, 2 + 4)


@pytest.mark.parametrize("item_bytes", [2, 4, 8, 16])
@pytest.mark.parametrize("replicas", [1, 2])
def test_pieces_begin_at_multiples_of_64_bytes(item_bytes: int, replicas: int) -> None:
    plan = selector_of(5, replicas).plan("ring", length=1001, item_bytes=item_bytes)
    assert plan is not None
    begins = {
        piece.begin * item_bytes
        for rank in range(plan.num_workers)
        for step in plan.steps_of(rank)
        for piece in step.sends
    }
    assert len(begins) >= 5
    assert all(begin % 64 == 0 for begin in begins)


@pytest.mark.parametrize("item_bytes", [64, 100])
def test_an_item_larger_than_that_begins_anywhere(item_bytes: int) -> None:
    plan = selector_of(3).plan("ring", length=3, item_bytes=item_bytes)
    assert plan is not None
    assert [step.sends[0].begin for step in plan.steps_of(0)[:2]] == [0, 2]


def test_before_anything_is_measured_costs_are_typical() -> None:
    selector = AlgorithmSelector(num_workers=4, replicas_per_worker=2)
    assert selector.costs == AllReduceCosts.typical(4, replicas_per_worker=2)
    assert selector.report() == (
        "Costs (typical costs, as nothing was measured): a call 1.000 ms, a step 0.500 ms, a MiB "
        "that travels 2.097 ms; TensorFlow's own all-reduce 8.000 ms and 3.670 ms a MiB.\n"
        "  No buffer was reduced yet."
    )


def test_the_report_names_what_was_chosen_and_what_else_there_was() -> None:
    selector = selector_of()
    for option, length in (("auto", 2500), ("ring", 2500), ("auto", 500), ("auto", 500)):
        selector.plan(option, length=length, item_bytes=4)
    assert selector.report().split("\n") == [
        "Costs (made up): a call 2.000 ms, a step 1.000 ms, a MiB that travels 1048.576 ms; "
        "TensorFlow's own all-reduce 50.000 ms and 4194.304 ms a MiB.",
        "  2000 bytes, 'auto': halving_doubling[halvings=1] 10.00 ms predicted (others: "
        "halving_doubling[halvings=2] 10.50 ms, halving_doubling[halvings=0] 11.00 ms, ring "
        "19.50 ms, tensorflow 58.00 ms)",
        "  10000 bytes, 'auto': halving_doubling[halvings=2] 24.50 ms predicted (others: "
        "halving_doubling[halvings=1] 26.00 ms, ring 33.50 ms, halving_doubling[halvings=0] "
        "35.00 ms, tensorflow 90.00 ms)",
        "  10000 bytes, 'ring': ring 33.50 ms predicted",
    ]


def test_a_plan_asked_for_is_no_decision() -> None:
    selector = selector_of()
    plan = selector.plan_of(Candidate("ring"), length=tf.float32.size, item_bytes=4)
    assert plan is not None and plan.algorithm == "ring"
    assert selector.plan_of(Candidate("tensorflow"), length=4, item_bytes=4) is None
    assert "No buffer was reduced yet" in selector.report()


def test_new_costs_decide_from_then_on() -> None:
    selector = selector_of()
    few_steps = selector.plan("auto", length=200, item_bytes=4)
    assert few_steps is not None and few_steps.num_steps == 3
    cheap_steps = selector_of(step=0.0).costs
    assert math.isclose(cheap_steps.link.seconds_per_byte, 1e-6)
    selector.use(cheap_steps, "measured anew")
    few_bytes = selector.plan("auto", length=200, item_bytes=4)
    # Seven quarters of the buffer: the ring, which is named first of those that send as little.
    assert few_bytes is not None and few_bytes.algorithm == "ring"


def nccl_selector(workers: int, replicas: int) -> AlgorithmSelector:
    return AlgorithmSelector(num_workers=workers, replicas_per_worker=replicas, has_nccl=True)


@pytest.mark.parametrize("option", ["auto", "ring", "tensorflow"])
def test_with_nccl_its_own_choice_stands(option: str) -> None:
    for workers, replicas in ((1, 8), (3, 1), (4, 2)):
        selector = nccl_selector(workers, replicas)
        assert selector.plan(option, length=1000, item_bytes=4) is None


@pytest.mark.parametrize(
    ("workers", "replicas", "algorithm", "steps"),
    [
        # One halving less than there could be: it sends as much in a step less.
        (2, 1, "halving_doubling", 1),
        (8, 1, "halving_doubling", 5),
        (4, 2, "hierarchical", 2 + 3),
        (1, 8, "hierarchical", 2),
    ],
)
def test_with_nccl_pieces_are_equal(
    workers: int, replicas: int, algorithm: str, steps: int
) -> None:
    members = workers * replicas
    for length in (1, 8, 1001):
        plan = nccl_selector(workers, replicas).plan(
            "halving_doubling", length=length, item_bytes=4
        )
        assert plan is not None and (plan.algorithm, plan.num_steps) == (algorithm, steps)
        assert plan.length == -(-length // members) * members
        for step in zip(*map(plan.steps_of, range(members)), strict=True):
            pieces = [piece for of_rank in step for piece in (*of_rank.sends, *of_rank.receives)]
            assert len({piece.end - piece.begin for piece in pieces}) == 1


def test_with_nccl_the_report_says_so() -> None:
    assert "Collectives are NCCL's" in nccl_selector(2, 4).report()
    assert "NCCL" not in selector_of().report()


def mpi_selector(workers: int) -> AlgorithmSelector:
    return AlgorithmSelector(num_workers=workers, replicas_per_worker=1, has_mpi=True)


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_with_mpi_its_own_choice_stands(workers: int) -> None:
    selector = mpi_selector(workers)
    for length in (1, 1000, 10_000_000):
        assert selector.plan("auto", length=length, item_bytes=4) is None
    # Whatever the costs say: nothing was measured of MPI's own.
    slow = AllReduceCosts(
        num_workers=workers,
        replicas_per_worker=1,
        link=LinkCost(0.0, 0.0),
        overhead_seconds=0.0,
        tensorflow_seconds=100.0,
        tensorflow_seconds_per_byte=1.0,
    )
    selector.use(slow, "made up")
    assert selector.plan("auto", length=1001, item_bytes=4) is None


@pytest.mark.parametrize(
    ("workers", "option", "algorithms"),
    [
        (2, "ring", {"ring"}),
        (8, "ring", {"ring"}),
        (8, "halving_doubling", {"halving_doubling"}),
        (6, "halving_doubling", {"halving_doubling", "binary_blocks"}),
    ],
)
def test_with_mpi_a_plan_that_is_asked_for_is_taken(
    workers: int, option: str, algorithms: set[str]
) -> None:
    for length in (1, 1000, 1_000_001):
        plan = mpi_selector(workers).plan(option, length=length, item_bytes=4)
        assert plan is not None and plan.algorithm in algorithms
        assert (plan.num_workers, plan.length) == (workers, length)


def test_with_mpi_sums_wider_than_the_wire_need_a_plan() -> None:
    plan = mpi_selector(4).plan("auto", length=1000, item_bytes=2, sums_wider_than_wire=True)
    assert plan is not None and plan.algorithm in ("ring", "halving_doubling")


def test_with_mpi_the_report_names_what_sums_without_predictions() -> None:
    selector = mpi_selector(4)
    selector.plan("auto", length=1000, item_bytes=4)
    selector.plan("ring", length=2000, item_bytes=4, at_once=3)
    first, *decisions = selector.report().splitlines()
    assert first.startswith("Buckets travel by MPI") and "'mpi' below" in first
    assert decisions == ["  4000 bytes, 'auto': mpi", "  8000 bytes, 3 at once, 'ring': ring"]
    assert "MPI" not in selector_of().report()
