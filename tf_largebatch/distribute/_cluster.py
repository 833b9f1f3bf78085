"""Starts TensorFlow's part of the cluster, and the watch over it."""

from __future__ import annotations

import importlib
import platform
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.core.topology import ClusterTopology
from tf_largebatch.distribute._journal import CollectiveJournal
from tf_largebatch.distribute._last_words import speak_at_exit
from tf_largebatch.distribute._mpi_engine import TransferEngine
from tf_largebatch.distribute._progress import ProgressWatch
from tf_largebatch.distribute._rendezvous import meet
from tf_largebatch.distribute._tf_internals import context

CPU_REPLICAS_VARIABLE = "TF_LARGEBATCH_CPU_REPLICAS"
_READ_TIMEOUT_MS = 500


def start_cluster(
    topology: ClusterTopology, *, options: Mapping[str, Any], timeout_seconds: float
) -> None:
    """Makes the logical devices, and meets the other workers; all agree, or all fail.

    Args:
        topology: the cluster.
        options: the strategy's, which must be equal on all workers.
        timeout_seconds: how long to wait for the others.

    Raises:
        As `_rendezvous.meet`, and ConfigurationError where TensorFlow has started with other
        devices.
    """
    _make_cpu_replicas(options["replicas_per_worker"])
    versions = {
        "tf_largebatch": importlib.import_module("tf_largebatch").__version__,
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "workers": topology.num_workers,
        "gpus": len(tf.config.list_physical_devices("GPU")),
    }
    meet(topology, settings={**options, **versions}, timeout_seconds=timeout_seconds)


def watch_progress(
    topology: ClusterTopology,
    journal: CollectiveJournal,
    timeout_seconds: float,
    *,
    engine: TransferEngine | None,
) -> ProgressWatch:
    """Starts the thread that ends waits for absent workers, and speaks for this one at its exit.

    Args:
        topology: the workers.
        journal: knows where this one stands.
        timeout_seconds: how late a worker may be.
        engine: where buckets travel by MPI.
    """

    def abort(reason: str) -> None:
        _abort_collectives(reason)
        if engine is not None:
            engine.fail(reason)

    watch = ProgressWatch(
        topology,
        position=journal.position,
        board=_CoordinationBoard(),
        abort=abort,
        timeout_seconds=timeout_seconds,
        **({} if engine is None else {"waiting": engine.waiting}),
    )
    watch.start()
    speak_at_exit(topology, watch, _tell_all_workers)
    return watch


def _make_cpu_replicas(count: int) -> None:
    if count == 1 or tf.config.list_physical_devices("GPU"):
        return
    try:
        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0],
            [tf.config.LogicalDeviceConfiguration() for _ in range(count)],
        )
    except RuntimeError as error:
        if len(tf.config.list_logical_devices("CPU")) >= count:
            return
        raise ConfigurationError(
            f"{CPU_REPLICAS_VARIABLE}={count} needs as many logical CPU devices, but TensorFlow "
            "has started with fewer. Make the strategy before TensorFlow runs its first op."
        ) from error


class _CoordinationBoard:
    """Publishes by the key-value store of TensorFlow's coordination service, on the chief."""

    def publish(self, rank: int, text: str) -> None:
        # The store refuses to overwrite; a reader that comes in between waits a moment.
        context().delete_config_key_value(_key(rank))
        context().set_config_key_value(_key(rank), text)

    def read(self, rank: int) -> str | None:
        try:
            return str(context().get_config_key_value(_key(rank), _READ_TIMEOUT_MS))
        except (tf.errors.DeadlineExceededError, tf.errors.NotFoundError):
            return None


def _key(rank: int) -> str:
    return f"tf_largebatch/position/{rank}"


def _abort_collectives(reason: str) -> None:
    context().abort_collective_ops(tf.errors.DEADLINE_EXCEEDED, reason)


def _tell_all_workers(text: str) -> None:
    """Ends the collectives of all other workers, those to come as well."""
    context().report_error_to_cluster(tf.errors.ABORTED, text)
