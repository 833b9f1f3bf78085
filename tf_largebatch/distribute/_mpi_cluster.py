"""Who the workers are, told by MPI: hosts and free ports are exchanged over it.

TensorFlow's own part of the cluster (variables, coordination, evaluation) still needs an address
of every worker. Where `TF_CONFIG` names them, these are used, and MPI's ranks are put into their
order.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tf_largebatch.core.errors import ConfigurationError, PeerTimeoutError, TopologyError
from tf_largebatch.core.slurm import PORT_VARIABLE
from tf_largebatch.core.topology import ClusterTopology

HOST_VARIABLE = "TF_LARGEBATCH_HOST"
# Below the range of which Linux gives ports to outgoing connections.
_PORTS = range(10_000, 32_768)
_LOOPBACK = "127.0.0.1"
# TEST-NET-1 of RFC 5737: no such host; asking for the way to it sends nothing.
_ELSEWHERE = ("192.0.2.1", 9)
_LONGEST_MESSAGE_BYTES = 16 * 1024
_POLL_SECONDS = 0.001
_TAG = 29_417  # hardly one of the program's own, whose messages may be on their way


def join_mpi(mpi: Any, *, timeout_seconds: float) -> tuple[ClusterTopology, Any, float]:
    """The workers, a communicator in which they have their ranks, and the cores of each here.

    Args:
        mpi: `mpi4py.MPI`, started.
        timeout_seconds: how long to wait for ranks that have started MPI, but do not come here.

    Raises:
        PeerTimeoutError: a rank is missing; the message names it.
        TopologyError: `TF_CONFIG` names other workers than there are ranks.
        ConfigurationError: this host has no address or port for others.
    """
    world = mpi.COMM_WORLD
    described = ClusterTopology.from_tf_config(os.environ.get("TF_CONFIG", ""))
    if described.num_workers > 1 and described.num_workers != world.size:
        raise TopologyError(
            f"TF_CONFIG names {described.num_workers} workers, but MPI has {world.size} rank(s). "
            f"Start the program by mpiexec -n {described.num_workers}, or unset TF_CONFIG, and "
            "every rank becomes a worker."
        )
    if world.size == 1:
        return described, world, float(len(os.sched_getaffinity(0)))
    if os.environ.get("TF_CONFIG", "").strip() and described.num_workers == 1:
        raise TopologyError(
            f"TF_CONFIG={os.environ['TF_CONFIG']!r} says that this process is alone, but MPI has "
            f"{world.size} ranks. Unset it, and every rank becomes a worker."
        )
    with contextlib.ExitStack() as ports:
        first_port = os.environ.get(PORT_VARIABLE) or None
        own = {
            "host": socket.gethostname(),
            "address": os.environ.get(HOST_VARIABLE) or _own_address(),
            "is_given": bool(os.environ.get(HOST_VARIABLE)),
            "first_port": first_port,
            "port": None if first_port else _hold_a_port(ports),
            "cores": sorted(os.sched_getaffinity(0)),
            "worker": described.rank if described.num_workers > 1 else None,
        }
        facts = exchange(mpi, world, own, timeout_seconds=timeout_seconds)
        cores_per_rank = warn_of_few_cores(facts, world.rank)
        if described.num_workers > 1:
            return described, _in_order_of(described, world, facts), cores_per_rank
        _refuse_some_workers(facts)
        addresses = _addresses(mpi, world, facts, timeout_seconds)
    return ClusterTopology.from_addresses(addresses, rank=world.rank), world.Dup(), cores_per_rank


def exchange(mpi: Any, comm: Any, own: Any, *, timeout_seconds: float) -> list[Any]:
    """What every rank passed as `own` (JSON, up to 16 KiB), in the order of ranks.

    Raises:
        PeerTimeoutError: not all came in time; the message names them.
    """
    came = collect(mpi, comm, own, timeout_seconds=timeout_seconds)
    missing = [rank for rank in range(comm.size) if rank not in came]
    if missing:
        raise PeerTimeoutError(
            f"Rank {comm.rank} of {comm.size} has waited start_timeout_seconds={timeout_seconds:g} "
            f"for MPI's rank(s) {', '.join(map(str, missing))}, which started MPI, but made no "
            "LargeBatchStrategy(transport='mpi'). See their logs."
        )
    return [came[rank] for rank in range(comm.size)]


def collect(mpi: Any, comm: Any, own: Any, *, timeout_seconds: float) -> dict[int, Any]:
    """What the ranks that came in time passed as `own`, as of `exchange`, by rank.

    Point to point, so that who is missing is known.
    """
    text = json.dumps(own).encode()
    if len(text) > _LONGEST_MESSAGE_BYTES:
        raise ValueError(f"A message of {len(text)} bytes is too long to exchange.")
    peers = [rank for rank in range(comm.size) if rank != comm.rank]
    received = {rank: bytearray(_LONGEST_MESSAGE_BYTES) for rank in peers}
    status = {rank: mpi.Status() for rank in peers}
    arriving = {rank: comm.Irecv(received[rank], source=rank, tag=_TAG) for rank in peers}
    leaving = [comm.Isend(text, dest=rank, tag=_TAG) for rank in peers]
    deadline = time.monotonic() + timeout_seconds
    while arriving:
        arriving = {
            rank: request for rank, request in arriving.items() if not request.Test(status[rank])
        }
        if arriving and time.monotonic() > deadline:
            break
        if arriving:
            time.sleep(_POLL_SECONDS)
    for request in arriving.values():  # else MPI may write to what is freed by then
        request.Cancel()
        request.Wait()
    if not arriving:
        mpi.Request.Waitall(leaving)  # all have posted their receives
    messages = {
        rank: json.loads(received[rank][: status[rank].Get_count(mpi.BYTE)])
        for rank in peers
        if rank not in arriving
    }
    return {comm.rank: own, **messages}


def warn_of_few_cores(facts: Sequence[dict[str, Any]], rank: int) -> float:
    """How many cores each rank of this host may use; below 1, the first of them warns."""
    on_host = [other for other, fact in enumerate(facts) if fact["host"] == facts[rank]["host"]]
    cores = {core for other in on_host for core in facts[other]["cores"]}
    if rank == on_host[0] and len(cores) < len(on_host):
        warnings.warn(
            f"{len(on_host)} MPI ranks share the {len(cores)} core(s) they may use on "
            f"{facts[rank]['host']}. A rank that waits gives up its core, yet they slow each other "
            "down; start as many as there are cores, or fewer.",
            stacklevel=2,
        )
    return len(cores) / len(on_host)


def _addresses(
    mpi: Any, world: Any, facts: Sequence[dict[str, Any]], timeout_seconds: float
) -> list[str]:
    """`host:port` of every rank, such that all others can reach it."""
    hosts = [fact["host"] for fact in facts]
    ports = _ports(facts)
    if len(set(hosts)) == 1 and not any(fact["is_given"] for fact in facts):
        return [f"{_LOOPBACK}:{port}" for port in ports]
    unknown = {host for host in set(hosts) if host != socket.gethostname() and not _is_known(host)}
    by_rank = exchange(mpi, world, sorted(unknown), timeout_seconds=timeout_seconds)
    unknown = {host for unknown_there in by_rank for host in unknown_there}
    places = [
        fact["address"] if fact["is_given"] or fact["host"] in unknown else fact["host"]
        for fact in facts
    ]
    without = sorted({host for host, place in zip(hosts, places, strict=True) if not place})
    if without:
        raise ConfigurationError(
            f"The name of host(s) {', '.join(without)} is not known to the others, and no address "
            f"was found there. Set {HOST_VARIABLE} on each host to the address at which others "
            "reach it."
        )
    return [
        f"[{place}]:{port}" if ":" in place else f"{place}:{port}"
        for place, port in zip(places, ports, strict=True)
    ]


def _ports(facts: Sequence[dict[str, Any]]) -> list[int]:
    """Each rank's own, or the first one that it was given plus its place on its host."""
    given, *others = dict.fromkeys(fact["first_port"] for fact in facts)
    if others:
        raise ConfigurationError(
            f"{PORT_VARIABLE} of MPI's ranks, from rank 0 on, is "
            f"{[fact['first_port'] for fact in facts]}; it must be the same on all, or unset."
        )
    if given is None:
        return [fact["port"] for fact in facts]
    if not given.isdecimal() or not 1 <= int(given) <= 65_535 - len(facts):
        raise ConfigurationError(
            f"{PORT_VARIABLE}={given!r}, the first port of each host, must be a whole number from "
            f"1 to {65_535 - len(facts)}."
        )
    taken: Counter[str] = Counter()
    ports = []
    for fact in facts:
        ports.append(int(given) + taken[fact["host"]])
        taken[fact["host"]] += 1
    return ports


