"""All workers of one `harness.run_workers`: `_worker_main.py FILE LAUNCH.json`.

Imports the worker file, TensorFlow with it, once; then each rank is a fork, with an environment
and logs of its own. A fork is safe as long as TensorFlow has not run an op, since it has no threads
by then; so a worker file runs none when it is imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib.util
import json
import os
import pickle
import random
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

PLAIN_TYPES = (type(None), bool, int, float, str, bytes)


def plain(value: Any) -> Any:
    """`value` from builtins and NumPy only: the test process shall not import TensorFlow for it."""
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([plain(item) for item in value])
    if isinstance(value, PLAIN_TYPES) or type(value).__module__ == "numpy":
        return value
    raise TypeError(f"A case hands back numbers, text and NumPy arrays, not {type(value)!r}.")


def die_with_parent() -> None:
    """SIGKILL for this process when the test process dies, even by SIGKILL (Linux)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != int(os.environ["TEST_HARNESS_PID"]):
            os._exit(1)


def load(path: Path) -> ModuleType:
    """Imports the worker file under its own name, with its folder on the path."""
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def run_case(function: Any, arguments: tuple[Any, ...]) -> dict[str, Any]:
    """Returns what the test process needs of one case: its value or its error."""
    try:
        return {"value": plain(function(*arguments))}
    except Exception as error:
        traceback.print_exc()
        sys.stderr.flush()
        text = traceback.format_exc()
        return {"error_type": type(error).__name__, "error": str(error), "traceback": text}


def save(results: dict[str, Any], path: Path) -> None:
    """Replaces the file as a whole, so that a killed worker leaves the cases it has finished."""
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(pickle.dumps(results))
    temporary.replace(path)


def fork(
    body: Callable[[], Any], *, seed: int, env: Mapping[str, str], stdout: int, stderr: int
) -> int:
    """Starts a process that runs `body`; an exception ends it with return code 1.

    Args:
        body: what it runs.
        seed: of `random`, as a fork starts with its parent's state.
        env: more environment variables.
        stdout, stderr: descriptors of its streams.

    Returns:
        Its process number.
    """
    parent = os.getpid()
    gc.freeze()  # else a fork copies its parent's memory at its end, to look for garbage
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    os.environ["TEST_HARNESS_PID"] = str(parent)
    die_with_parent()
    os.environ.update(env)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    random.seed(seed)
    try:
        body()
    except Exception as error:  # as the interpreter does, which what started this would not
        traceback.print_exc()
        sys.last_value = error
        sys.exit(1)
    sys.exit(0)


def start(module: ModuleType, worker: dict[str, Any]) -> int:
    """Starts one rank, in a session of its own; returns its process number."""

    def body() -> None:
        os.setsid()
        run_worker(module, worker)

    with Path(worker["out"]).open("wb") as out, Path(worker["err"]).open("wb") as err:
        return fork(
            body,
            seed=worker["rank"],
            env=worker["env"],
            stdout=out.fileno(),
            stderr=err.fileno(),
        )


def run_worker(module: ModuleType, worker: dict[str, Any]) -> None:
    """What one rank runs: `setup`, then the cases."""
    setup = getattr(module, "setup", None)
    arguments = (setup(),) if setup else ()
    results: dict[str, Any] = {}
    names = worker["cases"] or [name for name in vars(module) if name.startswith("case_")]
    for name in names:
        print(f"[harness] {name}", flush=True)
        results[name] = run_case(getattr(module, name), arguments)
        save(results, Path(worker["result"]))
    print("[harness] done", flush=True)


def report(**fact: int) -> None:
    """To the test process, a line each: who has begun, and how who has ended."""
    print(json.dumps(fact), flush=True)


def main() -> None:
    die_with_parent()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    module = load(Path(sys.argv[1]))
    workers = json.loads(Path(sys.argv[2]).read_text())
    ranks = {start(module, worker): worker["rank"] for worker in workers}
    for pid, rank in ranks.items():
        report(rank=rank, pid=pid)
    while ranks:
        pid, status = os.wait()
        if pid in ranks:
            report(rank=ranks.pop(pid), code=os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
