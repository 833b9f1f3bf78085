"""Who says that a rank was killed, where its launcher kills the others: shells, without MPI."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = """
import sys, types
import tf_largebatch
package = types.ModuleType("tf_largebatch.distribute")  # its own __init__ imports TensorFlow
package.__path__ = [f"{tf_largebatch.__path__[0]}/distribute"]
sys.modules["tf_largebatch.distribute"] = package
from tf_largebatch.distribute._mpi_witness import Witness

witness = Witness(sys.argv[1], ["127.0.0.1:1", sys.argv[2]])
print("ready", flush=True)
word = sys.stdin.readline().strip()
if word == "dismiss":
    witness.dismiss()
if word == "speak":
    witness.speak_for_all("it ends them all")
"""


def start(name: str, job: Path, *, session: bool = False) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, name, str(job)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=session,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def said(process: subprocess.Popen[str], word: str = "") -> str:
    """What is on standard error, which ends once the witness has let go of it as well."""
    _, error = process.communicate(f"{word}\n", timeout=20)
    return error


def test_a_killed_process_is_named_at_once(tmp_path: Path) -> None:
    process = start("worker 3 at node-c:2222", tmp_path)
    process.kill()
    begin = time.monotonic()
    text = said(process)
    assert time.monotonic() - begin < 5.0  # it does not hold the output until it has tidied up
    assert f"worker 3 at node-c:2222 (process {process.pid} on " in text
    assert "ended without a word" in text


def test_it_outlives_its_session(tmp_path: Path) -> None:
    process = start("worker 1 at a:1", tmp_path, session=True)
    os.killpg(process.pid, signal.SIGKILL)
    assert "worker 1 at a:1" in said(process)


def test_of_several_the_first_one_speaks(tmp_path: Path) -> None:
    processes = [start(f"worker {rank} at a:{rank}", tmp_path) for rank in range(3)]
    texts = []
    for process in (processes[1], processes[0], processes[2]):
        process.kill()
        texts.append(said(process))
    assert "worker 1 at a:1" in texts[0]
    assert texts[1:] == ["", ""]


@pytest.mark.parametrize("word", ["dismiss", "speak"])
def test_who_leaves_in_good_order_is_not_named(word: str, tmp_path: Path) -> None:
    text = said(start("worker 0 at a:0", tmp_path), word)
    assert text == ("it ends them all\n" if word == "speak" else "")


def test_who_speaks_for_all_silences_the_others(tmp_path: Path) -> None:
    first, second = (start(f"worker {rank} at a:{rank}", tmp_path) for rank in range(2))
    assert said(first, "speak") == "it ends them all\n"
    second.kill()
    assert said(second) == ""
