"""MPI in the benchmarks: a short real run, what it takes, and how a run's end is told."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tool_runs import ROOT, load, run_tool

from tests.mpi_processes import why_not

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / "tools")  # for what it imports
    mpi_run = load("_mpi_run")
local_cluster = sys.modules["_local_cluster"]
worker_wait = sys.modules["_worker_wait"]
KIB = 2**10
needs_mpi = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")


@needs_mpi
@pytest.mark.timeout(300)
def test_two_ranks_by_both_transports(tmp_path: Path) -> None:
    flags = ["--workers=2", "--sizes=1KiB,64KiB", "--transports=tensorflow,mpi", "--repeats=3"]
    flags += ["--algorithms=tensorflow,halving_doubling,auto", "--wire_dtype=bfloat16"]
    flags += ["--warmup=1", "--buckets=2", "--output=out.json", "--timeout_seconds=140"]
    done = run_tool("benchmark_all_reduce", *flags, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    ways = [
        ("tensorflow", "tensorflow", None),
        ("tensorflow", "halving_doubling", "bfloat16"),
        ("mpi", "halving_doubling", "bfloat16"),
        ("mpi", "auto", "bfloat16"),
        ("mpi4py", "Allreduce", None),
    ]
    rows = report["results"]
    assert [
        (row["size_bytes"], row["transport"], row["algorithm"], row["wire_dtype"]) for row in rows
    ] == [(size, *way) for size in (KIB, 64 * KIB) for way in ways]
    for row in rows:
        assert row["verified"] is True, row["problems"]
        assert len(row["time_all_ms"]) == 3
    of_size = rows[len(ways) :]
    for row in of_size:
        assert row["ratio"] == pytest.approx(row["time_p50_ms"] / of_size[0]["time_p50_ms"])
        in_graph = [each["in_graph_p50_ms"] for each in (row, of_size[0], of_size[-1])]
        assert in_graph[0] > 0.0
        assert row["in_graph_ratio"] == pytest.approx(in_graph[0] / in_graph[1])
        assert row["to_raw"] == pytest.approx(in_graph[0] / in_graph[2])
    (run,) = report["runs"]
    assert "Buckets travel by MPI" in run["all_reduce_report"]
    assert report["settings"]["transports"] == ["tensorflow", "mpi"]
    assert "ratio to tensorflow by tensorflow" in done.stdout


@needs_mpi
def test_what_is_missing_is_told_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert mpi_run.missing_for_mpi() is None

    def find_none() -> Any:
        raise mpi_run.NoMpiexec("nowhere to be found")

    monkeypatch.setattr(mpi_run, "find_mpiexec", find_none)
    assert mpi_run.missing_for_mpi() == "--transports=mpi: nowhere to be found"
    monkeypatch.setattr(mpi_run.importlib.util, "find_spec", lambda name: None)
    assert "mpi4py: pip install 'tf_largebatch[mpi]' mpich" in mpi_run.missing_for_mpi()


# --- The end of a run


@pytest.mark.parametrize(
    ("script", "timeout_seconds", "problem"),
    [
        ("pass", 60.0, None),
        # The rank that has no reason to fail ends as well, so that no grace is waited for.
        ("print('no room'); sys.exit(3 * rank)", 60.0, "worker 1 exited with code 3 after"),
        ("time.sleep(60)", 1.0, "not finished after 1 s"),
    ],
)
def test_how_a_run_has_ended(
    script: str, timeout_seconds: float, problem: str | None, tmp_path: Path
) -> None:
    head = "import json, os, sys, time; rank = json.loads(os.environ['TF_CONFIG'])['task']['index']"
    command = [sys.executable, "-c", f"{head}; {script}"]
    with local_cluster.LocalCluster() as cluster:
        cluster.start(command, num_workers=2, replicas_per_worker=1, log_dir=tmp_path)
        said = worker_wait.wait_for_workers(cluster, timeout_seconds=timeout_seconds)
    if problem is None:
        assert said is None
    else:
        assert said.startswith(problem)
        assert ("no room" in said) is ("no room" in script)


@needs_mpi
def test_a_program_that_fails_as_a_rank(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import sys\nsys.exit('out of ' + sys.argv[2])\n")
    run = mpi_run.run_ranks(program, {"memory": 5, "limit": None}, workers=1, timeout_seconds=60.0)
    assert run.results == ()
    assert "worker 0 exited with code 1" in run.problem
    assert "out of --memory=5" in run.problem
