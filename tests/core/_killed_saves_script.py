"""Saves that are killed, each in a fork of this process, which has NumPy and no TensorFlow.

Prints JSON: for each kill what `load_newest` of a fresh process would give, and what was left.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tf_largebatch.core.state_directory import StateDirectory

FOLDER = Path(sys.argv[1])


def arrays_of(update: int, *, num_bytes: int) -> list[np.ndarray]:
    random_bytes = np.random.default_rng(update).bytes(num_bytes)
    return [np.frombuffer(random_bytes, "u1"), np.full(3, update)]


def save(update: int, *, num_bytes: int = 50_000) -> None:
    arrays = arrays_of(update, num_bytes=num_bytes)
    StateDirectory(FOLDER, keep=2).save(update, {"update": update, "of": num_bytes}, arrays)


def in_a_fork(body: Callable[[], None], *, kill_after: float | None = None) -> int:
    """The signal that ended it; 0 if none did."""
    pid = os.fork()
    if not pid:
        body()
        os._exit(0)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.WTERMSIG(status)


def seen(ended_by: int) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing here may be damaged
        loaded = StateDirectory(FOLDER).load_newest()
    assert loaded is not None and loaded.contents["update"] == loaded.update
    expected = arrays_of(loaded.update, num_bytes=loaded.contents["of"])
    assert all(map(np.array_equal, loaded.arrays, expected))
    names = sorted(os.listdir(FOLDER))
    return {
        "signal": ended_by,
        "loaded": loaded.update,
        "states": [name for name in names if name.endswith(".tlb")],
        "leftovers": [(FOLDER / name).stat().st_size for name in names if name.endswith(".tmp")],
    }


def killed_at_byte(position: int) -> dict[str, Any]:
    """The system writes up to the limit, and kills at the byte behind it."""

    def body() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (position, resource.RLIM_INFINITY))
        save(2)

    return seen(in_a_fork(body))


def killed_around(call: str, number: int, *, after: bool) -> dict[str, Any]:
    """Killed before or after the call of this number of a function of `os`."""
    original, calls = getattr(os, call), iter(range(number, -1, -1))

    def patched(*arguments: Any, **options: Any) -> Any:
        last = next(calls) == 0
        if last and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*arguments, **options)
        if last:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    def body() -> None:
        setattr(os, call, patched)
        save(3)

    return seen(in_a_fork(body))


def main() -> None:
    for update in (0, 1):
        save(update)
    size = (FOLDER / "state_000000000001.tlb").stat().st_size
    random.seed(0)
    positions = [0, 1, size - 1, *random.sample(range(size), 25)]
    at_bytes = [{"position": at, **killed_at_byte(at)} for at in positions]
    in_a_fork(lambda: save(2))
    after_a_save = seen(0)
    calls = [
        ("fsync", 0, False),
        ("replace", 0, False),
        ("replace", 0, True),  # killed from here on, the new state is in place
        ("fsync", 1, False),
        ("fsync", 1, True),
        ("unlink", 0, False),
        ("unlink", 0, True),
    ]
    around_calls = [killed_around(call, number, after=after) for call, number, after in calls]
    moments = [random.uniform(0, 0.06) for _ in range(10)]
    at_moments = []
    for update, moment in enumerate(moments, start=4):
        ended_by = in_a_fork(lambda u=update: save(u, num_bytes=2**24), kill_after=moment)
        at_moments.append(seen(ended_by))
    in_a_fork(lambda: save(100))
    results = {
        "at_bytes": at_bytes,
        "after_a_save": after_a_save,
        "around_calls": around_calls,
        "at_moments": at_moments,
        "at_last": seen(0),
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
