"""The launcher as a user runs it, on commands that need no TensorFlow."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from tests.tools.tool_runs import load

LAUNCHER = Path(__file__).parents[2] / "tools" / "launch_local_cluster.py"
RANK = "import json, os, sys, time; rank = json.loads(os.environ['TF_CONFIG'])['task']['index']; "
pytestmark = [pytest.mark.alone, pytest.mark.timeout(60)]


def launcher_command(*flags: str, script: str) -> list[str]:
    return [sys.executable, str(LAUNCHER), *flags, "--", sys.executable, "-c", RANK + script]


def launch(*flags: str, script: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        launcher_command(*flags, script=script),
        env={**os.environ, **environment},
        capture_output=True,
        timeout=30,
        check=False,
    )


def wait_until(condition, what: str) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.02)


def process_is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_each_worker_sees_the_cluster_its_rank_and_the_limits(tmp_path: Path) -> None:
    seen = (
        "names = ['TF_CONFIG', 'TF_LARGEBATCH_CPU_REPLICAS', 'OMP_NUM_THREADS',"
        " 'TF_NUM_INTRAOP_THREADS', 'CUDA_VISIBLE_DEVICES', 'TF_LARGEBATCH_RESTART'];"
        "print(json.dumps({n: os.environ.get(n) for n in names}))"
    )
    flags = ["--workers=3", "--replicas_per_worker=2", f"--log_dir={tmp_path}"]
    done = launch(*flags, script=seen, OMP_NUM_THREADS="7", CUDA_VISIBLE_DEVICES="-1")

    assert done.returncode == 0, done.stderr
    logs = [json.loads((tmp_path / f"worker_{rank:02d}.log").read_text()) for rank in range(3)]
    configs = [json.loads(log["TF_CONFIG"]) for log in logs]
    assert [config["task"] for config in configs] == [
        {"type": "worker", "index": rank} for rank in range(3)
    ]
    addresses = configs[0]["cluster"]["worker"]
    assert len(set(addresses)) == 3
    assert all(address.startswith("127.0.0.1:") for address in addresses)
    assert all(config["cluster"] == {"worker": addresses} for config in configs)
    for log in logs:
        assert log["TF_LARGEBATCH_CPU_REPLICAS"] == "2"
        assert log["OMP_NUM_THREADS"] == "7"  # the user's value stays
        assert log["TF_NUM_INTRAOP_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 3))
        assert log["CUDA_VISIBLE_DEVICES"] == "-1"
        assert log["TF_LARGEBATCH_RESTART"] == "0"


def test_only_the_chief_is_shown_byte_for_byte(tmp_path: Path) -> None:
    script = r"sys.stdout.write(f'rank {rank}\r\x1b[1mdone\xff'); sys.stderr.write('\ntail')"
    done = launch("--workers=2", f"--log_dir={tmp_path}", script=script, PYTHONIOENCODING="latin-1")

    assert done.returncode == 0
    assert done.stdout == b"rank 0\r\x1b[1mdone\xff\ntail"
    assert (tmp_path / "worker_00.log").read_bytes() == done.stdout
    assert (tmp_path / "worker_01.log").read_bytes() == done.stdout.replace(b"0", b"1", 1)


def test_status_without_a_terminal_is_plain_lines_at_the_asked_pace(tmp_path: Path) -> None:
    script = "time.sleep(1.0 if rank else 0.1)"
    flags = ["--workers=2", "--status_seconds=0.4", f"--log_dir={tmp_path}"]
    done = launch(*flags, script=script)

    lines = done.stderr.decode().splitlines()
    states = [line for line in lines if "elapsed" in line]
    assert 1 <= len(states) <= 4
    assert "running workers: 1; worker 0 exited with code 0" in states[-1]
    assert b"\x1b" not in done.stderr and b"\r" not in done.stderr
    assert done.stdout == b""


def test_spinner_on_a_terminal_leaves_the_chiefs_output_whole(tmp_path: Path) -> None:
    script = "print('first', flush=True); time.sleep(1.5); print('second', flush=True)"
    reader, terminal = pty.openpty()
    shown = bytearray()

    def collect() -> None:
        while chunk := os.read(reader, 4096):
            shown.extend(chunk)
            if chunk.endswith(b"\x04"):
                return

    thread = threading.Thread(target=collect)
    thread.start()
    command = launcher_command("--workers=2", f"--log_dir={tmp_path}", script=script)
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    code = subprocess.call(command, stdout=terminal, stderr=terminal, env=environment, timeout=30)
    os.write(terminal, b"\x04")
    thread.join(10)
    os.close(terminal)
    os.close(reader)

    assert code == 0
    assert b"running workers: 0, 1" in shown
    assert b"first\r\n" in shown
    assert b"second\r\n" in shown
    assert shown.index(b"first") < shown.index(b"running workers") < shown.index(b"second")


def test_first_failing_worker_is_named_with_its_last_lines(tmp_path: Path) -> None:
    script = (
        "time.sleep(0 if rank == 2 else 0.7);"
        "print('\\n'.join(f'line {i}' for i in range(30)));"
        "sys.exit({0: 0, 1: 9, 2: 7}[rank])"
    )
    done = launch("--workers=3", "--grace_seconds=10", f"--log_dir={tmp_path}", script=script)

    report = done.stderr.decode()
    assert done.returncode == 1
    assert "worker 2 failed first" in report
    assert report.rindex(") exited with code 7") < report.rindex(") exited with code 9")
    assert "stopped by the launcher" not in report  # the others used their grace
    assert "| line 10\n" in report and "| line 29\n" in report
    assert "| line 9\n" not in report
    assert str(tmp_path / "worker_02.log") in report


def test_others_are_stopped_after_the_grace(tmp_path: Path) -> None:
    script = (
        f"other = {str(tmp_path)!r} + '/worker_01.log';"
        "print('ready', flush=True);"
        "[time.sleep(0.02) for _ in iter(lambda: 'ready' in open(other).read(), True)];"
        "os.kill(os.getpid(), 9) if rank == 0 else time.sleep(60)"
    )
    done = launch("--workers=2", "--grace_seconds=0.1", f"--log_dir={tmp_path}", script=script)

    report = done.stderr.decode()
    assert done.returncode == 1
    assert "worker 0 failed first" in report
    assert "was killed by SIGKILL (9)" in report
    assert ") was stopped by the launcher" in report


def test_a_second_signal_kills_what_ignores_the_first(tmp_path: Path) -> None:
    script = (
        "import signal; signal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True));"
        "print(os.getpid(), flush=True); [time.sleep(1) for _ in range(60)]"
    )
    command = launcher_command("--workers=1", f"--log_dir={tmp_path}", script=script)
    launcher = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    log = tmp_path / "worker_00.log"
    wait_until(lambda: log.exists() and log.read_text().endswith("\n"), "start")

    launcher.send_signal(signal.SIGINT)
    wait_until(lambda: "asked" in log.read_text(), "SIGTERM at the worker")
    launcher.send_signal(signal.SIGINT)

    assert (
        launcher.wait(timeout=4) == 128 + signal.SIGINT
    )  # without waiting for --terminate_seconds
    assert process_is_gone(int(log.read_text().split()[0]))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_stop_grandchildren_in_sessions_of_their_own(tmp_path: Path, number: int) -> None:
    script = (
        "import subprocess; child = subprocess.Popen(['sleep', '60'], start_new_session=True);"
        "print(child.pid, os.getpid(), flush=True); time.sleep(60)"
    )
    command = launcher_command("--workers=2", f"--log_dir={tmp_path}", script=script)
    launcher = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    logs = [tmp_path / f"worker_{rank:02d}.log" for rank in range(2)]
    wait_until(lambda: all(p.exists() and p.read_text().endswith("\n") for p in logs), "start")
    pids = [int(pid) for path in logs for pid in path.read_text().split()]

    launcher.send_signal(number)

    assert launcher.wait(timeout=10) == 128 + number
    assert len(pids) == 4
    assert all(process_is_gone(pid) for pid in pids)


def test_orphans_of_a_worker_that_succeeded_are_stopped_too(tmp_path: Path) -> None:
    script = (
        "import subprocess; child = subprocess.Popen(['sleep', '60'], start_new_session=True);"
        "print(child.pid)"
    )
    done = launch("--workers=1", f"--log_dir={tmp_path}", script=script)

    assert done.returncode == 0
    assert process_is_gone(int(done.stdout))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux watches the parent")
def test_workers_die_with_a_killed_launcher(tmp_path: Path) -> None:
    script = "print(os.getpid(), flush=True); time.sleep(60)"
    command = launcher_command("--workers=1", f"--log_dir={tmp_path}", script=script)
    launcher = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    log = tmp_path / "worker_00.log"
    wait_until(lambda: log.exists() and log.read_text().endswith("\n"), "start")

    launcher.kill()
    launcher.wait()

    wait_until(lambda: process_is_gone(int(log.read_text())), "the worker's end")


def test_timeout_shows_the_logs_of_those_that_still_ran(tmp_path: Path) -> None:
    script = "print(f'worker {rank} was here', flush=True); time.sleep(60 * rank)"
    flags = ["--workers=2", "--timeout_seconds=0.7", f"--log_dir={tmp_path}"]
    done = launch(*flags, script=script)

    report = done.stderr.decode()
    assert done.returncode == 124
    assert "not finished after 0.7 s" in report
    assert "| worker 1 was here" in report
    assert "| worker 0 was here" not in report


# Fails once, with the code of a worker that saved its state; what `start` prints is in its log.
FAILS_ONCE = (
    "start = int(os.environ['TF_LARGEBATCH_RESTART']);"
    "print('start', start, os.environ['TF_CONFIG'], flush=True);"
    "sys.exit(143) if start == 0 and rank == 1 else time.sleep(0 if start else 60)"
)


def test_all_workers_are_started_again_after_a_failure(tmp_path: Path) -> None:
    flags = ["--workers=2", "--max_restarts=2", "--grace_seconds=0", f"--log_dir={tmp_path}"]
    done = launch(*flags, "--restart_backoff_seconds=0.1", script=FAILS_ONCE)

    report = done.stderr.decode()
    assert done.returncode == 0, report
    assert "worker 1 exited with code 143" in report
    assert "restart 1 of 2 in 0.1 s" in report
    assert "all 2 workers finished" in report
    assert "given up" not in report
    starts = []
    for suffix in ("", ".restart_1"):
        logs = [(tmp_path / f"worker_{rank:02d}{suffix}.log").read_text() for rank in range(2)]
        assert {log.split()[1] for log in logs} == {str(len(starts))}
        configs = [json.loads(log.split(maxsplit=2)[2]) for log in logs]
        assert [config["task"]["index"] for config in configs] == [0, 1]
        starts.append(configs[0]["cluster"]["worker"])
    assert starts[0] != starts[1]  # new ports: the old ones may be in use for a while
    assert done.stdout == b"".join(
        (tmp_path / f"worker_00{suffix}.log").read_bytes() for suffix in ("", ".restart_1")
    )
    assert len(list(tmp_path.iterdir())) == 4


def test_the_launcher_gives_up_with_the_cause_of_every_attempt(tmp_path: Path) -> None:
    script = (
        "start = int(os.environ['TF_LARGEBATCH_RESTART']); print('line of', start, flush=True);"
        "sys.exit(3 + start) if rank == (1, 0, 1)[start] else time.sleep(60)"
    )
    flags = ["--workers=2", "--max_restarts=2", "--grace_seconds=0", f"--log_dir={tmp_path}"]
    done = launch(*flags, "--restart_backoff_seconds=0.1", script=script)

    report = done.stderr.decode()
    assert done.returncode == 1
    assert "restart 1 of 2 in 0.1 s" in report
    assert "restart 2 of 2 in 0.2 s" in report
    causes = report.partition("given up after 2 restart(s)")[2].splitlines()[1:]
    assert ["exited with code" in cause for cause in causes] == [True] * 3
    assert [cause.partition(" after ")[0].removeprefix("[launcher]   ") for cause in causes] == [
        "start: worker 1 exited with code 3",
        "restart 1: worker 0 exited with code 4",
        "restart 2: worker 1 exited with code 5",
    ]
    assert "| line of 2\n" in report
    assert "| line of 0\n" not in report and "| line of 1\n" not in report
    assert str(tmp_path / "worker_01.restart_2.log") in report


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_back_off_ends_everything(tmp_path: Path, number: int) -> None:
    flags = ["--workers=1", "--max_restarts=5", "--restart_backoff_seconds=60"]
    command = launcher_command(*flags, f"--log_dir={tmp_path}", script="sys.exit(1)")
    launcher = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert launcher.stderr is not None
    report = b""
    while b"restart 1 of 5 in 60 s" not in report:
        line = launcher.stderr.readline()
        assert line, report
        report += line

    launcher.send_signal(number)

    assert launcher.wait(timeout=10) == 128 + number
    assert f"stopped by {number.name} before restart 1".encode() in launcher.stderr.read()
    launcher.stderr.close()
    assert [path.name for path in tmp_path.iterdir()] == ["worker_00.log"]


def test_a_stopped_launcher_starts_nothing_again(tmp_path: Path) -> None:
    script = (
        "import signal; signal.signal(signal.SIGTERM, lambda *_: (print('saved'), sys.exit(143)));"
        "print('ready', flush=True); time.sleep(60)"
    )
    flags = ["--workers=2", "--max_restarts=5", f"--log_dir={tmp_path}"]
    launcher = subprocess.Popen(
        launcher_command(*flags, script=script), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    logs = [tmp_path / f"worker_{rank:02d}.log" for rank in range(2)]
    wait_until(lambda: all(p.exists() and "ready" in p.read_text() for p in logs), "start")

    launcher.send_signal(signal.SIGTERM)

    report = launcher.communicate(timeout=10)[1].decode()
    assert launcher.returncode == 128 + signal.SIGTERM
    assert "restart" not in report
    assert all(path.read_text() == "ready\nsaved\n" for path in logs)
    assert len(list(tmp_path.iterdir())) == 2


def test_the_timeout_counts_over_all_attempts(tmp_path: Path) -> None:
    flags = ["--workers=1", "--max_restarts=50", "--restart_backoff_seconds=0.1"]
    script = "time.sleep(0.1); sys.exit(1)"
    done = launch(*flags, "--timeout_seconds=1.5", f"--log_dir={tmp_path}", script=script)

    assert done.returncode == 124
    assert 2 <= len(list(tmp_path.iterdir())) < 10


def test_terminate_seconds_are_the_time_to_sigkill(tmp_path: Path) -> None:
    script = (
        "import signal; signal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True));"
        "[time.sleep(0.05) for _ in range(1200)]"
    )
    flags = ["--workers=1", "--timeout_seconds=1", "--terminate_seconds=0.5"]
    started_at = time.monotonic()
    done = launch(*flags, f"--log_dir={tmp_path}", script=script)

    assert done.returncode == 124
    assert done.stdout == b"asked\n"
    assert time.monotonic() - started_at < 10


def test_the_wait_before_a_restart_doubles_and_begins_anew() -> None:
    for name in ("_local_cluster", "_cluster_display"):
        load(name)
    next_backoff = load("_supervisor").next_backoff

    waits, wait = [], None
    for ran_seconds in (0, 1, 599, 0, 0, 0, 0, 600, 0):
        wait = next_backoff(wait, ran_seconds=ran_seconds, first=1.5)
        waits.append(wait)
    assert waits == [1.5, 3, 6, 12, 24, 48, 60, 1.5, 3]
    assert next_backoff(90, ran_seconds=0, first=90) == 90
    assert next_backoff(0, ran_seconds=0, first=0) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max_restarts=-1", "--", "true"], "--max_restarts=-1"),
        (["--workers=0", "--", "true"], "--workers=0"),
        (["--workers=2"], "No command given"),
        (["--worker=2", "--", "true"], "'worker'"),
        (["--", "no-such-command"], "'no-such-command'"),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong(arguments: list[str], message: str) -> None:
    command = [sys.executable, str(LAUNCHER), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)

    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
