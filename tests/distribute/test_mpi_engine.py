"""Buckets in the engine of three real ranks: in order, checked before they travel, never stuck."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from _mpi_alone import saved

from tests.mpi_processes import MpiLaunch, why_not
from tf_largebatch.core.topology import ClusterTopology
from tf_largebatch.distribute import _mpi_engine
from tf_largebatch.distribute._mpi_engine import Bucket, TransferEngine

needs_mpi = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
SCRIPT = Path(__file__).parent / "_mpi_engine_script.py"


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("engine")
    ended = MpiLaunch(str(SCRIPT), str(folder), num_ranks=3).wait(100.0)
    results = saved(folder)
    assert len(results) == 3, ended.log
    return results


def of(by_rank: list[Any], case: str) -> list[dict[str, Any]]:
    return [results[case] for results in by_rank]


@needs_mpi
@pytest.mark.parametrize(
    "case", ["case_order", "case_order_of_shared_cores", "case_order_of_callers_that_linger"]
)
def test_buckets_of_all_sizes_start_in_the_order_in_which_they_are_handed_in(
    by_rank: list[Any], case: str
) -> None:
    for end in of(by_rank, case):
        assert end["tags"] == [[place] for place in range(60)]
        assert end["summed"] == [True] * 60
        assert end["delivered"] == [[None]] * 60
        assert (end["waiting"], end["closed"]) == ((0.0, ""), True)


@needs_mpi
def test_any_thread_may_hand_in(by_rank: list[Any]) -> None:
    for end in of(by_rank, "case_threads"):
        assert end == {"summed": [True, True], "closed": True}


@needs_mpi
@pytest.mark.parametrize(
    ("case", "keys"),
    [
        ("case_other_key", (7, 6, 7)),
        ("case_all_keys_differ", (10, 11, 12)),
        ("case_other_order", (7, 7, 8)),
    ],
)
def test_different_buckets_are_shown_on_all_ranks_and_never_summed(
    by_rank: list[Any], case: str, keys: tuple[int, ...]
) -> None:
    for end in of(by_rank, case):
        text = end["failure"]
        for rank, (key, address) in enumerate(zip(keys, ("a:1", "b:2", "c:3"), strict=True)):
            assert f"\n  worker {rank} at {address}: {key} float32 of rank {rank}\n" in text
        assert "workers run different programs" in text
        assert "call fit, evaluate and strategy.reduce on all of them alike." in text
        assert end["good"] == [[None], [None]]
        assert end["delivered"] == [[text]] * len(end["delivered"])
        assert end["later"] == [text]
        assert end["untouched"]
        assert (end["waiting"], end["closed"]) == ((0.0, ""), True)


@needs_mpi
def test_a_failure_ends_all_waits_at_once_and_those_to_come(by_rank: list[Any]) -> None:
    for end in of(by_rank, "case_fail")[:2]:
        assert end["before"] == [[], []]
        assert end["delivered"] == [["the reason"]] * 2
        assert end["later"] == ["the reason"], "the first one stays"
        assert end["seconds"] < 0.5
        assert end["tags"] == [[], []]
        assert (end["waiting"], end["closed"]) == ((0.0, ""), True)


@needs_mpi
def test_a_rank_may_be_late(by_rank: list[Any]) -> None:
    """Whether it is too late is for the watch to say, not for the time that values travel."""
    ends = of(by_rank, "case_late")
    for end in ends:
        assert end["idle"] == end["afterwards"] == (0.0, "")
        assert end["summed"] == [True, True] and end["closed"]
    for end in ends[:2]:
        seconds, what = end["seen"]["waiting"]
        assert 1.0 <= seconds < 5.0
        assert what == "number 1"
        assert (end["seen"]["delivered"], end["seen"]["failure"]) == ([], None)


@needs_mpi
def test_an_engine_that_still_waits_says_so_when_it_is_closed(by_rank: list[Any]) -> None:
    ends = of(by_rank, "case_close")
    assert ends[2]["closed"] == [True]
    for end in ends[:2]:
        assert end == {"closed": [False, True], "delivered": ["no longer"]}


@needs_mpi
def test_values_that_do_not_come_in_time_end_it(by_rank: list[Any]) -> None:
    for rank, end in enumerate(of(by_rank, "case_values_do_not_come")):
        (text,) = end["delivered"]
        address = ("a:1", "b:2", "c:3")[rank]
        assert text.startswith(
            f"worker {rank} at {address}: the values of the silent one have not come within "
            "timeout_seconds=0.5"
        )
        assert end["next"] in ([text], [None])  # it may have come meanwhile
        assert 0.5 <= end["seconds"] < 5.0 and end["closed"]


@needs_mpi
def test_an_error_of_mpi_is_delivered(by_rank: list[Any]) -> None:
    ends = of(by_rank, "case_transfer_raises")
    assert ends[1]["delivered"] == ["MPI failed on worker 1: no transfer to be had"]
    for end in (ends[0], ends[2]):
        assert "the values of the broken one have not come" in end["delivered"][0]
    assert all(end["closed"] for end in ends)


@needs_mpi
def test_all_get_what_all_have_said(by_rank: list[Any]) -> None:
    for rank, end in enumerate(of(by_rank, "case_exchange")):
        assert end["small"] == [
            [{"rank": other, "turn": turn} for other in range(3)] for turn in range(50)
        ]
        assert end["sizes"] == [1, 16 * 1024 - 2, 1]
        assert end["names"] == [f'ä\n"{other}' for other in range(3)]
        kind, text = end["too long"]
        size = (16 * 1024 - 2 if rank == 1 else 1) + 16_384 + 2
        assert kind == "ValueError" and f"{size} bytes is too long" in text


@needs_mpi
def test_who_says_nothing_is_named(by_rank: list[Any]) -> None:
    ends = of(by_rank, "case_exchange_without_one")
    for rank in (0, 2):
        kind, text = ends[rank]["error"]
        assert kind == "PeerTimeoutError"
        assert f"Rank {rank} of 3 has waited start_timeout_seconds=0.5" in text
        assert "MPI's rank(s) 1, which started MPI" in text
        assert 0.5 <= ends[rank]["seconds"] < 3.0


# --- Without MPI


class LateHeader:
    """A communicator, and a header's request, in memory: it arrives when the test says so."""

    size, rank, IN_PLACE, MAX = 1, 0, None, None

    def __init__(self) -> None:
        self.has_come = threading.Event()

    def Dup(self) -> LateHeader:
        return self

    def Iallreduce(self, *_: Any, **__: Any) -> LateHeader:
        return self

    def Test(self) -> bool:
        return self.has_come.is_set()


def test_a_bucket_may_be_there_before_the_thread_is(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = threading.Event()

    class LateThread(threading.Thread):
        def run(self) -> None:
            begin.wait()
            super().run()

    monkeypatch.setattr(_mpi_engine.threading, "Thread", LateThread)
    comm = LateHeader()
    engine = TransferEngine(comm, comm, ClusterTopology(), timeout_seconds=5.0)
    delivered: list[str | None] = []
    engine.submit(Bucket("early", 1, lambda tag: iter(()), delivered.append))
    begin.set()
    time.sleep(0.05)  # it asks, in vain
    comm.has_come.set()
    deadline = time.monotonic() + 5.0
    while not delivered and time.monotonic() < deadline:
        time.sleep(0.001)
    assert delivered == [None]
    assert engine.close(timeout_seconds=5.0)
