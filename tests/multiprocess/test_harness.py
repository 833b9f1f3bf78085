"""The harness itself: results come back, failures are told, nothing stays behind."""

from __future__ import annotations

import json
import os
import re

import numpy as np
import psutil
import pytest
from harness import CaseFailed, WorkerResult, WorkersFailed, case_values, run_workers

FILE = "harness_selftest.py"
pytestmark = [pytest.mark.alone, pytest.mark.timeout(60)]


def module_level_function() -> int:
    return json.loads(os.environ["TF_CONFIG"])["task"]["index"] * 10


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.fixture(scope="module")
def workers() -> list[WorkerResult]:
    env = [{"EXTRA": "zero"}, {"EXTRA": "one"}]
    return run_workers(FILE, 2, replicas_per_worker=2, env=env, timeout_seconds=30)


def test_values_come_back_in_rank_order_with_their_types(workers: list[WorkerResult]) -> None:
    values = case_values(workers, "case_rank")
    assert [value["rank"] for value in values] == [0, 1]
    assert [value["pair"] for value in values] == [(1, None)] * 2
    for value in values:
        assert value["array"].dtype == np.float32
        np.testing.assert_array_equal(value["array"], np.arange(3, dtype=np.float32) / 3)


def test_environment_of_each_rank(workers: list[WorkerResult]) -> None:
    values = case_values(workers, "case_environment")
    addresses = [worker.address for worker in workers]
    assert len(set(addresses)) == 2
    for rank, value in enumerate(values):
        config = json.loads(value["TF_CONFIG"])
        assert config["cluster"] == {"worker": addresses}
        assert config["task"] == {"type": "worker", "index": rank}
        assert value["TF_LARGEBATCH_CPU_REPLICAS"] == "2"
        assert value["CUDA_VISIBLE_DEVICES"] == "-1"
        assert value["EXTRA"] == ["zero", "one"][rank]


def test_an_exception_stays_with_its_case_and_rank(workers: list[WorkerResult]) -> None:
    with pytest.raises(CaseFailed, match="rank 1 does not like this") as caught:
        case_values(workers, "case_raises_on_rank_1")
    assert "rank 0" not in str(caught.value)
    assert workers[0].result["case_raises_on_rank_1"] == {"value": 0}
    assert workers[1].result["case_raises_on_rank_1"]["error_type"] == "ValueError"


def test_only_plain_values_are_handed_back(workers: list[WorkerResult]) -> None:
    with pytest.raises(CaseFailed, match="NumPy arrays"):
        case_values(workers, "case_not_plain")


def test_a_case_that_did_not_run_is_no_success(workers: list[WorkerResult]) -> None:
    with pytest.raises(CaseFailed, match="did not get there"):
        case_values(workers, "case_of_another_file")


def test_one_function_on_some_ranks() -> None:
    results = run_workers(module_level_function, 3, ranks=[0, 2], timeout_seconds=30)
    assert [worker.rank for worker in results] == [0, 2]
    assert case_values(results, "module_level_function") == [0, 20]


def test_a_hang_is_killed_with_its_children_and_shown() -> None:
    with pytest.raises(WorkersFailed, match=r"ranks \[0, 1\] did not end") as caught:
        run_workers(FILE, 2, cases=["hang_with_grandchild"], timeout_seconds=0.8)
    text = str(caught.value)
    assert "rank 0 hangs" in text and "rank 1 hangs" in text
    assert "in hang_with_grandchild" in text  # the stack at the time
    grandchildren = re.findall(r"grandchild (\d+) end", text)
    assert len(grandchildren) == 2
    assert all(is_gone(int(pid)) for pid in grandchildren)


def test_orphans_of_workers_that_succeeded_are_killed() -> None:
    results = run_workers(FILE, 1, cases=["leave_an_orphan"], timeout_seconds=30)
    (pid,) = case_values(results, "leave_an_orphan")
    assert is_gone(pid)


def test_a_crash_stops_the_others_and_is_shown() -> None:
    with pytest.raises(WorkersFailed, match="rank 1 ended with 3") as caught:
        run_workers(FILE, 2, cases=["crash_on_rank_1"], timeout_seconds=30, grace_seconds=0.1)
    assert "about to crash" in str(caught.value)


def test_an_expected_failure_is_handed_back() -> None:
    results = run_workers(FILE, 2, cases=["crash_alone"], timeout_seconds=30, expect_failure=True)
    assert [worker.returncode for worker in results] == [0, 3]
    assert results[1].result == {}


def test_an_expected_failure_that_does_not_come_is_a_failure() -> None:
    with pytest.raises(WorkersFailed, match="no worker failed"):
        run_workers(FILE, 1, cases=["case_rank"], timeout_seconds=30, expect_failure=True)
