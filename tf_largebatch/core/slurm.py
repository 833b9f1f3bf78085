"""The tasks of a SLURM job step as workers: their addresses, and which of them this process is.

A step is what `srun` starts. Only the variables of the step count, not those of the job: inside one
allocation a step may use other nodes and tasks than the job has (tensorflow 36094). A batch script,
or the shell of `salloc`, is no task of such a step.

Ports. Two steps that share a node need different ones:

1. `TF_LARGEBATCH_PORT`, if set, is the first port on every node.
2. `SLURM_STEP_RESV_PORTS`, as "12000-12003,12010": ports which SLURM keeps for this step, the same
   numbers on each of its nodes, where `MpiParams=ports=...` is in slurm.conf (`srun --resv-ports`).
   They are used if they are enough for the tasks of each node.
3. Else the first port follows from job and step id. It lies below the range of which Linux gives
   ports to outgoing connections (32768 and up).

The task with local id i uses the i-th of these ports.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence

from tf_largebatch.core.errors import TopologyError

PORT_VARIABLE = "TF_LARGEBATCH_PORT"
_FIRST_PORT, _PORTS_OF_A_STEP = 10_000, 32
_PLACES = 709  # a prime: _FIRST_PORT + _PLACES * _PORTS_OF_A_STEP is just below 32768
_STEP_STRIDE = 97  # steps of one job, and jobs with ids near one another, are apart
# Above any cluster, and little in memory: a few characters may stand for more than would fit.
_MOST_NODES = 2**17
_NAME_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\],]+)")
_BLOCK_HINT = (
    "Ranks are taken to fill one node after the other: start the step with "
    "`srun --distribution=block`."
)


def slurm_step(environ: Mapping[str, str]) -> tuple[tuple[str, ...], int] | None:
    """Reads the step that this process is a task of.

    Args:
        environ: the variables; none of them but those of SLURM and `TF_LARGEBATCH_PORT` is read.

    Returns:
        `host:port` of every task in order of `SLURM_PROCID`, and this one's; None outside of a step
        of more than one task.

    Raises:
        TopologyError: a variable is missing, malformed or contradicts another one, as it does when
            tasks are not distributed in blocks.
    """
    if "SLURM_STEP_NUM_TASKS" not in environ:
        return None
    count = _number(environ, "SLURM_STEP_NUM_TASKS")
    if count <= 1:
        return None
    rank = _number(environ, "SLURM_PROCID")
    nodes = expand_node_list(_required(environ, "SLURM_STEP_NODELIST"))
    tasks = expand_tasks_per_node(_required(environ, "SLURM_STEP_TASKS_PER_NODE"))
    if len(tasks) != len(nodes) or sum(tasks) != count or rank >= count:
        raise TopologyError(
            f"SLURM describes this step in a way that does not fit together: SLURM_PROCID={rank}, "
            f"SLURM_STEP_NUM_TASKS={count}, SLURM_STEP_TASKS_PER_NODE "
            f"{environ['SLURM_STEP_TASKS_PER_NODE']!r} is {sum(tasks)} task(s) on {len(tasks)} "
            f"node(s), SLURM_STEP_NODELIST {environ['SLURM_STEP_NODELIST']!r} is {len(nodes)} "
            "node(s). If variables were set by hand or kept from another step, unset them, or "
            "describe the cluster by TF_CONFIG ('{}' for this process alone)."
        )
    _check_blocks(environ, tasks, rank)
    ports = _ports(environ, max(tasks))
    addresses = [
        f"{node}:{ports[local]}"
        for node, on_node in zip(nodes, tasks, strict=True)
        for local in range(on_node)
    ]
    return tuple(addresses), rank


def expand_node_list(text: str) -> list[str]:
    """The names behind a list of SLURM, in its order.

    `"node[001-003,007],gpu-[1-2]-ib,login1"` is node001, node002, node003, node007, gpu-1-ib,
    gpu-2-ib, login1. Of several brackets in a name the last one runs fastest.

    Raises:
        TopologyError: the text is no such list.
    """
    names: list[str] = []
    for item in _split_outside_brackets(text):
        parts = _NAME_PART.findall(item)
        # Put together again, the parts are the item, or something was not understood.
        if not item or "".join(name or f"[{inner}]" for inner, name in parts) != item:
            raise TopologyError(_node_list_message(text, item))
        choices = [
            [name]
            if name
            else [number for part in inner.split(",") for number in _span(text, part)]
            for inner, name in parts
        ]
        if len(names) + math.prod(map(len, choices)) > _MOST_NODES:
            raise TopologyError(_too_many_message(text))
        names += ["".join(chosen) for chosen in itertools.product(*choices)]
    return names


def expand_tasks_per_node(text: str) -> list[int]:
    """The number of tasks of each node: `"2(x3),1"` is 2, 2, 2, 1.

    Raises:
        TopologyError: the text is no such list.
    """
    tasks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,18})\))?", part)
        if match is None or int(match[1]) == 0:
            raise TopologyError(
                f"SLURM_STEP_TASKS_PER_NODE is {text!r}; {part!r} is no number of tasks as '2' or "
                "'2(x3)'."
            )
        if len(tasks) + int(match[2] or 1) > _MOST_NODES:
            raise TopologyError(_too_many_message(text))
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def _check_blocks(environ: Mapping[str, str], tasks: Sequence[int], rank: int) -> None:
    """What SLURM says of this task's place must be what a distribution in blocks gives it."""
    node, first = 0, 0
    while rank >= first + tasks[node]:
        first += tasks[node]
        node += 1
    expected = {"SLURM_NODEID": str(node), "SLURM_LOCALID": str(rank - first)}
    if len(tasks) > 1:  # the ranks of this node: every one of them notices another distribution
        ranks = range(first, first + tasks[node])
        expected["SLURM_GTIDS"] = ",".join(str(other) for other in ranks)
    for name, value in expected.items():
        if environ.get(name, value) != value:
            raise TopologyError(
                f"SLURM_PROCID={rank} with SLURM_STEP_TASKS_PER_NODE="
                f"{environ['SLURM_STEP_TASKS_PER_NODE']!r} would have {name}={value}, but it is "
                f"{environ[name]!r}. {_BLOCK_HINT}"
            )


