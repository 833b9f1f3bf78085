"""Workers on other hosts, each the end of an ssh connection that it does not outlive.

ssh starts a plain `sh` there, which reads from the connection what to do (so the command passes
through no login shell's quoting), starts the command in a session of its own, and then waits for
the end of its input. That comes when the launcher closes it or is gone, killed or not, and when the
connection breaks: then the command and what it started get SIGTERM, and SIGKILL after some seconds.
In the meantime ssh goes on with the output, so that a worker can save its state and say so; only
when the connection itself is lost, nobody reads any more what a worker prints. (`ssh -tt` would do
worse: a SIGHUP, a terminal's line ends in the output, and nobody to send the SIGKILL.)
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from _local_cluster import RESTART_VARIABLE, LocalCluster, log_path

import tf_largebatch as tlb

_PIPE_BYTES = 64 * 1024  # what Linux gives a pipe
# `setsid` makes a process group of the command and all that it starts; where there is none, the
# command alone is signalled. Descriptor 3 is the connection; nothing but `cat` may hold it open.
_REMOTE_SCRIPT = """\
{{
cd {workdir} || exit 1
export {exports}
command -v setsid >/dev/null 2>&1 || setsid() {{ exec "$@"; }}
exec 3<&0
setsid {command} </dev/null 3<&- &
worker=$!
{{
  trap 'kill "$pause"; exit' TERM
  cat <&3 &
  pause=$!
  wait "$pause"
  exec 3<&-
  kill -TERM "-$worker" || kill -TERM "$worker"
  sleep {terminate_seconds} &
  pause=$!
  wait "$pause"
  kill -KILL "-$worker" || kill -KILL "$worker"
}} >/dev/null 2>&1 &
watcher=$!
exec 3<&-
wait "$worker"
code=$?
exec 2>/dev/null
kill -TERM "$watcher"
kill -KILL "-$worker"
exit "$code"
}}
"""


def remote_script(
    command: Sequence[str],
    variables: Mapping[str, str],
    *,
    workdir: str,
    terminate_seconds: float,
) -> str:
    """What the `sh` of a host reads: runs the command until its end, or that of the input."""
    return _REMOTE_SCRIPT.format(
        workdir=shlex.quote(workdir),
        exports=" ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items()),
        command=shlex.join(command),
        terminate_seconds=f"{terminate_seconds:g}",
    )


class SshCluster(LocalCluster):
    """The workers of one command on several hosts; a context manager that ends all of them."""

    extra_terminate_seconds = 3.0  # the hosts count by themselves, a little later

    def start_on(
        self,
        destinations: Sequence[str],
        topology: tlb.ClusterTopology,
        command: Sequence[str],
        *,
        ssh: Sequence[str],
        workdir: str,
        terminate_seconds: float,
        log_dir: Path,
        restart: int,
    ) -> None:
        """Starts worker `i`, at `topology.addresses[i]`, by `ssh destinations[i]`."""
        self._started_at = time.monotonic()
        for rank, destination in enumerate(destinations):
            variables = {
                "TF_CONFIG": topology.tf_config(rank),
                RESTART_VARIABLE: str(restart),
                "PYTHONUNBUFFERED": "1",  # the chief's lines are shown as they are written
            }
            script = remote_script(
                command, variables, workdir=workdir, terminate_seconds=terminate_seconds
            ).encode()
            worker = self._start_worker(
                topology.addresses[rank],
                [*ssh, destination, "exec", "sh", "-s"],
                os.environ,
                log_path(log_dir, rank, restart),
                preexec_fn=None,  # ssh ends by itself, after the worker's last words
                stdin=subprocess.PIPE,
                # All of it fits, so that a host that does not answer does not hold up the others.
                pipesize=max(_PIPE_BYTES, len(script)),
                bufsize=0,
            )
            assert worker.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # ssh is gone: its exit code says so
                worker.process.stdin.write(script)

    def terminate(self) -> None:
        """Ends the input of every worker that still runs: its host sends the SIGTERM."""
        for worker in self.poll():
            worker.stopped_by_launcher = True
            assert worker.process.stdin is not None
            worker.process.stdin.close()
