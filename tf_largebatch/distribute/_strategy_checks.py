"""What a strategy refuses before it meets the other workers."""

from __future__ import annotations

import os

from tf_largebatch.core.algorithm_choice import AllReduceCosts
from tf_largebatch.core.errors import ConfigurationError, ProgramOrderError, TopologyError
from tf_largebatch.distribute._cluster import CPU_REPLICAS_VARIABLE
from tf_largebatch.distribute._mpi import launched_ranks
from tf_largebatch.distribute._options import TRANSPORTS, check_choice
from tf_largebatch.distribute._tf_internals import tensorflow_has_started


def check_order(*, has_joined: bool) -> None:
    """Raises ProgramOrderError where this process can join a cluster no more.

    Args:
        has_joined: whether it has joined one.
    """
    if has_joined:
        raise ProgramOrderError(
            "This process has made a LargeBatchStrategy already, and a process joins its cluster "
            "once. Use that one for all models: keep it in a variable, or call "
            "tf.distribute.get_strategy() within its scope."
        )
    if tensorflow_has_started():
        raise ProgramOrderError(
            "LargeBatchStrategy must join the cluster before TensorFlow runs its first op, but "
            "one has run. Move `strategy = LargeBatchStrategy()` to the top of the script, "
            "right after the imports: before data sets, models and tensors."
        )


def check_transport(transport: str, all_reduce: str) -> str:
    """Raises ConfigurationError unless there is such a transport, and it fits; returns it."""
    check_choice("transport", transport, TRANSPORTS)
    if transport == "mpi" and all_reduce == "tensorflow":
        raise ConfigurationError(
            "all_reduce='tensorflow' means TensorFlow's own collectives, which transport='mpi' "
            "replaces. Use all_reduce='auto', which leaves the algorithm to MPI, or "
            "transport='tensorflow'."
        )
    return transport


def check_launcher() -> None:
    """Raises TopologyError where MPI's launcher started several workers that would train alone."""
    launched = launched_ranks()
    if launched is not None and not os.environ.get("TF_CONFIG", "").strip():
        launcher, count, rank = launched
        raise TopologyError(
            f"{launcher} started this process as rank {rank} of {count}, and nothing else tells it "
            "of the others: each would train alone. Use LargeBatchStrategy(transport='mpi'), or "
            "describe the cluster by TF_CONFIG ('{}' for this process alone)."
        )


def check_timeouts(start_timeout_seconds: float, timeout_seconds: float) -> None:
    """Raises ConfigurationError unless both are seconds to wait."""
    for name, value in (
        ("start_timeout_seconds", start_timeout_seconds),
        ("timeout_seconds", timeout_seconds),
    ):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 1 <= value < float("inf"):
            raise ConfigurationError(
                f"{name} must be a number of seconds of at least 1 (a wait without end is what it "
                f"prevents), but is {value!r}."
            )


def check_costs(costs: AllReduceCosts, present_costs: AllReduceCosts) -> None:
    """Raises ConfigurationError unless they were measured on a cluster as that of the others."""
    measured, present = (
        f"{each.num_workers} workers with {each.replicas_per_worker} replicas each, by "
        f"transport={each.transport!r}"
        for each in (costs, present_costs)
    )
    if measured != present:
        raise ConfigurationError(
            f"all_reduce_costs were measured on {measured}, but this cluster has {present}. Leave "
            "them out, and they are measured."
        )


def cpu_replicas() -> int:
    """How many replicas a host without GPUs is to have; else ConfigurationError."""
    text = os.environ.get(CPU_REPLICAS_VARIABLE, "1")
    if not text.isdecimal() or int(text) < 1:
        raise ConfigurationError(
            f"{CPU_REPLICAS_VARIABLE} must be a whole number of at least 1, but is {text!r}."
        )
    return int(text)
