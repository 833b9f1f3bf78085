"""The text of `TF_CONFIG`: which jobs it lists, and which task this process is."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tf_largebatch.core.addresses import check_addresses
from tf_largebatch.core.errors import TopologyError

# Ranks follow this order of jobs; an evaluator is listed in a cluster but trains nothing.
RANKED_JOBS = ("chief", "worker")
EVALUATOR = "evaluator"
_OLD_NAME_OF_CHIEF = "master"  # of Estimators and of Kubeflow, to this day


@dataclass(frozen=True)
class TfConfig:
    """What a `TF_CONFIG` says, checked; "master" is called "chief".

    Attributes:
        jobs: the addresses of each job of the cluster that has any.
        task_type: "chief", "worker" or "evaluator".
        task_index: the index within the job.
    """

    jobs: dict[str, tuple[str, ...]]
    task_type: str
    task_index: int


def read_tf_config(text: str) -> TfConfig | None:
    """Reads the JSON text of a `TF_CONFIG`; None for an empty one, or `{}`.

    Raises:
        TopologyError: see `ClusterTopology.from_tf_config`.
    """
    config = _parse(text)
    if not config:
        return None
    jobs = _read_jobs(config)
    return TfConfig(jobs, *_read_task(config.get("task"), jobs))


def tf_config_text(addresses: tuple[str, ...], rank: int) -> str:
    """The `TF_CONFIG` of the worker `rank` of these addresses; worker 0 is the chief."""
    return json.dumps(
        {"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": rank}}
    )


def _parse(text: str) -> dict[str, Any]:
    if not text.strip():
        return {}
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        around = text[max(0, error.pos - 20) : error.pos + 20]
        raise TopologyError(f"TF_CONFIG is no valid JSON: {error}, near {around!r}.") from error
    except (ValueError, RecursionError) as error:  # digits or nesting without an end
        raise TopologyError(f"TF_CONFIG cannot be read as JSON: {error}.") from error
    if not isinstance(config, dict):
        raise TopologyError(
            f"TF_CONFIG is {_shown(config)}; it must be a JSON object with 'cluster' and 'task'."
        )
    return config


def _read_jobs(config: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """{job: addresses} of the cluster description, every address checked."""
    _refuse_sparse_form(config)
    cluster = config.get("cluster")
    if not isinstance(cluster, dict):
        raise TopologyError(
            f"TF_CONFIG['cluster'] is {_shown(cluster)}; it must be an object that maps 'chief', "
            "'worker' and 'evaluator' to lists of addresses."
        )
    _refuse_other_jobs(cluster)
    for job, addresses in cluster.items():
        if not isinstance(addresses, list):
            raise TopologyError(
                f"TF_CONFIG['cluster'][{job!r}] is {_shown(addresses)}; it must be a list of "
                "'host:port'."
            )
    chiefs = [
        (job, address)
        for job in (RANKED_JOBS[0], _OLD_NAME_OF_CHIEF)
        for address in cluster.get(job, ())
    ]
    if not chiefs and not cluster.get("worker"):
        raise TopologyError(
            f"TF_CONFIG['cluster'] is {_shown(cluster)}: it has no worker. List at least one "
            "address under 'worker', or unset TF_CONFIG to train on this machine alone."
        )
    if len(chiefs) > 1:
        raise TopologyError(
            f"TF_CONFIG['cluster'][{chiefs[1][0]!r}] has {_shown(chiefs[1][1])} as one more "
            f"chief beside {_shown(chiefs[0][1])}: there can be one; list the others under "
            "'worker'. ('master' is another name of 'chief'.)"
        )
    check_addresses(
        (f"TF_CONFIG['cluster'][{job!r}][{index}]", address)
        for job, addresses in cluster.items()
        for index, address in enumerate(addresses)
    )
    return {_new_name(job): tuple(addresses) for job, addresses in cluster.items() if addresses}


def _refuse_sparse_form(config: dict[str, Any]) -> None:
    """A worker that is told its own address alone cannot train synchronously."""
    cluster = config.get("cluster")
    sparse = config.get("sparseCluster")
    if sparse is None and isinstance(cluster, dict):
        sparse = next((part for part in cluster.values() if isinstance(part, dict)), None)
    if sparse is not None:
        raise TopologyError(
            f"TF_CONFIG has {_shown(sparse)}: the sparse form, which tells a worker its own "
            "address alone. Synchronous training needs the list of all workers: in a Kubeflow "
            "TFJob set `enableDynamicWorker: false`, elsewhere write a list of 'host:port'."
        )


def _refuse_other_jobs(cluster: dict[str, Any]) -> None:
    """A list of parameter servers that is empty does no harm."""
    known = {*RANKED_JOBS, EVALUATOR, _OLD_NAME_OF_CHIEF}
    other = sorted(job for job in set(cluster) - known if cluster[job] != [])
    if other:
        raise TopologyError(
            f"TF_CONFIG['cluster'] has the job {other[0]!r}: {_shown(cluster[other[0]])}. "
            "Training is synchronous and needs no parameter servers or other jobs: list every "
            "machine under 'worker' (and at most one of them under 'chief'); in a Kubeflow TFJob, "
            "remove the PS replicas."
        )


def _read_task(task: Any, jobs: dict[str, tuple[str, ...]]) -> tuple[str, int]:
    """(type, index) of this process, which the cluster must have."""
    if not isinstance(task, dict) or "type" not in task or "index" not in task:
        raise TopologyError(
            f"TF_CONFIG['task'] is {_shown(task)}; it must say which worker this process is, as "
            '{"type": "worker", "index": 0}.'
        )
    task_type, index = task["type"], task["index"]
    name = _new_name(task_type) if isinstance(task_type, str) else None
    # Kubeflow lists the evaluator in nobody's cluster, TensorFlow's documents in everybody's.
    if name is None or (name not in jobs and name != EVALUATOR):
        raise TopologyError(
            f"TF_CONFIG['task']['type'] is {_shown(task_type)}, which is no job of the cluster; "
            f"it has {sorted(jobs)}."
        )
    if isinstance(index, bool) or not isinstance(index, int):
        raise TopologyError(
            f"TF_CONFIG['task']['index'] is {_shown(index)}; it must be an integer, without quotes."
        )
    addresses = jobs.get(name)
    if index < 0 or (addresses is not None and index >= len(addresses)):
        listed = list(addresses or ())
        raise TopologyError(
            f"TF_CONFIG['task']['index'] is {index}, but the cluster has {len(listed)} address(es) "
            f"under {task_type!r}: {listed}. Indices start at 0."
        )
    return name, index


def _new_name(job: str) -> str:
    return RANKED_JOBS[0] if job == _OLD_NAME_OF_CHIEF else job


def _shown(part: Any) -> str:
    """A part of the configuration as the user wrote it, cut to a readable length."""
    try:
        text = "missing" if part is None else json.dumps(part)
    except RecursionError:  # it was just shallow enough to be read
        text = f"a {type(part).__name__} that is nested too deeply to be shown"
    return text if len(text) <= 200 else f"{text[:197]}..."
