"""One set of workers of a benchmark, with or without a relay between them, and what they return."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from _local_cluster import HOST, LocalCluster, pick_ports
from _relay import open_relay

_POLL_SECONDS = 0.1
_LOG_LINES = 12


@dataclasses.dataclass(frozen=True)
class ForkedRun:
    """What came out of it.

    Args:
        results: what each worker wrote, in rank order; empty if the run failed.
        problem: what went wrong, with the end of a log; None if nothing did.
        relay: the facts of the relay between them; None without one.
    """

    results: tuple[dict[str, Any], ...]
    problem: str | None
    relay: dict[str, float] | None


def run_forked(
    program: Path,
    program_flags: Mapping[str, Any],
    *,
    workers: int,
    timeout_seconds: float,
    one_way_delay_ms: float = 0.0,
    bandwidth_mbit: float = 0.0,
) -> ForkedRun:
    """Starts the relay, if there is one, and the workers, and collects what they hand back.

    Args:
        program: the script whose process becomes the workers, by `_forks.run_forks`.
        program_flags: its flags; `result_dir` is added, and None stands for the flag's default.
        workers: how many.
        timeout_seconds: for all; then the run has failed.
        one_way_delay_ms: from a worker to another.
        bandwidth_mbit: 10^6 bits a second, of each pair in each direction; 0 is without limit.
    """
    addresses = [f"{HOST}:{port}" for port in pick_ports(workers)]
    with tempfile.TemporaryDirectory(prefix=f"{program.stem}_") as name, LocalCluster() as cluster:
        folder = Path(name)
        # Ends before the cluster, which kills all that is left.
        with contextlib.ExitStack() as stack:
            relay, known = None, [addresses] * workers
            if one_way_delay_ms or bandwidth_mbit:
                relay = stack.enter_context(
                    open_relay(
                        addresses,
                        one_way_delay_seconds=one_way_delay_ms / 1e3,
                        bandwidth_bits_per_second=bandwidth_mbit * 1e6,
                    )
                )
                known = relay.addresses
            (folder / "addresses.json").write_text(json.dumps(known))
            command = command_of(program, folder, program_flags)
            cluster.start(command, num_workers=1, replicas_per_worker=1, log_dir=folder)
            problem = _wait(cluster, timeout_seconds)
        facts = relay.facts if relay else None
        if problem is not None:
            return ForkedRun((), problem, facts)
        files = sorted(folder.glob("rank_*.json"))
        return ForkedRun(tuple(json.loads(file.read_text()) for file in files), None, facts)


def command_of(program: Path, folder: Path, program_flags: Mapping[str, Any]) -> list[str]:
    """The command line of a program that writes its results to `folder`; None is no flag."""
    given = {name: value for name, value in program_flags.items() if value is not None}
    own = [f"--{name}={value}" for name, value in {"result_dir": folder, **given}.items()]
    return [sys.executable, str(program), *own]


def _wait(cluster: LocalCluster, timeout_seconds: float) -> str | None:
    """Waits until the workers have ended; returns what went wrong, with the end of a log."""
    while cluster.poll():
        if cluster.elapsed >= timeout_seconds:
            return f"not finished after {timeout_seconds:g} s"
        time.sleep(_POLL_SECONDS)
    (parent,) = cluster.exited
    return "\n".join(parent.last_log_lines(_LOG_LINES)) if parent.failed else None
