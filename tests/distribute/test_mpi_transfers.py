"""All-reduces by real MPI, on 1 to 16 ranks: plans against their simulation, to the bit."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _mpi_alone import saved
from _mpi_transfer_cases import ROUNDS, WIRE_DTYPES, Case, cases

from tests.mpi_processes import run_ranks, why_not
from tf_largebatch.core.collective_plan import simulate

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

SCRIPT = Path(__file__).parent / "_mpi_transfers_script.py"
SIZES = sorted(size for sizes in ROUNDS for size in sizes)
WAYS = ("directly", "by the engine")


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("transfers")
    run_ranks(str(SCRIPT), str(folder), num_ranks=16, seconds=300.0)  # 10 where nothing else runs
    return saved(folder)


def of_group(by_rank: list[Any], num_ranks: int, way: str) -> list[dict[Case, Any]]:
    """By case, of each rank of the group: digest and, of the first rank alone, values."""
    return [results[num_ranks][way] for results in by_rank if num_ranks in results]


def inputs_of(case: Case, num_ranks: int) -> list[Any]:
    return [case.values(num_ranks, rank) for rank in range(num_ranks)]


def test_all_ranks_of_all_groups_took_part(by_rank: list[Any]) -> None:
    assert [*range(1, 10), 12, 16] == SIZES
    for num_ranks in SIZES:
        for way in WAYS:
            group = of_group(by_rank, num_ranks, way)
            assert len(group) == num_ranks
            assert all(list(results) == cases(num_ranks) for results in group)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_ranks", SIZES)
def test_all_ranks_hold_the_same_bits(by_rank: list[Any], num_ranks: int, way: str) -> None:
    first, *others = of_group(by_rank, num_ranks, way)
    for other in others:
        for case, (digest, _) in first.items():
            assert other[case][0] == digest, case


@pytest.mark.parametrize("num_ranks", SIZES)
def test_plans_are_what_their_simulation_says_to_the_bit(
    by_rank: list[Any], num_ranks: int
) -> None:
    checked = 0
    for case in cases(num_ranks):
        plan = case.plan(num_ranks)
        if plan is None:
            continue
        wire = WIRE_DTYPES[case.wire]
        to_wire = None if wire is None else lambda piece, wire=wire: piece.astype(wire)
        expected = simulate(plan, inputs_of(case, num_ranks), to_wire=to_wire)[0]
        digest = hashlib.sha256(expected.tobytes()).hexdigest()
        for way in WAYS:
            assert of_group(by_rank, num_ranks, way)[0][case][0] == digest, (case, way)
            checked += 1
    assert checked >= 90


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_ranks", SIZES)
def test_sums_are_those_of_float64(by_rank: list[Any], num_ranks: int, way: str) -> None:
    """Of whole numbers exactly; else up to a rounding each time that two terms meet."""
    for case, (_, values) in of_group(by_rank, num_ranks, way)[0].items():
        if case.wire is not None:
            continue  # rounded on the way: see the simulation
        rows = np.stack(inputs_of(case, num_ranks)).astype(np.float64)  # [rank, element]
        assert values.dtype == np.dtype(case.dtype) and values.shape == (case.length,)
        if case.dtype.startswith("int"):
            np.testing.assert_array_equal(values, rows.sum(axis=0), err_msg=str(case))
            continue
        rounding = np.finfo(case.dtype).eps / 2
        error = np.abs(values.astype(np.float64) - rows.sum(axis=0))
        # float64's own sum here rounds as well.
        allowed = np.abs(rows).sum(axis=0) * 2 * num_ranks * rounding
        assert np.all(error <= allowed), case


def test_rounding_on_the_wire_makes_a_difference(by_rank: list[Any]) -> None:
    """So that bits that are equal above say something of it."""
    results = of_group(by_rank, 4, "directly")[0]
    digests = {
        results[Case("ring", 1001, "float32", wire)][0] for wire in (None, "bfloat16", "float16")
    }
    assert len(digests) == 3
