"""Starts real worker processes with TF_CONFIG, runs cases in each, hands back what they return.

A worker file (tests/multiprocess/workers/*.py) holds case functions and, if it wants, `setup`; each
process calls `setup` once and the cases in the order of the file:

    # workers/sums.py
    import numpy as np
    import tf_largebatch as tlb

    def setup():
        return tlb.LargeBatchStrategy()

    def case_sum(strategy):
        return strategy.run(...).numpy()       # numbers, text, NumPy arrays, nested in containers

Importing TensorFlow is dear, so the processes of a launch are forks of one that has imported the
file (see `_worker_main.py`), and the pytest side launches once a module and has one test a case:

    @pytest.fixture(scope="module")
    def workers():
        return run_workers("sums.py", 2)

    def test_sum(workers):
        for value in case_values(workers, "case_sum"):     # one value a rank
            np.testing.assert_allclose(value, 3.0)

An exception in a case is kept under its name and raised by `case_values`; a process that ends
badly, or does not end in time, fails the launch with the ends of all logs. No process is left
behind, nor any that a worker started.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import portpicker

from tests.processes import kill_marked

WORKERS_FOLDER = Path(__file__).parent / "workers"
REPOSITORY = Path(__file__).parents[2]
_MAIN = Path(__file__).parent / "_worker_main.py"
_POLL_SECONDS = 0.02
_MARK = "TEST_HARNESS_LAUNCH"  # environment variable that tells whose a process is


class WorkersFailed(AssertionError):
    """A launch did not end as it should have; the message holds the end of every log."""


class CaseFailed(AssertionError):
    """A case raised in one or more workers; the message holds the tracebacks."""


@dataclasses.dataclass(frozen=True)
class WorkerResult:
    """How one worker ended. `result`: {case name: {"value": ...} or {"error_type", "error",
    "traceback"}}, of the cases that it finished."""

    rank: int
    address: str
    returncode: int
    stdout: str
    stderr: str
    result: dict[str, dict[str, Any]]


def case_values(results: Sequence[WorkerResult], name: str) -> list[Any]:
    """Returns the value of one case from every rank, or raises CaseFailed."""
    problems = [
        f"rank {worker.rank}: {worker.result.get(name, {}).get('traceback', 'did not get there')}"
        for worker in results
        if "value" not in worker.result.get(name, {})
    ]
    if problems:
        raise CaseFailed(f"{name}\n" + "\n".join(problems))
    return [worker.result[name]["value"] for worker in results]


def run_workers(
    target: str | Path | Callable[..., Any],
    num_workers: int,
    *,
    cases: Sequence[str] = (),
    ranks: Sequence[int] | None = None,
    replicas_per_worker: int = 1,
    timeout_seconds: float = 120.0,
    grace_seconds: float = 5.0,
    env: Mapping[str, str] | Sequence[Mapping[str, str]] | None = None,
    expect_failure: bool = False,
) -> list[WorkerResult]:
    """Runs a worker file, or one function of a file, in every worker; returns one result a rank.

    Args:
        target: file name in tests/multiprocess/workers/, a path, or a module-level function (then
            its file is imported and this function alone is called).
        num_workers: workers in TF_CONFIG.
        cases: names of the case functions to run; all of the file by default.
        ranks: those of the workers that are really started; all by default.
        replicas_per_worker: sets TF_LARGEBATCH_CPU_REPLICAS when above 1.
        timeout_seconds: for the whole launch; then everything is killed and the launch fails.
        grace_seconds: when a worker ends badly, what the others get before they are killed. With
            expect_failure they get all of timeout_seconds, as their end is what is tested.
        env: added to the environment; a sequence holds one mapping a rank.
        expect_failure: return codes other than 0 are handed back rather than raised; all of them
            being 0 fails the launch.

    Raises:
        WorkersFailed: bad exit, no exit in time, or none of the failures that were expected.
    """
    names = list(cases)
    if callable(target):
        path, names = Path(inspect.getfile(target)), [target.__name__]
    else:
        path = WORKERS_FOLDER / target  # an absolute target replaces the folder
    addresses = [f"127.0.0.1:{port}" for port in _free_ports(num_workers)]
    with tempfile.TemporaryDirectory(prefix="workers_") as folder, _Launch(Path(folder)) as launch:
        variables = {}
        for rank in range(num_workers) if ranks is None else ranks:
            extra = env if env is None or isinstance(env, Mapping) else env[rank]
            variables[rank] = _environment(addresses, rank, replicas_per_worker, extra or {})
        launch.start(path, names, variables)
        complaint = launch.wait(timeout_seconds, None if expect_failure else grace_seconds)
        launch.stop()
        if complaint is None and expect_failure and not any(launch.codes.values()):
            complaint = "no worker failed, though a failure was expected"
        if complaint is not None:
            raise WorkersFailed(f"{path.name}: {complaint}\n{launch.logs()}")
        return [launch.result(rank, addresses[rank]) for rank in variables]


class _Launch:
    """The processes of one call, their files, and their end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ranks: list[int] = []
        self.codes: dict[int, int] = {}

    def __enter__(self) -> _Launch:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def start(
        self, path: Path, cases: Sequence[str], variables: Mapping[int, Mapping[str, str]]
    ) -> None:
        """Starts the process whose forks are the workers.

        Args:
            path: the worker file.
            cases: as in `run_workers`.
            variables: of the environment, of each rank.
        """
        self._ranks = list(variables)
        workers = [
            {
                "rank": rank,
                "cases": list(cases),
                "env": dict(env),
                **{kind: str(self._file(rank, kind)) for kind in ("out", "err", "result")},
            }
            for rank, env in variables.items()
        ]
        launch = self._folder / "launch.json"
        launch.write_text(json.dumps(workers))
        with self._reports.open("wb") as out, self._errors.open("wb") as err:
            self._process = subprocess.Popen(
                [sys.executable, str(_MAIN), str(path), str(launch)],
                env={**_before_the_fork(), _MARK: str(self._folder)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def wait(self, timeout_seconds: float, grace_seconds: float | None) -> str | None:
        """Returns when all have exited, or what went wrong."""
        deadline = time.monotonic() + timeout_seconds
        first_bad: str | None = None
        while True:
            ended = self._process.poll()
            pids = self._read_reports()
            bad = [f"rank {rank} ended with {code}" for rank, code in self.codes.items() if code]
            if bad and grace_seconds is not None and first_bad is None:
                first_bad = bad[0]
                deadline = min(deadline, time.monotonic() + grace_seconds)
            running = [rank for rank in self._ranks if rank not in self.codes]
            if not running:
                return first_bad
            if ended is not None:
                return f"the worker file did not import, or its process ended with {ended}"
            if time.monotonic() >= deadline:
                self._dump_stacks({rank: pids[rank] for rank in running if rank in pids})
                return first_bad or f"ranks {running} did not end within {timeout_seconds:g} s"
            time.sleep(_POLL_SECONDS)

    def _read_reports(self) -> dict[int, int]:
        """Returns the process of each rank that has begun; keeps the codes of those that ended."""
        pids = {}
        for line in self._reports.read_text().splitlines(keepends=True):
            if line.startswith("{") and line.endswith("\n"):
                fact = json.loads(line)
                pids[fact["rank"]] = fact.get("pid", pids.get(fact["rank"]))
                if "code" in fact:
                    self.codes.setdefault(fact["rank"], fact["code"])
        return pids

    def stop(self) -> None:
        """Kills what still runs, with all it has started."""
        kill_marked(_MARK, str(self._folder))
        self._process.wait()
        self._read_reports()
        for rank in self._ranks:
            self.codes.setdefault(rank, -signal.SIGKILL)

    def result(self, rank: int, address: str) -> WorkerResult:
        path = self._file(rank, "result")
        return WorkerResult(
            rank=rank,
            address=address,
            returncode=self.codes[rank],
            stdout=_text_of(self._file(rank, "out")),
            stderr=_text_of(self._file(rank, "err")),
            result=pickle.loads(path.read_bytes()) if path.exists() else {},
        )

    def logs(self, lines: int = 40) -> str:
        """The end of each worker's two streams."""
        parts = [_text_of(self._errors)]
        for rank in self._ranks:
            parts.append(f"----- rank {rank}, return code {self.codes[rank]}")
            for kind in ("out", "err"):
                text = _text_of(self._file(rank, kind))
                parts += [f"std{kind} | {line}" for line in text.splitlines()[-lines:]]
        return "\n".join(parts)

    def _dump_stacks(self, pids: Mapping[int, int]) -> None:
        """Lets each worker write where its threads are (faulthandler) before it is killed."""
        for pid in pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        time.sleep(0.2)

    @property
    def _reports(self) -> Path:
        return self._folder / "reports"

    @property
    def _errors(self) -> Path:
        return self._folder / "errors"

    def _file(self, rank: int, kind: str) -> Path:
        return self._folder / f"{rank:02d}.{kind}"


def _text_of(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _before_the_fork() -> dict[str, str]:
    """The environment that TensorFlow is imported in."""
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    return {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_NUM_INTRAOP_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": path,
        "TEST_HARNESS_PID": str(os.getpid()),
    }


def _environment(
    addresses: Sequence[str], rank: int, replicas_per_worker: int, extra: Mapping[str, str]
) -> dict[str, str]:
    """What one rank has beside it."""
    cluster = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
    environment = {"TF_CONFIG": json.dumps(cluster)}
    if replicas_per_worker > 1:
        environment["TF_LARGEBATCH_CPU_REPLICAS"] = str(replicas_per_worker)
    return {**environment, **extra}


def _free_ports(count: int) -> list[int]:
    """Different free ports below the kernel's range for outgoing connections: in that range, a
    worker that dials a peer not yet listening may be given the peer's port."""
    ports: list[int] = []
    with contextlib.ExitStack() as held:
        while len(ports) < count:
            port = random.randrange(15000, 25000)
            if portpicker.is_port_free(port):
                sock = held.enter_context(socket.socket())
                with contextlib.suppress(OSError):  # taken in between
                    sock.bind(("127.0.0.1", port))
                    ports.append(port)
    return ports
