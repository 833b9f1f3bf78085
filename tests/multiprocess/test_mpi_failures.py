"""What people see when something goes wrong among MPI's ranks: soon, and with a name.

All ranks are forks of one process that `workers/mpi_failures.py` runs in, one case after the other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from harness import WorkerResult, case_values, run_workers

from tests.mpi_processes import why_not

pytestmark = [
    pytest.mark.timeout(500),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

# The watch looks after 3 s, and a rank that ended badly gives the others 10 s; the rest is what a
# busy machine needs.
SOON_SECONDS = 40.0
End = dict[str, Any]


@pytest.fixture(scope="module")
def launch() -> Iterator[list[WorkerResult]]:
    yield run_workers("mpi_failures.py", 1, timeout_seconds=400.0)


def ends_of(launch: list[WorkerResult], case: str, cluster: str) -> dict[int, End]:
    return case_values(launch, case)[0][cluster]


def addresses_of(ends: dict[int, End]) -> list[str]:
    """As the ranks agreed on them."""
    found = [re.findall(r"^STARTED (.*)$", end["log"], re.MULTILINE) for end in ends.values()]
    texts = {text for texts in found for text in texts}
    assert len(texts) == 1, texts
    return json.loads(texts.pop())


def error_of(end: End) -> str:
    """The exception that ended a rank, and what follows, in one line.

    A rank that gave up waiting for others says so, and aborts MPI, and with it itself.
    """
    assert end["returncode"] in (1, -9), end["log"][-4000:]
    found = re.search(r"^[\w.]+Error: ", end["log"], re.MULTILINE)
    assert found, end["log"][-4000:]
    return " ".join(end["log"][found.start() :].split()).replace("\\'", "'")  # as TensorFlow quotes


def acted_at(end: End) -> float:
    """When a rank did what the case is about."""
    (moment,) = re.findall(r"^ACTS (.*)$", end["log"], re.MULTILINE)
    return float(moment)


# --- Start


def test_a_rank_that_makes_no_strategy_is_named(launch: list[WorkerResult]) -> None:
    ends = ends_of(launch, "case_start", "mpi only")
    assert "IN MPI 1" in ends[1]["log"]
    assert error_of(ends[0]).startswith(
        "tf_largebatch.core.errors.PeerTimeoutError: Rank 0 of 2 has waited "
        "start_timeout_seconds=5 for MPI's rank(s) 1, which started MPI"
    )
    assert ends[0]["mpiexec"] != 0
    assert 5.0 <= ends[0]["seconds"] < SOON_SECONDS
    assert ends[1]["seconds"] < SOON_SECONDS, "it is ended as well"


def test_a_rank_that_never_starts_mpi_holds_up_nobody(launch: list[WorkerResult]) -> None:
    ends = ends_of(launch, "case_start", "nothing")
    error = error_of(ends[0])
    assert error.startswith(
        "tf_largebatch.core.errors.PeerTimeoutError: MPI of rank 0, one of 2 that mpiexec started, "
        "has not come up within start_timeout_seconds=5"
    )
    assert "This process ends now" in error
    assert ends[0]["returncode"] == 1
    assert 5.0 <= ends[0]["seconds"] < SOON_SECONDS


def test_ranks_would_train_alone_with_transport_tensorflow(launch: list[WorkerResult]) -> None:
    ends = ends_of(launch, "case_start", "by_tensorflow")
    for rank, end in ends.items():
        assert error_of(end).startswith(
            f"tf_largebatch.core.errors.TopologyError: mpiexec started this process as rank {rank} "
            "of 2"
        )
        assert "transport='mpi'" in error_of(end)


def test_tf_config_names_another_number_of_workers(launch: list[WorkerResult]) -> None:
    ends = ends_of(launch, "case_start", "in_another_cluster")
    for end in ends.values():
        assert error_of(end).startswith(
            "tf_largebatch.core.errors.TopologyError: TF_CONFIG names 3 workers, but MPI has 2 "
            "rank(s)."
        )
        assert end["seconds"] < SOON_SECONDS


def test_settings_differ(launch: list[WorkerResult]) -> None:
    ends = ends_of(launch, "case_start", "with_other_settings")
    for end in ends.values():
        assert "errors.MismatchError: " in error_of(end)
        assert 'all_reduce: "auto" on worker 0; "ring" on worker 1' in error_of(end)


def test_tf_config_may_count_the_other_way_round(launch: list[WorkerResult]) -> None:
    ends = ends_of(launch, "case_start", "in_another_order")
    for end in ends.values():
        assert (end["returncode"], end["mpiexec"]) == (0, 0), end["log"][-4000:]
        assert "SUM [2.0, 1.0]" in end["log"]  # worker 0 is rank 1, which gives 2
    assert len(addresses_of(ends)) == 2


# --- A rank dies, raises or hangs


@pytest.mark.parametrize(("who", "dead"), [("one", 1), ("chief", 0)])
def test_a_killed_rank_is_named_and_ends_the_others(
    launch: list[WorkerResult], who: str, dead: int
) -> None:
    ends = ends_of(launch, "case_training", f"{who} killed")
    address = addresses_of(ends)[dead]
    assert ends[dead]["returncode"] == -9
    others = [end for rank, end in ends.items() if rank != dead]
    assert len(others) == (2 if who == "one" else 1)
    for end in others:
        assert re.search(rf"worker {dead} at {re.escape(address)}\b", error_of(end))
        assert "is gone" in error_of(end)
        assert end["seconds"] < SOON_SECONDS
        assert end["mpiexec"] != 0


@pytest.mark.parametrize(("who", "raiser"), [("one", 1), ("chief", 0)])
def test_a_rank_that_raises_tells_the_others(
    launch: list[WorkerResult], who: str, raiser: int
) -> None:
    ends = ends_of(launch, "case_training", f"{who} raises")
    said = (
        rf"worker {raiser} at {addresses_of(ends)[raiser]}(, which)? has ended with ValueError: an "
        "error of the user's own"
    )
    assert "ValueError: an error of the user's own" in error_of(ends[raiser])
    for rank, end in ends.items():
        assert end["returncode"] == 1 and end["mpiexec"] != 0
        assert rank == raiser or re.search(said, error_of(end))
        assert end["seconds"] - acted_at(ends[raiser]) < SOON_SECONDS


def test_a_hanging_rank_is_named(launch: list[WorkerResult]) -> None:
    ends = ends_of(launch, "case_training", "one hangs")
    addresses = addresses_of(ends)
    assert re.search(
        rf"worker 0 at {addresses[0]} has waited \d+ s \(timeout_seconds=5\).* for: "
        rf"worker 1 at {addresses[1]} stands at arrival \d+",
        error_of(ends[0]),
    )
    assert 5.0 <= ends[0]["seconds"] - acted_at(ends[1]) < SOON_SECONDS


# --- Programs that differ


def test_models_that_differ_show_both_sides_on_both(launch: list[WorkerResult]) -> None:
    ends = ends_of(launch, "case_programs", "models")
    addresses = addresses_of(ends)
    for end in ends.values():
        assert "MismatchError: Workers must make the same variables" in error_of(end)
        for rank, what in enumerate(("dense/kernel float32(3, 4)", "dense/kernel float32(3, 5)")):
            assert re.search(
                rf"worker {rank} at {addresses[rank]} made \d+ variables, number \d+ of them: "
                rf"\S*{re.escape(what)}",
                error_of(end),
            )


def test_metrics_that_differ_show_both_sides_on_both(launch: list[WorkerResult]) -> None:
    ends = ends_of(launch, "case_programs", "metrics")
    for end in ends.values():
        assert "workers run different programs" in error_of(end)
        for rank, address in enumerate(addresses_of(ends)):
            assert re.search(rf"worker {rank} at {address}, arrival \d+: \[", error_of(end))


def test_sums_that_differ_show_both_sides_on_both(launch: list[WorkerResult]) -> None:
    ends = ends_of(launch, "case_programs", "sums")
    for end in ends.values():
        assert "workers run different programs" in error_of(end)
        for rank, address in enumerate(addresses_of(ends)):
            assert re.search(
                rf"worker {rank} at {address}(, arrival \d+)?: .*float32\({5 + rank},\)",
                error_of(end),
            )
        assert end["seconds"] < SOON_SECONDS


def test_whoever_sums_alone_after_fit_is_told(launch: list[WorkerResult]) -> None:
    ends = ends_of(launch, "case_programs", "sum after fit")
    assert ends[1]["returncode"] == 0
    assert f"worker 1 at {addresses_of(ends)[1]}, which has ended without an error" in error_of(
        ends[0]
    )
    assert "all it on all workers" in error_of(ends[0])
    assert ends[0]["seconds"] < SOON_SECONDS


def test_a_sum_of_one_rank_alone_is_named_on_both(launch: list[WorkerResult]) -> None:
    ends = ends_of(launch, "case_programs", "sum before fit")
    place = rf"worker 0 at {addresses_of(ends)[0]}, arrival \d+: "
    for end in ends.values():
        assert re.search(rf"{place}\[[0-9a-f]{{16}}\] mpi .*float32\(\)", error_of(end))
        assert "call it on all workers" in error_of(end)
        assert end["seconds"] < SOON_SECONDS


def test_a_step_after_one_that_failed_is_not_summed_with_it(launch: list[WorkerResult]) -> None:
    """The bucket that the failed one left is not taken for that of the next."""
    for end in ends_of(launch, "case_programs", "goes on").values():
        assert re.findall(r"^SUM (\d) (.*)$", end["log"], re.MULTILINE) == [
            ("0", "0.0"),
            ("1", "2.0"),
        ]
        assert "CAUGHT 2" in end["log"]
        assert "another step has begun" in error_of(end)
        assert end["seconds"] < SOON_SECONDS


def test_a_rank_that_hangs_within_a_step_is_named(launch: list[WorkerResult]) -> None:
    ends = ends_of(launch, "case_programs", "hangs within")
    late = f"for: worker 1 at {addresses_of(ends)[1]}. See that worker's log"
    assert late in error_of(ends[0])
    assert ends[0]["seconds"] < acted_at(ends[1]) + SOON_SECONDS


def test_the_end_of_a_fork_is_not_that_of_its_rank(launch: list[WorkerResult]) -> None:
    for end in ends_of(launch, "case_programs", "forks").values():
        assert (end["returncode"], end["mpiexec"]) == (0, 0), end["log"]
        assert "ACTS" in end["log"] and "tf_largebatch:" not in end["log"]


# --- No failure


@pytest.mark.parametrize("late", [0, 1])
def test_ranks_end_together_and_without_a_word(launch: list[WorkerResult], late: int) -> None:
    """MPI ends with all of them; so the early one waits for the late one."""
    ends = ends_of(launch, "case_programs", f"late {late}")
    assert acted_at(ends[late]) - acted_at(ends[1 - late]) > 2.5
    for end in ends.values():
        assert (end["returncode"], end["mpiexec"]) == (0, 0), end["log"]
        assert "Traceback" not in end["log"] and "tf_largebatch:" not in end["log"]
        assert acted_at(ends[late]) <= end["seconds"] < acted_at(ends[late]) + SOON_SECONDS
