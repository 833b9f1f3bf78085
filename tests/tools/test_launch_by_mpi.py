"""The launcher with --mpi as a user runs it, on ranks that need no TensorFlow."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.tools.tool_runs import ROOT, load

LAUNCHER = ROOT / "tools" / "launch_local_cluster.py"
load("_mpiexec")
MISSING = None
try:
    sys.modules["_mpiexec"].find_mpiexec()
except sys.modules["_mpiexec"].NoMpiexec as error:
    MISSING = str(error)
if importlib.util.find_spec("mpi4py") is None:
    MISSING = "needs mpi4py"
pytestmark = [pytest.mark.alone, pytest.mark.timeout(60)]
needs_mpi = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
RANK = """
import json, os, signal, sys, time
from mpi4py import MPI
comm = MPI.COMM_WORLD
rank = comm.rank
def show_shared_memory():
    maps = open("/proc/self/maps").read().splitlines()
    names = {line.split()[-1] for line in maps if "/dev/shm/" in line and "deleted" not in line}
    print(*(f"shared {name}" for name in names), sep="\\n", flush=True)
def met():  # all have started MPI, as a rank's death ends those that have not
    comm.Barrier()
    print("met", os.getpid(), flush=True)
"""


def launcher_command(*flags: str, script: str) -> list[str]:
    command = [sys.executable, "-c", RANK + script]
    return [sys.executable, str(LAUNCHER), "--mpi", *flags, "--", *command]


def launch(*flags: str, script: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        launcher_command(*flags, script=script),
        env={**os.environ, **environment},
        capture_output=True,
        timeout=40,
        check=False,
    )


def start(*flags: str, script: str, **environment: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        launcher_command(*flags, script=script),
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def logs_of(folder: Path, ranks: int, suffix: str = "") -> list[str]:
    return [(folder / f"worker_{rank:02d}{suffix}.log").read_text() for rank in range(ranks)]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 15
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.02)


def wait_until_met(folder: Path, ranks: int) -> list[int]:
    """Waits for `met` in all logs; the process ids of the ranks."""

    def all_met() -> bool:
        files = list(folder.glob("worker_*.log"))
        # To the line's end: what is not buffered is written word by word.
        return len(files) == ranks and all(re.search(r"met \d+\n", f.read_text()) for f in files)

    wait_until(all_met, "the ranks' start")
    return [int(re.search(r"met (\d+)", log)[1]) for log in logs_of(folder, ranks)]


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def mapped_files(folder: Path, ranks: int) -> list[Path]:
    """What `show_shared_memory` printed."""
    found = re.findall(r"^shared (\S+)$", "\n".join(logs_of(folder, ranks)), re.MULTILINE)
    return [Path(name) for name in found]


def left_by(log_dir: Path) -> list[str]:
    """Command lines of live processes of a launch: ranks' parents name the folder of their notes,
    which is removed, so all that can be found are those that hold a log of it open."""
    left = []
    for process in psutil.process_iter():
        try:
            if any(Path(file.path).parent == log_dir for file in process.open_files()):
                left.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return left


@needs_mpi
def test_ranks_meet_over_mpi_and_see_the_environment_of_workers(tmp_path: Path) -> None:
    script = (
        "names = ['TF_CONFIG', 'TF_LARGEBATCH_CPU_REPLICAS', 'OMP_NUM_THREADS',"
        " 'TF_NUM_INTRAOP_THREADS', 'TF_LARGEBATCH_RESTART'];"
        "seen = {n: os.environ.get(n) for n in names};"
        "print(json.dumps([rank, comm.size, comm.allreduce(10 ** rank), sys.argv[1:], seen]))"
    )
    flags = ["--workers=3", "--replicas_per_worker=2", f"--log_dir={tmp_path}"]
    command = [*launcher_command(*flags, script=script), "a b", ":", "-n"]
    environment = {**os.environ, "TF_CONFIG": '{"cluster": {}}', "OMP_NUM_THREADS": "7"}
    done = subprocess.run(command, env=environment, capture_output=True, timeout=40, check=False)

    assert done.returncode == 0, done.stderr
    seen = {
        "TF_CONFIG": None,
        "TF_LARGEBATCH_CPU_REPLICAS": "2",
        "OMP_NUM_THREADS": "7",  # the user's value stays
        "TF_NUM_INTRAOP_THREADS": str(max(1, len(os.sched_getaffinity(0)) // 3)),
        "TF_LARGEBATCH_RESTART": "0",
    }
    logs = [json.loads(log) for log in logs_of(tmp_path, 3)]
    assert logs == [[rank, 3, 111, ["a b", ":", "-n"], seen] for rank in range(3)]
    assert done.stdout.decode() == logs_of(tmp_path, 1)[0]
    assert b"all 3 workers finished" in done.stderr


@needs_mpi
def test_only_the_chief_is_shown_byte_for_byte(tmp_path: Path) -> None:
    script = r"sys.stdout.write(f'rank {rank}\r\x1b[1mdone\xff'); sys.stderr.write('\ntail')"
    done = launch("--workers=2", f"--log_dir={tmp_path}", script=script, PYTHONIOENCODING="latin-1")

    assert done.returncode == 0
    assert done.stdout == b"rank 0\r\x1b[1mdone\xff\ntail"
    assert (tmp_path / "worker_01.log").read_bytes() == done.stdout.replace(b"0", b"1", 1)


@needs_mpi
def test_a_killed_rank_is_named_and_the_others_get_the_grace(tmp_path: Path) -> None:
    script = """
