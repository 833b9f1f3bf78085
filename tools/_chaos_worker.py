"""Workers of `chaos_train.py` and `benchmark_failures.py`: gangs of forks, one after the other.

An import of TensorFlow takes seconds, a fork of a process that has imported it none; so this one
imports it once, and runs no op. It reads its orders from standard input, a line of JSON each, and
says in standard output, likewise, who has ended how. See `_chaos_gangs.py` for
the other side, with whose end, or with whose input's, this process and its forks end.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import select
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf
from _chaos_settings import Training
from _chaos_training import train
from _forks import fork_worker
from absl import app

import tf_largebatch as tlb

_POLL_SECONDS = 0.005


def _say(**fact: Any) -> None:
    print(json.dumps(fact), flush=True)


def _orders() -> Iterator[dict[str, Any] | None]:
    """What is read; None where there was nothing for a while."""
    text = b""
    while True:
        if not select.select([0], [], [], _POLL_SECONDS)[0]:
            yield None
            continue
        if not (data := os.read(0, 65536)):
            return
        *lines, text = (text + data).split(b"\n")
        yield from map(json.loads, lines)


def _start(order: dict[str, Any]) -> dict[int, int]:
    """Starts the workers of a gang; the rank of each process."""
    folder, training = Path(order["folder"]), Training(**order["training"])
    return {
        fork_worker(
            folder, rank, order["addresses"], lambda rank: train(training, folder, rank)
        ): rank
        for rank in order["ranks"]
    }


def main(_: Sequence[str]) -> None:
    for name in tlb.__all__:  # the package is lazy: imported here, once and the same for all forks
        getattr(tlb, name)
    tf.get_logger().setLevel("WARNING")
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # into the log of whoever gets it
    gc.freeze()  # else a fork copies its parent's memory at its end, to look for garbage
    _say(ready=True)
    rank_of: dict[int, int] = {}
    gang = None
    for order in _orders():
        if order and "start" in order:
            gang = order["start"]["folder"]
            rank_of = _start(order["start"])
        elif order:
            for pid, rank in rank_of.items():
                if rank in order["ranks"]:
                    os.kill(pid, order["signal"])  # not reaped by now: it is no other process
        while rank_of:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            code = os.waitstatus_to_exitcode(status)
            _say(gang=gang, rank=rank_of.pop(pid), code=code, at=time.monotonic())


if __name__ == "__main__":
    app.run(main)
