"""Workers by ssh: the launcher as a user runs it, with an ssh that stays on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

LAUNCHER = Path(__file__).parents[2] / "tools" / "launch_ssh_cluster.py"
RANK = "import json, os, sys, time; rank = json.loads(os.environ['TF_CONFIG'])['task']['index']; "
pytestmark = pytest.mark.timeout(120)
# Like ssh, it joins its arguments and hands them to a shell, which is another process than itself
# and outlives it; `--ssh` has options for it. What was started on which host is in `hosts`.
FAKE_SSH = """\
#!/bin/sh
test "$1 $2" = "-o BatchMode=yes" || exit 255
shift 2
echo "$1" >> "{hosts}"
test "$1" = unreachable && {{ echo "ssh: connect to host $1: No route to host" >&2; exit 255; }}
shift
cd / && unset PYTHONUNBUFFERED
exec 3<&0
sh -c "$*" <&3 3<&- &
wait $!
"""


@contextlib.contextmanager
def launched(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    launcher = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield launcher
    finally:
        launcher.kill()
        launcher.wait()


@pytest.fixture
def ssh(tmp_path: Path) -> str:
    program = tmp_path / "fake ssh"
    program.write_text(FAKE_SSH.format(hosts=tmp_path / "hosts"))
    program.chmod(0o755)
    return f"'{program}' -o BatchMode=yes"


def launcher_command(ssh: str, log_dir: Path, *flags: str, script: str) -> list[str]:
    command = [sys.executable, str(LAUNCHER), f"--ssh={ssh}", f"--log_dir={log_dir}", *flags]
    return [*command, "--", sys.executable, "-c", RANK + script]


def wait_until(condition, what: str) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_each_host_runs_the_very_command_with_its_tf_config(tmp_path: Path, ssh: str) -> None:
    workdir = tmp_path / "it's here"
    workdir.mkdir()
    flags = ["--hosts=node1,me@node2:2300,[::1]:2400", "--port=2200", f"--workdir={workdir}"]
    odd = ["a b", "it's", '"$HOME"', "`id`", "!*;&|>", "\\n", "line\nbreak", "", "é"]
    script = "print(json.dumps([os.environ['TF_CONFIG'], os.getcwd(), sys.argv[1:]]))"
    command = launcher_command(ssh, tmp_path / "logs", *flags, script=script)
    done = subprocess.run([*command, *odd], capture_output=True, timeout=30, check=False)

    assert done.returncode == 0, done.stderr
    assert sorted((tmp_path / "hosts").read_text().split()) == ["::1", "me@node2", "node1"]
    for rank in range(3):
        log = (tmp_path / "logs" / f"worker_{rank:02d}.log").read_text()
        config, folder, arguments = json.loads(log)
        assert json.loads(config) == {
            "cluster": {"worker": ["node1:2200", "node2:2300", "[::1]:2400"]},
            "task": {"type": "worker", "index": rank},
        }
        assert folder == str(workdir)
        assert arguments == odd
        if rank == 0:
            assert done.stdout.decode() == log


def test_an_end_lets_workers_save_and_say_so(tmp_path: Path, ssh: str) -> None:
    # Worker 1 fails at first; worker 0 then gets a SIGTERM from its host, as does its child.
    script = (
        "import signal, subprocess; start = os.environ['TF_LARGEBATCH_RESTART'];"
        "signal.signal(signal.SIGTERM, lambda *_: print('asked'));"
        "child = subprocess.Popen(['sleep', '0' if start == '1' else '60']);"
        f"ready = {str(tmp_path)!r} + '/ready';"
        "rank == 0 and print('ready', file=open(ready, 'w'), flush=True);"
        "[time.sleep(0.02) for _ in iter(lambda: os.path.exists(ready), True)];"
        "(start, rank) == ('0', 1) and sys.exit(7);"
        "print('saved', child.wait()); sys.exit(143 if child.returncode else 0)"
    )
    flags = ["--hosts=a,b", "--max_restarts=1", "--grace_seconds=0"]
    flags += ["--restart_backoff_seconds=0.1"]
    command = launcher_command(ssh, tmp_path / "logs", *flags, script=script)
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)

    assert done.returncode == 0, done.stderr
    assert "worker 1 exited with code 7" in done.stderr
    assert "worker 0 (a:2222) was stopped by the launcher" in done.stderr
    assert done.stdout == f"asked\nsaved {-signal.SIGTERM}\nsaved 0\n"
    assert len(list((tmp_path / "logs").iterdir())) == 4


def test_what_ignores_the_sigterm_is_killed_by_its_host(tmp_path: Path, ssh: str) -> None:
    script = (
        "import signal, subprocess; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "child = subprocess.Popen(['sleep', '60']);"
        "print(os.getpid(), child.pid, flush=True); [time.sleep(1) for _ in range(60)]"
    )
    flags = ["--hosts=a", "--terminate_seconds=0.5"]
    log = tmp_path / "logs" / "worker_00.log"
    with launched(launcher_command(ssh, tmp_path / "logs", *flags, script=script)) as launcher:
        wait_until(lambda: log.exists() and log.read_text().endswith("\n"), "start")

        launcher.send_signal(signal.SIGTERM)

        assert launcher.wait(timeout=10) == 128 + signal.SIGTERM
    assert all(is_gone(int(pid)) for pid in log.read_text().splitlines()[0].split())


@pytest.mark.parametrize("killed", ["launcher", "ssh"])
def test_workers_end_when_the_launcher_or_the_connection_is_gone(
    tmp_path: Path, ssh: str, killed: str
) -> None:
    saved = tmp_path / "saved"
    script = (
        "import signal, subprocess;"
        f"end = lambda *_: (open({str(saved)!r}, 'w').write('yes'), sys.exit(143));"
        "signal.signal(signal.SIGTERM, end); child = subprocess.Popen(['sleep', '60']);"
        "print(os.getpid(), child.pid, flush=True); time.sleep(60)"
    )
    log = tmp_path / "logs" / "worker_00.log"
    with launched(launcher_command(ssh, log.parent, "--hosts=a", script=script)) as launcher:
        wait_until(lambda: log.exists() and log.read_text().endswith("\n"), "start")
        if killed == "launcher":
            launcher.kill()
        else:
            (fake,) = psutil.Process(launcher.pid).children()
            fake.kill()
        assert launcher.wait(timeout=20) == (-signal.SIGKILL if killed == "launcher" else 1)
    wait_until(lambda: all(is_gone(int(pid)) for pid in log.read_text().split()), "the end")
    # Here the launcher finds the worker of a killed ssh among its children, and kills it.
    assert killed == "ssh" or saved.read_text() == "yes"


def test_a_host_that_cannot_be_reached_is_named_with_sshs_words(tmp_path: Path, ssh: str) -> None:
    flags = ["--hosts=a,unreachable", "--grace_seconds=0"]
    command = launcher_command(ssh, tmp_path / "logs", *flags, script="time.sleep(60)")
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)

    assert done.returncode == 1
    assert "worker 1 (unreachable:2222) exited with code 255" in done.stderr
    assert "| ssh: connect to host unreachable: No route to host" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--", "true"], "No hosts given"),
        (["--hosts=a"], "No command given"),
        (["--hosts=a,A", "--", "true"], "--hosts=a,A: addresses[1] is 'A:2222'"),
        (["--hosts=a,b:x", "--", "true"], "'x' must be a number"),
        (["--hosts=a,b:", "--", "true"], "addresses[1] is 'b:'"),
        (["--hosts=::1", "--", "true"], "'::1' is no host as"),
        (["--hosts=a,,b", "--", "true"], "'' is no host as"),
        (["--hosts=a", "--ssh=no-such-ssh -v", "--", "true"], "'no-such-ssh -v'"),
        (["--hosts=a", "--port=0", "--", "true"], "--port=0"),
    ],
)
def test_a_wrong_ssh_command_line_says_what_is_wrong(arguments: list[str], message: str) -> None:
    command = [sys.executable, str(LAUNCHER), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=30, check=False, env={**os.environ}
    )
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
