"""Who the workers are: the description of the cluster, read once into a frozen value."""

from __future__ import annotations

import ipaddress
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tf_largebatch.core.errors import TopologyError

# Ranks follow this order of jobs; an evaluator is listed in a cluster but trains nothing.
_RANKED_JOBS = ("chief", "worker")
_EVALUATOR = "evaluator"
_HOST_NAME = re.compile(r"[A-Za-z0-9._-]+")


@dataclass(frozen=True, kw_only=True)
class ClusterTopology:
    """The workers of a synchronous cluster, and which of them this process is.

    Attributes:
        addresses: `host:port` of every worker, in rank order: the chief first, then the workers
            in list order (never sorted as text). Empty when no cluster was described.
        rank: this process' place in `addresses`; 0 without a cluster; -1 for an evaluator, which
            is not one of the workers.
        task_type: "chief", "worker" or "evaluator"; None without a cluster.
        task_index: the index within `task_type`; None without a cluster.
        evaluator_addresses: `host:port` of the evaluators, usually none or one.
    """

    addresses: tuple[str, ...] = ()
    rank: int = 0
    task_type: str | None = None
    task_index: int | None = None
    evaluator_addresses: tuple[str, ...] = ()

    @property
    def num_workers(self) -> int:
        """Workers that train, evaluators not counted; 1 without a cluster."""
        return max(1, len(self.addresses))

    @property
    def is_evaluator(self) -> bool:
        """Whether this process evaluates beside the workers; it takes part in no collective."""
        return self.task_type == _EVALUATOR

    @property
    def is_chief(self) -> bool:
        """Whether this process is rank 0: the chief, or worker 0 of a cluster without one."""
        return self.rank == 0

    @property
    def address(self) -> str | None:
        """This process' own `host:port`; None without a cluster."""
        if self.is_evaluator and self.task_index is not None:
            return self.evaluator_addresses[self.task_index]
        return self.addresses[self.rank] if self.addresses else None

    @property
    def peers(self) -> tuple[tuple[int, str], ...]:
        """(rank, address) of every other worker, in rank order."""
        return tuple(
            (rank, address) for rank, address in enumerate(self.addresses) if rank != self.rank
        )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> ClusterTopology:
        """Reads the cluster from environment variables: `TF_CONFIG`, or else one worker.

        Args:
            environ: the variables; default `os.environ`.

        Raises:
            TopologyError: `TF_CONFIG` is set and cannot be used.
        """
        variables = os.environ if environ is None else environ
        return cls.from_tf_config(variables.get("TF_CONFIG", ""))

    @classmethod
    def from_tf_config(cls, text: str) -> ClusterTopology:
        """Reads the JSON text of a `TF_CONFIG`; an empty one, or `{}`, is one worker.

        Raises:
            TopologyError: the text is no JSON object, has jobs other than chief, worker and
                evaluator, no worker, a malformed or repeated address, or a task that is missing
                or not in the cluster. The message shows the offending part.
        """
        config = _parse_tf_config(text)
        if not config:
            return cls()
        jobs = _read_jobs(config.get("cluster"))
        task_type, task_index = _read_task(config.get("task"), jobs)
        rank = -1
        if task_type != _EVALUATOR:
            before = _RANKED_JOBS[: _RANKED_JOBS.index(task_type)]
            rank = sum(len(jobs.get(job, ())) for job in before) + task_index
        return cls(
            addresses=tuple(address for job in _RANKED_JOBS for address in jobs.get(job, ())),
            rank=rank,
            task_type=task_type,
            task_index=task_index,
            evaluator_addresses=jobs.get(_EVALUATOR, ()),
        )


def _parse_tf_config(text: str) -> dict[str, Any]:
    if not text.strip():
        return {}
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        around = text[max(0, error.pos - 20) : error.pos + 20]
        raise TopologyError(f"TF_CONFIG is no valid JSON: {error}, near {around!r}.") from error
    if not isinstance(config, dict):
        raise TopologyError(
            f"TF_CONFIG is {_shown(config)}; it must be a JSON object with 'cluster' and 'task'."
        )
    return config


