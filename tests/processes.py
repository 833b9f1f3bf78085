"""Python in a process of its own, for what must run before TensorFlow or in a fresh one."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
_POLL_SECONDS = 0.02


def run_python(
    *arguments: str,
    seconds: float = 120.0,
    environment: Mapping[str, str] | None = None,
    import_from: Sequence[str] = (),
) -> str:
    """Standard output of `python ARGUMENTS`, run from the root of the repository.

    Without GPUs, and as no worker of a cluster.

    Args:
        seconds: after which it is killed, and the test fails.
        environment: more variables.
        import_from: folders of the repository whose modules it imports by their bare names.
    """
    inherited = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    paths = os.pathsep.join(str(ROOT / folder) for folder in ("", *import_from))
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={
            **inherited,
            "CUDA_VISIBLE_DEVICES": "-1",
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "PYTHONPATH": paths,
            **(environment or {}),
        },
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def json_from_replicas(module: str, *, replicas: int) -> Any:
    """What `python -m MODULE` prints in its last line, run on so many replicas of one CPU."""
    printed = run_python(
        "-m", module, seconds=240, environment={"TF_LARGEBATCH_CPU_REPLICAS": str(replicas)}
    )
    return json.loads(printed.splitlines()[-1])


def kill_marked(variable: str, mark: str) -> None:
    """Kills all that inherited a mark in their environment, until nothing is left of it."""
    while processes := _marked(variable, mark):
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(_POLL_SECONDS)


def _marked(variable: str, mark: str) -> list[psutil.Process]:
    """Whoever their parents and sessions are by now."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # gone meanwhile, or not ours to read
            if process.environ().get(variable) == mark:
                found.append(process)
    return found
