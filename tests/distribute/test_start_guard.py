"""The guard around the start of TensorFlow's server, without TensorFlow."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time

import pytest

from tf_largebatch.distribute._start_guard import listens, refuses

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


def test_refuses(closed_address: str) -> None:
    assert refuses(closed_address)
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert not refuses(f"127.0.0.1:{server.getsockname()[1]}")


def test_a_host_that_says_nothing_refuses_nothing() -> None:
    """A full queue of connections drops those to come, as a network that passes nothing on."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with contextlib.ExitStack() as waiting:
            for _ in range(3):
                client = waiting.enter_context(socket.socket())
                client.setblocking(False)
                client.connect_ex(server.getsockname())
            assert not refuses(address, timeout_seconds=0.3)
            assert not listens(address, timeout_seconds=0.3)


@pytest.mark.parametrize("address", ["no.such.host.invalid:1", "[::1]:1"])
def test_only_a_refusal_is_one(address: str) -> None:
    """Of a name that is not known nothing is known; an IPv6 address is taken without brackets."""
    assert refuses(address, timeout_seconds=1.0) == (address == "[::1]:1" and has_ipv6())


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


MPI_SCRIPT = """
import sys, time
import importlib.util
spec = importlib.util.spec_from_file_location("guard", sys.argv[1])
guard = importlib.util.module_from_spec(spec)
spec.loader.exec_module(guard)
launched = {"alone": None, "of 4": ("mpiexec", 4, 2)}[sys.argv[3]]
with guard.end_if_mpi_hangs(launched, timeout_seconds=0.5):
    if sys.argv[2] == "hangs":
        sum(range(10**12))
    time.sleep(float(sys.argv[4]))
print("went on", flush=True)
time.sleep(2.0)
"""


def run_mpi_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", MPI_SCRIPT, GUARD, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_start_of_mpi_that_hangs_ends_with_what_is_known() -> None:
    done = run_mpi_script("hangs", "of 4", "0")
    assert done.returncode == 1 and "went on" not in done.stdout
    assert "PeerTimeoutError: MPI of rank 2, one of 4 that mpiexec started" in done.stderr
    assert "start_timeout_seconds=0.5" in done.stderr
    assert "before it makes its LargeBatchStrategy. See their logs" in done.stderr
    assert "can be reached" not in done.stderr, "nobody was asked"


def test_nothing_is_left_of_the_guard_of_mpi() -> None:
    done = run_mpi_script("goes on", "of 4", "0")
    assert (done.returncode, done.stdout, done.stderr) == (0, "went on\n", "")


def test_a_process_that_nobody_else_was_started_with_is_not_guarded() -> None:
    """MPI waits for nobody then; a slow machine is no reason to end."""
    done = run_mpi_script("goes on", "alone", "1.5")
    assert (done.returncode, done.stdout, done.stderr) == (0, "went on\n", "")