met()
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
show_shared_memory()
time.sleep(1)
print("last words", flush=True)
os._exit(4 if rank == 2 else 0)
"""
    done = launch("--workers=3", "--grace_seconds=20", f"--log_dir={tmp_path}", script=script)

    report = done.stderr.decode()
    assert done.returncode == 1
    assert re.search(r"\] worker 1 was killed by SIGKILL \(9\) after [\d.]+ s; the others", report)
    assert "worker 1 failed first" in report
    assert "worker 2 (MPI rank 2) exited with code 4" in report
    assert "worker 0 (MPI rank 0) exited with code 0" in report
    assert f"last lines of worker 1, {tmp_path}/worker_01.log" in report
    assert [log.count("last words") for log in logs_of(tmp_path, 3)] == [1, 0, 1]
    files = mapped_files(tmp_path, 3)
    assert files  # of which MPI removes none when a rank is killed
    assert not any(path.exists() for path in files)


@needs_mpi
def test_a_rank_that_dies_before_the_others_have_started_mpi_leaves_them_alone(
    tmp_path: Path,
) -> None:
    variable = "PMI_RANK" if is_mpich() else "OMPI_COMM_WORLD_RANK"
    script = (
        f"import os, sys, time; rank = int(os.environ[{variable!r}]);"
        "time.sleep(0 if rank else 1); print('end', flush=True); sys.exit(3 * rank)"
    )
    command = [sys.executable, str(LAUNCHER), "--mpi", "--workers=2", f"--log_dir={tmp_path}"]
    done = subprocess.run(
        [*command, "--", sys.executable, "-c", script],
        capture_output=True,
        timeout=40,
        check=False,
    )

    report = done.stderr.decode()
    assert done.returncode == 1
    assert report.index("worker 1 (MPI rank 1) exited with code 3") < report.index(
        "worker 0 (MPI rank 0) exited with code 0"
    )
    assert logs_of(tmp_path, 2) == ["end\n", "end\n"]


def is_mpich() -> bool:
    return "-rmk" in sys.modules["_mpiexec"].find_mpiexec().arguments


@needs_mpi
def test_others_are_stopped_after_the_grace_by_sigterm(tmp_path: Path) -> None:
    script = """
signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), os._exit(143)))
met()
if rank == 1:
    sys.stdout.write("the cause\\n")
    sys.stdout.flush()
    os._exit(7)
