"""The guard around the start of TensorFlow's server, without TensorFlow."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import pytest

from tf_largebatch.distribute._start_guard import listens

# One long call into C code keeps the interpreter's lock throughout, as TensorFlow's start does.
SCRIPT = """
import sys, time
from tf_largebatch.core.topology import ClusterTopology
import importlib.util
spec = importlib.util.spec_from_file_location("guard", sys.argv[1])
guard = importlib.util.module_from_spec(spec)
spec.loader.exec_module(guard)
topology = ClusterTopology(addresses=tuple(sys.argv[3:]), rank=0, task_type="worker", task_index=0)
with guard.end_if_server_hangs(topology, timeout_seconds=0.5):
    if sys.argv[2] == "hangs":
        sum(range(10**12))
print("went on", flush=True)
time.sleep(3.0)  # beyond what the guard would wait
"""
GUARD = "tf_largebatch/distribute/_start_guard.py"


def run_script(*arguments: str) -> tuple[subprocess.CompletedProcess[str], float]:
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, GUARD, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done, time.monotonic() - begin


@pytest.fixture
def closed_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def test_a_hang_that_holds_the_lock_ends_with_the_absent_named(closed_address: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as peer:
        there = f"127.0.0.1:{peer.getsockname()[1]}"
        done, seconds = run_script("hangs", "127.0.0.1:1", there, closed_address)
    assert done.returncode == 1
    assert seconds < 15.0
    assert "went on" not in done.stdout
    assert "PeerTimeoutError: TensorFlow's server of worker 0 at 127.0.0.1:1" in done.stderr
    assert "start_timeout_seconds=0.5" in done.stderr
    assert f"no longer there: worker 2 at {closed_address}." in done.stderr
    assert there not in done.stderr
    assert 'File "<string>"' in done.stderr  # where it hangs


def test_a_hang_with_all_there(closed_address: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as peer:
        done, _ = run_script("hangs", closed_address, f"127.0.0.1:{peer.getsockname()[1]}")
    assert done.returncode == 1
    assert "of which all can be reached" in done.stderr


def test_nothing_is_left_of_the_guard_after_the_block(closed_address: str) -> None:
    done, _ = run_script("goes on", closed_address, closed_address)
    assert (done.returncode, done.stdout, done.stderr) == (0, "went on\n", "")


def test_listens(closed_address: str) -> None:
    assert not listens(closed_address)
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert listens(f"127.0.0.1:{server.getsockname()[1]}")
