"""Who waits for whom: the worker that computes less waits for the other in its collectives."""

from __future__ import annotations

import pytest
from harness import case_values, run_workers

pytestmark = [pytest.mark.timeout(300), pytest.mark.alone]

SHORT, LONG = 0.02, 0.12  # as workers/step_profile.py has them
LATE = 0.04


@pytest.fixture(scope="module")
def workers():
    return run_workers("step_profile.py", 2, timeout_seconds=240)


def test_the_faster_worker_waits_in_collectives(workers):
    fast, slow = case_values(workers, "case_parts")
    assert SHORT <= fast["compute"] <= SHORT + LATE
    assert LONG <= slow["compute"] <= LONG + LATE
    waited = LONG - SHORT
    assert waited - LATE <= fast["exposed_communication"] <= waited + LATE, fast
    assert slow["exposed_communication"] <= LATE, slow
    for own in (fast, slow):
        assert LONG <= own["seconds"] <= LONG + 2 * LATE
        assert own["input_wait"] <= LATE
        assert own["steps"] == 8


def test_each_worker_has_a_directory_of_its_own(workers):
    for folders, files in case_values(workers, "case_directories"):
        assert folders == ["worker_0", "worker_1"]
        assert files == ["plugins", "report.txt", "trace.json.gz"]