time.sleep(60)
"""
    done = launch("--workers=2", "--grace_seconds=0.2", f"--log_dir={tmp_path}", script=script)

    report = done.stderr.decode()
    assert done.returncode == 1
    assert "worker 1 failed first" in report
    assert "worker 1 (MPI rank 1) exited with code 7" in report
    assert "worker 0 (MPI rank 0) was stopped by the launcher" in report
    assert "  | the cause\n" in report
    assert logs_of(tmp_path, 1)[0].endswith("saved\n")


@needs_mpi
def test_the_rank_that_aborts_is_named_first(tmp_path: Path) -> None:
    script = "met(); comm.Abort(5) if rank == 1 else time.sleep(60)"
    done = launch("--workers=3", "--grace_seconds=4", f"--log_dir={tmp_path}", script=script)

    report = done.stderr.decode()
    assert done.returncode == 1
    assert "worker 1 failed first" in report
    assert re.search(r"worker 1 \(MPI rank 1\) (called MPI_Abort|exited) with code 5", report)
    end_of_others = "was ended by mpiexec" if is_mpich() else "was stopped by the launcher"
    assert report.count(end_of_others) == 2


@needs_mpi
def test_all_are_started_again_and_finish(tmp_path: Path) -> None:
    script = """
restart = int(os.environ["TF_LARGEBATCH_RESTART"])
met()
if rank == 0 and restart == 0:
    os.kill(os.getpid(), signal.SIGTERM)
print(f"restart {restart} of {comm.size}", flush=True)
time.sleep(0 if restart else 60)
"""
    flags = ["--workers=2", "--max_restarts=2", "--restart_backoff_seconds=0.1"]
    done = launch(*flags, "--grace_seconds=0.2", f"--log_dir={tmp_path}", script=script)

    report = done.stderr.decode()
    assert done.returncode == 0, report
    assert "worker 0 was killed by SIGTERM (15)" in report
    assert "restart 1 of 2 in 0.1 s" in report
    assert "all 2 workers finished" in report
    assert all(log.endswith("restart 1 of 2\n") for log in logs_of(tmp_path, 2, ".restart_1"))


@needs_mpi
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_and_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    script = """
import subprocess
signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), os._exit(143)))
child = subprocess.Popen(["sleep", "60"], start_new_session=True)
print("child", child.pid)
met()
time.sleep(60)
"""
    launcher = start("--workers=2", f"--log_dir={tmp_path}", script=script)
    pids = wait_until_met(tmp_path, 2)
    pids += [int(re.search(r"child (\d+)", log)[1]) for log in logs_of(tmp_path, 2)]

    launcher.send_signal(number)

    report = launcher.communicate(timeout=15)[1].decode()
    assert launcher.returncode == 128 + number, report
    assert f"stopped by {number.name}" in report
    assert len(set(pids)) == 4 and all(gone(pid) for pid in pids)
    assert all(log.endswith("saved\n") for log in logs_of(tmp_path, 2))
    assert left_by(tmp_path) == []


@needs_mpi
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux watches the parent")
def test_ranks_die_with_a_killed_launcher(tmp_path: Path) -> None:
    flags = ["--workers=2", f"--log_dir={tmp_path}"]
    # A killed launcher leaves its notes there.
    launcher = start(*flags, script="met(); time.sleep(60)", TMPDIR=str(tmp_path))
    pids = wait_until_met(tmp_path, 2)

    launcher.kill()
    launcher.communicate()

    wait_until(lambda: all(gone(pid) for pid in pids), "the ranks' end")
    wait_until(lambda: left_by(tmp_path) == [], "the end of mpiexec")


@needs_mpi
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux watches the parent")
def test_ranks_end_with_a_killed_mpiexec(tmp_path: Path) -> None:
    launcher = start("--workers=2", f"--log_dir={tmp_path}", script="met(); time.sleep(60)")
    pids = wait_until_met(tmp_path, 2)
    (mpiexec,) = psutil.Process(launcher.pid).children()

    mpiexec.kill()

    report = launcher.communicate(timeout=20)[1].decode()
    assert launcher.returncode == 1
    assert report.count("was ended by mpiexec") >= 2
    assert all(gone(pid) for pid in pids)


@needs_mpi
def test_timeout_shows_the_logs_of_those_that_still_ran(tmp_path: Path) -> None:
    script = """