def _hold_a_port(held: contextlib.ExitStack) -> int:
    """A free port, kept until all ranks of this host have one."""
    for port in random.Random(os.urandom(8)).sample(_PORTS, 256):
        sock = held.enter_context(socket.socket())
        with contextlib.suppress(OSError):
            sock.bind(("", port))
            return port
    raise ConfigurationError(
        f"None of 256 ports tried from {_PORTS.start} to {_PORTS.stop - 1} is free on this host. "
        f"Set {PORT_VARIABLE} to the first of as many free ones as it has ranks."
    )


def _own_address() -> str:
    """This host's address on its default route, else the one of its name; or empty."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect(_ELSEWHERE)
        return str(sock.getsockname()[0])
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
        return "" if address.startswith("127.") else address
    return ""


def _is_known(host: str) -> bool:
    """Whether the name of another host leads to it, and not to this one."""
    try:
        found = socket.getaddrinfo(host, None)
    except OSError:
        return False
    return not any(str(place[4][0]).startswith("127.") or place[4][0] == "::1" for place in found)


def _in_order_of(topology: ClusterTopology, world: Any, facts: Sequence[dict[str, Any]]) -> Any:
    """A communicator in which MPI's ranks are TF_CONFIG's."""
    workers = [fact["worker"] for fact in facts]
    if sorted(-1 if worker is None else worker for worker in workers) != list(range(len(workers))):
        raise TopologyError(
            "The TF_CONFIG of MPI's ranks, from rank 0 on, say that these are workers "
            f"{workers}; each must be another one."
        )
    return world.Split(0, topology.rank)


def _refuse_some_workers(facts: Sequence[dict[str, Any]]) -> None:
    told = [rank for rank, fact in enumerate(facts) if fact["worker"] is not None]
    if told:
        raise TopologyError(
            f"MPI's rank(s) {told} have a TF_CONFIG, and others have none. Give one to all, or to "
            "none of them."
        )