def _ports(environ: Mapping[str, str], count: int) -> Sequence[int]:
    """The ports of a node with `count` tasks, by local id."""
    if environ.get(PORT_VARIABLE, "").strip():
        first = _number(environ, PORT_VARIABLE)
        if not 1 <= first <= 65536 - count:
            raise TopologyError(
                f"{PORT_VARIABLE}={first}, the first of {count} port(s) on a node, must be from 1 "
                f"to {65536 - count}."
            )
        return range(first, first + count)
    reserved = environ.get("SLURM_STEP_RESV_PORTS", "")
    if re.fullmatch(r"[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*", reserved):
        ports = [int(port) for part in reserved.split(",") for port in _span(reserved, part)]
        if len(ports) >= count:
            return ports
    job, step = (
        _number(environ, name) if name in environ else 0
        for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")
    )
    first = _FIRST_PORT + (job + _STEP_STRIDE * step) % _PLACES * _PORTS_OF_A_STEP
    return range(first, first + count)


def _split_outside_brackets(text: str) -> list[str]:
    return re.split(r",(?![^\[]*\])", text)


def _span(text: str, part: str) -> list[str]:
    """The numbers of `001-003`, or the one of `007`, with their leading zeros."""
    match = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", part)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise TopologyError(_node_list_message(text, part))
    numbers = range(int(match[1]), int(match[2] or match[1]) + 1)
    if len(numbers) > _MOST_NODES:
        raise TopologyError(_too_many_message(text))
    return [str(number).zfill(len(match[1])) for number in numbers]


def _node_list_message(text: str, part: str) -> str:
    return (
        f"SLURM names its nodes or ports by {text!r}; {part!r} is no name as 'login1' or "
        "'node[001-003,007]', nor a range that counts up."
    )


def _too_many_message(text: str) -> str:
    return (
        f"SLURM's {text!r} stands for more than the {_MOST_NODES:,} nodes or ports that are read."
    )


def _required(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name, "")
    if not value:
        raise TopologyError(
            f"SLURM_STEP_NUM_TASKS={environ['SLURM_STEP_NUM_TASKS']} makes this process a task of "
            f"a SLURM step, but {name} is missing. Start the program by `srun`, or describe the "
            "cluster by TF_CONFIG ('{}' for this process alone)."
        )
    return value


def _number(environ: Mapping[str, str], name: str) -> int:
    text = _required(environ, name)
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise TopologyError(f"{name} is {text!r}; it must be a whole number.")
    return int(text)
