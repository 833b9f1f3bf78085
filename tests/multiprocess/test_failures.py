"""What people see when something goes wrong in a real cluster: soon, and with a name.

All clusters are forks of one process that `workers/failures.py` runs in, one case after the other.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

import pytest
from harness import WorkerResult, case_values, run_workers

pytestmark = pytest.mark.timeout(500)

# The timeouts that are tested are 3 and 5 s; the rest is what a busy machine needs for an exit.
SOON_SECONDS = 40.0
End = dict[str, Any]


@pytest.fixture(scope="module")
def launch() -> Iterator[list[WorkerResult]]:
    yield run_workers("failures.py", 1, timeout_seconds=390.0)


def ends_of(launch: list[WorkerResult], case: str) -> list[dict[int, End]]:
    return case_values(launch, case)[0]


def last_error(end: End) -> str:
    """The text of the exception that ended a worker, without its stack."""
    assert end["returncode"] == 1, end["log"][-4000:]
    starts = [found.start() for found in re.finditer(r"^[\w.]+Error: ", end["log"], re.MULTILINE)]
    assert starts, end["log"][-4000:]
    return end["log"][starts[-1] :]


# --- Start


def test_one_of_two_is_started(launch: list[WorkerResult]) -> None:
    for (end,), absent in zip(
        [tuple(ends.values()) for ends in ends_of(launch, "case_one_of_two_is_started")],
        (1, 0),
        strict=True,
    ):
        error = last_error(end)
        assert error.startswith("tf_largebatch.core.errors.PeerTimeoutError: ")
        assert re.search(rf"worker {absent} at 127\.0\.0\.1:\d+[ ,]", error)
        assert "start_timeout_seconds=3" in error
        assert 3.0 <= end["seconds"] < SOON_SECONDS


@pytest.mark.parametrize(("cluster", "leaver"), [(0, 1), (1, 0)])
def test_a_peer_that_leaves_before_the_server_starts(
    launch: list[WorkerResult], cluster: int, leaver: int
) -> None:
    ends = ends_of(launch, "case_peer_leaves_before_the_server_starts")[cluster]
    assert "MET" in ends[leaver]["log"]
    waiting = ends[1 - leaver]
    assert waiting["returncode"] == 1, waiting["log"]
    assert "STARTED" not in waiting["log"]
    assert "PeerTimeoutError: TensorFlow's server of worker" in waiting["log"]
    assert f"no longer there: worker {leaver} at {ends[leaver]['address']}." in waiting["log"]
    assert 3.0 <= waiting["seconds"] < SOON_SECONDS


def test_settings_differ(launch: list[WorkerResult]) -> None:
    options, replicas, versions = ends_of(launch, "case_settings_differ")
    for end in options.values():
        assert last_error(end).startswith("tf_largebatch.core.errors.MismatchError: ")
        assert "timeout_seconds: 10.0 on worker 0; 11.0 on worker 1" in last_error(end)
    for end in replicas.values():
        assert "replicas_per_worker: 1 on worker 0; 2 on worker 1" in last_error(end)
    for end in versions.values():
        assert 'tf_largebatch: "0.0.0" on worker 0; "0.0.1" on worker 1' in last_error(end)


def test_a_busy_port(launch: list[WorkerResult]) -> None:
    (ends,) = ends_of(launch, "case_port_is_busy")
    assert last_error(ends[1]).startswith(
        "tf_largebatch.core.errors.ConfigurationError: "
        f"Worker 1 is to serve at {ends[1]['address']}, but cannot listen"
    )
    assert f"worker 1 at {ends[1]['address']} did not come" in last_error(ends[0])


def test_what_is_refused_at_once(launch: list[WorkerResult]) -> None:
    after_an_op, evaluator, bad_options, twice = (
        ends[0] for ends in ends_of(launch, "case_refused_at_once")
    )
    assert "errors.ProgramOrderError: " in last_error(after_an_op)
    assert "top of the script" in last_error(after_an_op)
    assert "errors.ConfigurationError: This task is an evaluator" in last_error(evaluator)
    assert "errors.ProgramOrderError: This process has made a LargeBatchStrategy" in twice["log"]
    refused = re.findall(r"^REFUSED (.*)$", bad_options["log"], re.MULTILINE)
    assert [text.split()[0].split("=")[0] for text in refused] == [
        "all_reduce",
        *["timeout_seconds"] * 3,
        *["start_timeout_seconds"] * 2,
        *["TF_LARGEBATCH_CPU_REPLICAS"] * 4,
    ]


# --- A worker dies, hangs, or is stopped


@pytest.mark.parametrize(("cluster", "dead"), [(0, 1), (1, 0)])
def test_a_killed_worker_ends_the_others(
    launch: list[WorkerResult], cluster: int, dead: int
) -> None:
    ends = ends_of(launch, "case_killed_workers")[cluster]
    assert ends[dead]["returncode"] == -9
    assert "Collective ops is aborted by" in last_error(ends[1 - dead])
    assert f"worker {dead} at {ends[dead]['address']}" in last_error(ends[1 - dead])
    assert "is gone" in last_error(ends[1 - dead])
    assert ends[1 - dead]["seconds"] < SOON_SECONDS


@pytest.mark.parametrize(("cluster", "dead"), [(0, 2), (1, 1)])
def test_a_worker_killed_in_a_plan_ends_all_others(
    launch: list[WorkerResult], cluster: int, dead: int
) -> None:
    ends = ends_of(launch, "case_killed_in_plans")[cluster]
    assert ends[dead]["returncode"] == -9
    for rank in {0, 1, 2} - {dead}:
        assert f"worker {dead} at {ends[dead]['address']}" in last_error(ends[rank])
        assert ends[rank]["seconds"] < SOON_SECONDS


@pytest.mark.parametrize(("cluster", "stopped"), [(0, 1), (1, 0)])
def test_a_stopped_worker_ends_the_others(
    launch: list[WorkerResult], cluster: int, stopped: int
) -> None:
    ends = ends_of(launch, "case_stopped_workers")[cluster]
    assert f"worker {stopped} at {ends[stopped]['address']}" in last_error(ends[1 - stopped])
    # A chief that is stopped answers no question of the watch; TensorFlow gives it 10 s.
    assert ends[1 - stopped]["seconds"] < SOON_SECONDS + 10.0


@pytest.mark.parametrize("case", ["case_hanging_worker", "case_hanging_forward_pass"])
def test_a_hanging_worker_is_named(launch: list[WorkerResult], case: str) -> None:
    (ends,) = ends_of(launch, case)
    assert re.search(
        rf"worker 0 at {ends[0]['address']} has waited \d+ s \(timeout_seconds=5\).* for: "
        rf"worker 1 at {ends[1]['address']} stands at arrival \d+",
        last_error(ends[0]),
    )
    assert 5.0 <= ends[0]["seconds"] < SOON_SECONDS


@pytest.mark.parametrize(("cluster", "raiser"), [(0, 1), (1, 0)])
def test_a_worker_that_raises_tells_the_others(
    launch: list[WorkerResult], cluster: int, raiser: int
) -> None:
    ends = ends_of(launch, "case_worker_that_raises")[cluster]
    assert last_error(ends[raiser]).startswith("ValueError: an error of the user's own")
    said = (
        f"worker {raiser} at {ends[raiser]['address']} has ended with "
        "ValueError: an error of the user's own"
    )
    assert said in last_error(ends[1 - raiser])


@pytest.mark.parametrize(("cluster", "raiser"), [(0, 1), (1, 0)])
def test_an_input_pipeline_that_raises_on_one_worker_ends_all(
    launch: list[WorkerResult], cluster: int, raiser: int
) -> None:
    ends = ends_of(launch, "case_input_pipeline_raises")[cluster]
    (raised,) = re.findall(r"^RAISES (.*)$", ends[raiser]["log"], re.MULTILINE)
    assert "ValueError: a row that cannot be read" in last_error(ends[raiser])
    other = last_error(ends[1 - raiser])
    # Told by the worker itself, or by TensorFlow, whichever comes first.
    assert f"worker {raiser} at {ends[raiser]['address']}" in other
    assert "ValueError: a row that cannot be read" in other
    assert ends[1 - raiser]["seconds"] - float(raised) < SOON_SECONDS


@pytest.mark.parametrize(
    ("cluster", "rank"),
    [(0, 2), (1, 2), (2, 0)],
    ids=["nothing passes", "connections are reset", "chief"],
)
def test_a_worker_that_is_cut_off_ends_all(
    launch: list[WorkerResult], cluster: int, rank: int
) -> None:
    ends = ends_of(launch, "case_cut_off")[cluster]
    # The addresses by which they know one another are the relay's.
    named = {
        other: {int(each) for each in re.findall(r"worker (\d) at \S+:\d+", last_error(end))}
        for other, end in ends.items()
    }
    for other, end in ends.items():
        culprits = {0, 1, 2} - {other} if other == rank else {rank}
        # On a busy machine one may first hear of another that has ended for that reason.
        through_others = set().union(*(named[each] for each in named[other] - {other}))
        assert (named[other] | through_others) & culprits, last_error(end)
        # TensorFlow's own heartbeats take 10 s.
        assert end["seconds"] < SOON_SECONDS + 10.0


# --- Programs that differ


@pytest.mark.parametrize(
    ("case", "cluster", "first", "second"),
    [
        ("case_models_differ", 0, "dense/kernel float32(3, 4)", "dense/kernel float32(3, 5)"),
        ("case_models_differ", 1, "dense_1/kernel float32(4, 1)", "dense_1/kernel float32(4, 4)"),
    ],
    ids=["width", "depth"],
)
def test_different_variables_show_both_sides_on_both(
    launch: list[WorkerResult], case: str, cluster: int, first: str, second: str
) -> None:
    ends = ends_of(launch, case)[cluster]
    for end in ends.values():
        error = last_error(end)
        assert "MismatchError: Workers must make the same variables" in error
        for rank, what in ((0, first), (1, second)):
            assert re.search(
                rf"^  worker {rank} at {ends[rank]['address']} made \d+ variables, "
                rf"number \d+ of them: .*{re.escape(what)}$",
                error,
                re.MULTILINE,
            ), error


KERNELS = "all_reduce float32(9,) over 2"
CHECK = r"check of variables int64\(1, 3\) over 2 \(\d+ from {} on\)"


@pytest.mark.parametrize(
    ("cluster", "first", "second"),
    [
        (0, ".+", CHECK.format(r"float32\(\)")),  # the state of a metric
        (1, ".+", CHECK.format(r"float32\(3, 4\)")),  # a slot of the optimizer
        (
            2,
            re.escape(KERNELS) + r", all_reduce float32\(\d,\) over 2",
            re.escape(KERNELS) + r", all_reduce float32\(\d,\) over 2",
        ),
    ],
    ids=["metrics", "optimizer", "logs"],
)
def test_different_programs_show_both_sides_on_both(
    launch: list[WorkerResult], cluster: int, first: str, second: str
) -> None:
    ends = ends_of(launch, "case_steps_differ")[cluster]
    for end in ends.values():
        assert "workers run different programs" in last_error(end)
        digests = set()
        for rank, what in ((0, first), (1, second)):
            found = re.search(
                rf"^  worker {rank} at {ends[rank]['address']}, arrival \d+: "
                rf"\[([0-9a-f]{{16}})\] {what}$",
                last_error(end),
                re.MULTILINE,
            )
            assert found, last_error(end)
            digests.add(found[1])
        assert len(digests) == 2


def test_fit_on_one_worker_alone_names_the_other(launch: list[WorkerResult]) -> None:
    (ends,) = ends_of(launch, "case_only_one_worker_fits")
    assert f"for: worker 1 at {ends[1]['address']} stands at" in last_error(ends[0])


def test_predict_on_one_worker_alone_shows_both_sides(launch: list[WorkerResult]) -> None:
    (ends,) = ends_of(launch, "case_only_one_worker_predicts")
    for end in ends.values():
        assert "workers run different programs" in last_error(end)


# --- What one worker does alone


def test_metrics_that_all_have_read_can_be_read_by_one_alone(launch: list[WorkerResult]) -> None:
    ends = ends_of(launch, "case_done_alone")[0]
    logs = []
    for end in ends.values():
        assert end["returncode"] == 0, end["log"]
        (text,) = re.findall(r"^LOGS (.*)$", end["log"], re.MULTILINE)
        logs.append([list(epoch) for epoch in ast.literal_eval(text)])
    assert logs[0] == logs[1] and len(logs[0]) == 3
    alone = re.findall(r"^ALONE (.*)$", ends[0]["log"], re.MULTILINE)
    assert [ast.literal_eval(text) for text in alone] == [*logs[0], logs[0][-1]]


@pytest.mark.parametrize(
    ("cluster", "what"),
    [
        (1, r"sum of variable \d+ over replicas .* \(reads loss/"),
        (2, r"comparison of data sets int64\(1, 2\) over 2"),
    ],
    ids=["metric", "evaluate"],
)
def test_what_one_worker_does_alone_is_named_on_both(
    launch: list[WorkerResult], cluster: int, what: str
) -> None:
    ends = ends_of(launch, "case_done_alone")[cluster]
    for end in ends.values():
        assert re.search(
            rf"worker 0 at {ends[0]['address']}, arrival \d+: \[[0-9a-f]{{16}}\] {what}",
            last_error(end),
        )
        assert "call it on all workers" in last_error(end)
        assert end["seconds"] < SOON_SECONDS


@pytest.mark.parametrize("cluster", [3, 4], ids=["evaluate", "reduce"])
def test_whoever_waits_for_a_worker_that_has_ended_is_told(
    launch: list[WorkerResult], cluster: int
) -> None:
    ends = ends_of(launch, "case_done_alone")[cluster]
    assert ends[1]["returncode"] == 0
    assert f"worker 1 at {ends[1]['address']}" in last_error(ends[0])
    assert "has ended without an error" in last_error(ends[0])
    assert "all it on all workers" in last_error(ends[0])
    assert ends[0]["seconds"] < SOON_SECONDS


# --- Data


@pytest.mark.parametrize("cluster", [0, 1], ids=["unknown", "known"])
def test_uneven_data_sets_show_the_counts_on_both(launch: list[WorkerResult], cluster: int) -> None:
    for end in ends_of(launch, "case_uneven_data_sets")[cluster].values():
        assert "data sets end at different steps" in last_error(end)
        assert "[0 1]" in last_error(end)


def test_fewer_rows_than_replicas(launch: list[WorkerResult]) -> None:
    (ends,) = ends_of(launch, "case_fewer_rows_than_replicas")
    without_rows, other = ends.values()  # of one row, rank 0 gets 0:0 and rank 1 gets 0:1
    text = "A training batch has fewer rows than there are replicas (2)"
    assert text in last_error(without_rows)
    assert f"worker 0 at {without_rows['address']}" in last_error(other)


# --- No failure


@pytest.mark.parametrize("late", [0, 1])
def test_workers_end_cleanly_each_in_its_own_time(launch: list[WorkerResult], late: int) -> None:
    ends = ends_of(launch, "case_clean_ends")[late]
    said = {
        rank: float(re.findall(r"^ENDS (.*)$", end["log"], re.MULTILINE)[0])
        for rank, end in ends.items()
    }
    assert said[late] - said[1 - late] > 2.5
    for rank, end in ends.items():
        assert end["returncode"] == 0, end["log"]
        assert end["seconds"] - said[rank] < SOON_SECONDS
        assert "Traceback" not in end["log"] and "tf_largebatch:" not in end["log"]