def _read_jobs(cluster: Any) -> dict[str, tuple[str, ...]]:
    """{job: addresses} of a cluster description, every address checked."""
    if not isinstance(cluster, dict):
        raise TopologyError(
            f"TF_CONFIG['cluster'] is {_shown(cluster)}; it must be an object that maps 'chief', "
            "'worker' and 'evaluator' to lists of addresses."
        )
    unknown = sorted(set(cluster) - {*_RANKED_JOBS, _EVALUATOR})
    if unknown:
        raise TopologyError(
            f"TF_CONFIG['cluster'] has the job {unknown[0]!r}: {_shown(cluster[unknown[0]])}. "
            "Training is synchronous and needs no parameter servers or other jobs: list every "
            "machine under 'worker' (and at most one of them under 'chief')."
        )
    for job, addresses in cluster.items():
        if not isinstance(addresses, list):
            raise TopologyError(
                f"TF_CONFIG['cluster'][{job!r}] is {_shown(addresses)}; it must be a list of "
                "'host:port'."
            )
    if not any(cluster.get(job) for job in _RANKED_JOBS):
        raise TopologyError(
            f"TF_CONFIG['cluster'] is {_shown(cluster)}: it has no worker. List at least one "
            "address under 'worker', or unset TF_CONFIG to train on this machine alone."
        )
    if len(cluster.get("chief", ())) > 1:
        raise TopologyError(
            f"TF_CONFIG['cluster']['chief'] is {_shown(cluster['chief'])}: there can be one "
            "chief; list the others under 'worker'."
        )
    _check_addresses(cluster)
    return {job: tuple(addresses) for job, addresses in cluster.items()}


def _check_addresses(cluster: dict[str, list[Any]]) -> None:
    seen: dict[str, str] = {}
    for job, addresses in cluster.items():
        for index, address in enumerate(addresses):
            place = f"TF_CONFIG['cluster'][{job!r}][{index}]"
            problem = _address_problem(address)
            if problem:
                raise TopologyError(f"{place} is {_shown(address)}: {problem}.")
            first = seen.setdefault(address.lower(), place)
            if first != place:
                raise TopologyError(
                    f"{place} is {address!r}, which {first} has already: every worker needs an "
                    "address of its own."
                )


def _address_problem(address: Any) -> str | None:
    """What is wrong with a `host:port`, or None."""
    if not isinstance(address, str):
        return "an address is a string 'host:port'"
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port:
        return "an address is 'host:port', as '10.0.0.1:2222' or '[::1]:2222'"
    if "://" in address:
        return "an address is 'host:port', without a scheme"
    if host.startswith("[") and host.endswith("]"):
        try:
            ipaddress.IPv6Address(host[1:-1])
        except ValueError:
            return f"{host[1:-1]!r} is no IPv6 address"
    elif ":" in host:
        return "an IPv6 address goes in brackets, as '[::1]:2222'"
    elif not _HOST_NAME.fullmatch(host):
        return f"{host!r} is no host name"
    if not (re.fullmatch(r"[0-9]{1,5}", port) and 1 <= int(port) <= 65535):
        return f"the port {port!r} must be a number from 1 to 65535"
    return None


def _read_task(task: Any, jobs: dict[str, tuple[str, ...]]) -> tuple[str, int]:
    """(type, index) of this process, which the cluster must have."""
    if not isinstance(task, dict) or "type" not in task or "index" not in task:
        raise TopologyError(
            f"TF_CONFIG['task'] is {_shown(task)}; it must say which worker this process is, as "
            '{"type": "worker", "index": 0}.'
        )
    task_type, index = task["type"], task["index"]
    if not isinstance(task_type, str) or task_type not in jobs:
        raise TopologyError(
            f"TF_CONFIG['task']['type'] is {_shown(task_type)}, which is no job of the cluster; "
            f"it has {sorted(jobs)}."
        )
    if isinstance(index, bool) or not isinstance(index, int):
        raise TopologyError(
            f"TF_CONFIG['task']['index'] is {_shown(index)}; it must be an integer, without quotes."
        )
    count = len(jobs[task_type])
    if not 0 <= index < count:
        raise TopologyError(
            f"TF_CONFIG['task']['index'] is {index}, but the cluster has {count} address(es) "
            f"under {task_type!r}: {list(jobs[task_type])}. Indices start at 0."
        )
    return task_type, index


def _shown(part: Any) -> str:
    """A part of the configuration as the user wrote it, cut to a readable length."""
    text = "missing" if part is None else json.dumps(part)
    return text if len(text) <= 200 else f"{text[:197]}..."
