"""Runs one command on several hosts by ssh, a worker on each, with its own TF_CONFIG.

    python tools/launch_ssh_cluster.py --hosts=node1,node2,node3 -- \\
        .venv/bin/python examples/train.py --run_dir=/shared/runs/first

Every host must let you in without a question (a key, an agent), have the command and the data, and
reach the others at their names and ports: each of `host1,host2:2223,[::1]:2222` is both what ssh
connects to and the address at which the other workers find it; a worker without a port of its own
serves at --port. `user@host` is for ssh alone. The first host is the chief.

A worker gets the environment that its host gives to ssh commands, and TF_CONFIG,
TF_LARGEBATCH_RESTART and PYTHONUNBUFFERED=1; for more, begin the command with `env NAME=VALUE`. It
runs in --workdir, which is this directory by default.

Output, logs, restarts (on the same ports) and exit codes are those of launch_local_cluster.py.
Workers end when the launcher ends: what the hosts run is tied to the connection, not to a terminal;
when it closes, for whatever reason, the worker and what it started get SIGTERM, and SIGKILL after
--terminate_seconds. A worker's exit code of 255 may be ssh's own: it could not connect.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Sequence

import _launcher_flags
from _launcher_flags import command_of, exit_for_usage, parse_flags, supervisor_options
from _ssh_cluster import SshCluster
from _supervisor import Supervisor
from absl import app, flags

import tf_largebatch as tlb

_HOSTS = flags.DEFINE_list("hosts", None, "Where the workers run, as host1,host2:2223,[::1]:2222.")
_PORT = flags.DEFINE_integer(
    "port", 2222, "At which a worker serves.", lower_bound=1, upper_bound=65535
)
_SSH = flags.DEFINE_string(
    "ssh",
    "ssh -o BatchMode=yes -o ServerAliveInterval=15",
    "How to call ssh; a lost connection should end it.",
)
_WORKDIR = flags.DEFINE_string("workdir", None, "Where the command runs; default: this directory.")
_HOST = re.compile(r"(?:([^@]+)@)?(\[[^\]]*\]|[^:\[\]]*)(?::(.*))?")


def read_hosts(texts: Sequence[str], default_port: int) -> tuple[list[str], list[str]]:
    """What ssh connects to, and `host:port` of the workers.

    Raises:
        ConfigurationError: a text is no host.
    """
    destinations, addresses = [], []
    for text in texts:
        match = _HOST.fullmatch(text)
        if match is None or not match[2]:
            raise tlb.ConfigurationError(
                f"{text!r} is no host as 'host1', 'user@host1:2223' or '[::1]:2222'."
            )
        user, host, port = match.groups()
        destinations.append(f"{user}@{host.strip('[]')}" if user else host.strip("[]"))
        addresses.append(f"{host}:{default_port if port is None else port}")
    return destinations, addresses


def main(argv: Sequence[str]) -> int:
    command = command_of(argv)
    ssh = shlex.split(_SSH.value)
    if not ssh or shutil.which(ssh[0]) is None:
        exit_for_usage(f"--ssh={_SSH.value!r} does not begin with a program that is found on PATH.")
    if not _HOSTS.value:
        exit_for_usage("No hosts given, as in: --hosts=host1,host2:2223")
    try:
        destinations, addresses = read_hosts(_HOSTS.value, _PORT.value)
        topology = tlb.ClusterTopology.from_addresses(addresses)
    except tlb.ConfigurationError as error:
        exit_for_usage(f"--hosts={','.join(_HOSTS.value)}: {error}")
    options = supervisor_options()

    def start(cluster: SshCluster, restart: int) -> None:
        cluster.start_on(
            destinations,
            topology,
            command,
            ssh=ssh,
            workdir=_WORKDIR.value or os.getcwd(),
            terminate_seconds=options.terminate_seconds,
            log_dir=options.log_dir,
            restart=restart,
        )

    return Supervisor(SshCluster, start, options).run()


if __name__ == "__main__":
    flags.adopt_module_key_flags(_launcher_flags)  # so that --help lists them
    app.run(main, flags_parser=parse_flags)