print(f"rank {rank} was here", flush=True)
met()
if rank == 0:
    os._exit(0)  # MPI's own end would wait for the other
time.sleep(60)
"""
    done = launch("--workers=2", "--timeout_seconds=4", f"--log_dir={tmp_path}", script=script)

    report = done.stderr.decode()
    assert done.returncode == 124
    assert "not finished after 4 s" in report
    assert "| rank 1 was here" in report
    assert "| rank 0 was here" not in report


FAKE = """#!/bin/sh
if [ "$1" = --version ]; then echo "{version}"; exit; fi
echo "no place for ranks" >&2
exit 255
"""


def fake_mpiexec(folder: Path, version: str) -> Path:
    path = folder / "mpiexec"
    path.write_text(FAKE.format(version=version))
    path.chmod(0o755)
    return path


def test_an_mpiexec_that_starts_nothing_is_quoted(tmp_path: Path) -> None:
    for name in ("_mpiexec", "_local_cluster", "_mpi_shared_memory", "_mpi_cluster"):
        load(name)
    mpiexec = sys.modules["_mpiexec"].Mpiexec(fake_mpiexec(tmp_path, "any"), ())
    with sys.modules["_mpi_cluster"].MpiLocalCluster(mpiexec) as cluster:
        cluster.start(["true"], num_workers=2, replicas_per_worker=1, log_dir=tmp_path)
        wait_until(lambda: not cluster.poll(), "the end")
    assert [worker.failed for worker in cluster.exited] == [True, True]
    words = "ended with mpiexec, whose exit code was 255, after"
    assert cluster.exited[0].describe_exit().startswith(words)
    assert cluster.exited[0].last_log_lines(20) == ["mpiexec: no place for ranks"]


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("HYDRA build details:\n    Version: 4.2.0", "-disable-auto-cleanup"),
        ("mpiexec (Open MPI) 5.0.11", "--enable-recovery"),
    ],
)
def test_the_mpiexec_beside_python_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, expected: str
) -> None:
    module = load("_mpiexec")
    beside, on_path = tmp_path / "bin", tmp_path / "path"
    for folder in (beside, on_path):
        folder.mkdir()
        fake_mpiexec(folder, version)
    monkeypatch.setattr(sys, "executable", str(beside / "python"))
    monkeypatch.setenv("PATH", f"{on_path}:/usr/bin:/bin")

    found = module.find_mpiexec()
    assert found.path == beside / "mpiexec"
    assert expected in found.arguments
    assert found.command(3, ["a", "b"])[-4:] == ["-n", "3", "a", "b"]
    (beside / "mpiexec").unlink()
    assert module.find_mpiexec().path == on_path / "mpiexec"


@pytest.mark.parametrize("version", ["Intel(R) MPI Library for Linux* OS", ""])
def test_an_unknown_mpiexec_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    module = load("_mpiexec")
    fake_mpiexec(tmp_path, version)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(module.NoMpiexec, match=re.escape(version[:5] or "'nothing'")):
        module.find_mpiexec()


def test_without_mpiexec_the_launcher_says_what_to_install(tmp_path: Path) -> None:
    python = tmp_path / "python"  # another folder than that of mpiexec
    python.symlink_to(sys.executable)
    command = [str(python), str(LAUNCHER), "--mpi", "--", "/bin/true"]
    done = subprocess.run(
        command,
        env={**os.environ, "PATH": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )

    assert done.returncode == 2
    assert "pip install 'tf_largebatch[mpi]' mpich" in done.stderr
    assert len(done.stderr.splitlines()) == 1
