"""Ranks of mpiexec that fail. Each case hands back how every rank ended; see `MpiCluster.join`."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from mpi_cluster import MpiCluster
from small_training import (
    LONG_SECONDS,
    WAIT_SECONDS,
    Acts,
    Ends,
    Slow,
    batches,
    compiled_model,
)

import tf_largebatch as tlb

# Else mpiexec kills all as soon as one has ended badly, and nobody can say why.
LET_LIVE = ("-disable-auto-cleanup",)
SHORT_SECONDS = 5.0  # of a start that is not to be


def new_strategy(
    *,
    start_timeout_seconds: float = LONG_SECONDS,
    timeout_seconds: float = LONG_SECONDS,
    **options: Any,
) -> tlb.LargeBatchStrategy:
    strategy = tlb.LargeBatchStrategy(
        transport="mpi",
        start_timeout_seconds=start_timeout_seconds,
        timeout_seconds=timeout_seconds,
        **options,
    )
    print("STARTED", json.dumps(list(strategy.topology.addresses)), flush=True)
    return strategy


def joined(clusters: dict[str, MpiCluster], since: float | None = None) -> dict[str, Ends]:
    """Ends of clusters that run side by side, to wait once rather than one after the other."""
    return {name: cluster.join(90.0, since=since) for name, cluster in clusters.items()}


# --- Start


def starts_mpi_only(rank: int) -> None:
    if rank == 0:
        new_strategy(start_timeout_seconds=SHORT_SECONDS)
    from mpi4py import MPI

    print("IN MPI", MPI.COMM_WORLD.rank, flush=True)
    time.sleep(60.0)


def starts_nothing(rank: int) -> None:
    if rank == 0:
        new_strategy(start_timeout_seconds=SHORT_SECONDS)
    time.sleep(60.0)


def by_tensorflow(rank: int) -> None:
    tlb.LargeBatchStrategy(timeout_seconds=LONG_SECONDS)


def in_another_cluster(rank: int) -> None:
    workers = ["127.0.0.1:14997", "127.0.0.1:14998", "127.0.0.1:14999"]
    cluster = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
    os.environ["TF_CONFIG"] = json.dumps(cluster)
    new_strategy()


def with_other_settings(rank: int) -> None:
    new_strategy(all_reduce=("auto", "ring")[rank])


def in_another_order(rank: int) -> None:
    """As many workers as ranks, counted the other way round by TF_CONFIG."""
    workers = [f"127.0.0.1:{14_000 + os.getppid() % 900 + each}" for each in range(2)]
    task = {"type": "worker", "index": 1 - rank}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
    strategy = new_strategy()
    assert strategy.topology.rank == 1 - rank
    assert list(strategy.topology.addresses) == workers

    def step() -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        own = tf.one_hot(context.replica_id_in_sync_group, 2) * (rank + 1.0)
        return context.all_reduce("SUM", own)

    print("SUM", tf.function(lambda: strategy.run(step))().numpy().tolist(), flush=True)


def case_start() -> dict[str, Ends]:
    waiting = {"mpi only": MpiCluster(starts_mpi_only), "nothing": MpiCluster(starts_nothing)}
    bodies = (by_tensorflow, in_another_cluster, with_other_settings, in_another_order)
    ends = joined({body.__name__: MpiCluster(body) for body in bodies})
    for cluster in waiting.values():
        cluster.wait_until_ended(0)
    return {**ends, **{name: cluster.join(1.0) for name, cluster in waiting.items()}}


# --- Training


def trains_for_long(act_on: int, act: Callable[[], None], **timeouts: float) -> Any:
    """Trains for minutes; rank `act_on` acts after 4 batches."""

    def body(rank: int) -> None:
        model = compiled_model(new_strategy(**timeouts))
        callbacks = [Acts(lambda: print("TRAINS", flush=True), after_batch=3)]
        if rank == act_on:
            callbacks.append(Acts(act, after_batch=4))
        data = batches().repeat()
        model.fit(data, steps_per_epoch=100_000, verbose=0, callbacks=[*callbacks, Slow()])

    return body


def raise_an_error() -> None:
    print(f"ACTS {time.monotonic()}", flush=True)
    raise ValueError("an error of the user's own")


def hang() -> None:
    print(f"ACTS {time.monotonic()}", flush=True)
    time.sleep(60.0)


def case_training() -> dict[str, Ends]:
    """One rank of three raises, or the chief of two; likewise killed; one hangs."""
    clusters = {
        "one raises": MpiCluster(trains_for_long(1, raise_an_error), num_workers=3),
        "chief raises": MpiCluster(trains_for_long(0, raise_an_error)),
        "one hangs": MpiCluster(trains_for_long(1, hang, timeout_seconds=WAIT_SECONDS)),
    }
    struck = {}
    for name, num_workers, rank in (("one killed", 3, 1), ("chief killed", 2, 0)):
        body = trains_for_long(-1, lambda: None)
        cluster = MpiCluster(body, num_workers=num_workers, flags=LET_LIVE)
        for each in range(num_workers):
            cluster.wait_for(each, "TRAINS", 90.0)
        struck[name] = (cluster, time.monotonic())
        cluster.kill(rank, signal.SIGKILL)
    ends = joined(clusters, since=0.0)
    killed = {name: cluster.join(90.0, since=since) for name, (cluster, since) in struck.items()}
    return {**ends, **killed}


# --- Programs


def fits(**of_rank_1: Any) -> Callable[[int], None]:
    def body(rank: int) -> None:
        model = compiled_model(new_strategy(), **(of_rank_1 if rank == 1 else {}))
        model.fit(batches(), verbose=0)

    return body


def sums_another_shape(rank: int) -> None:
    strategy = new_strategy()

    def step() -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        return context.all_reduce("SUM", tf.ones([5 + rank]))

    tf.function(lambda: strategy.run(step))()


def sums_after_fit(rank: int) -> None:
    strategy = new_strategy()
    compiled_model(strategy).fit(batches(), verbose=0)
    if rank == 0:
        strategy.reduce("SUM", tf.constant(1.0), axis=None)


def sums_before_fit(rank: int) -> None:
    strategy = new_strategy()
    model = compiled_model(strategy)
    if rank == 0:
        strategy.reduce("SUM", tf.constant(1.0), axis=None)
    model.fit(batches(), verbose=0)


def ends_well(late: int) -> Callable[[int], None]:
    """One rank ends later than the other."""

    def body(rank: int) -> None:
        strategy = new_strategy()
        compiled_model(strategy).fit(batches(), verbose=0)
        strategy.barrier()
        if rank == late:
            time.sleep(3.0)
        print(f"ACTS {time.monotonic()}", flush=True)

    return body


def summed_with_bad_batches(strategy: tlb.LargeBatchStrategy) -> Callable[[float, bool], float]:
    """A step of two buckets, and an assertion that may fail while they travel."""

    def in_replica(x: tf.Tensor, is_bad: tf.Tensor) -> tf.Tensor:
        values = [tf.fill([32], x), tf.fill([32], 10.0 * x)]
        sums = tf.distribute.get_replica_context().all_reduce("SUM", values)
        with tf.control_dependencies([tf.debugging.Assert(tf.logical_not(is_bad), ["bad batch"])]):
            return sums[0][0] + tf.zeros_like(x)

    step = tf.function(lambda x, is_bad: strategy.run(in_replica, args=(x, is_bad)))
    return lambda x, is_bad: float(step(tf.constant(x), tf.constant(is_bad)))


def goes_on_after_an_error(rank: int) -> None:
    step = summed_with_bad_batches(new_strategy(bucket_bytes=64))
    for number in range(6):
        try:
            print("SUM", number, step(float(number), number == 2), flush=True)
        except tf.errors.InvalidArgumentError:
            print("CAUGHT", number, flush=True)


def hangs_before_a_later_value(rank: int) -> None:
    """Both have come to the step, and one never has its second tensor."""
    strategy = new_strategy(timeout_seconds=WAIT_SECONDS)

    def wait() -> np.float32:
        if rank == 1:
            hang()
        return np.float32(1.0)

    def in_replica() -> Any:
        values = [tf.reshape(tf.numpy_function(wait, [], tf.float32), [1]), tf.ones([1])]
        return tf.distribute.get_replica_context().all_reduce("SUM", values)

    tf.function(lambda: strategy.run(in_replica))()


def forks(rank: int) -> None:
    """A child ends as Python programs do, by way of its exit handlers; the rank goes on."""
    strategy = new_strategy()
    model = compiled_model(strategy)
    model.fit(batches(), verbose=0)
    if rank == 1:
        child = os.fork()
        if child == 0:
            raise SystemExit(0)
        os.waitpid(child, 0)
    model.fit(batches(), verbose=0)
    strategy.barrier()
    print(f"ACTS {time.monotonic()}", flush=True)


def case_programs() -> dict[str, Ends]:
    """Two that differ, a sum of one rank alone, and those that end well."""
    bodies = {
        "models": fits(widths=(5,)),
        "metrics": fits(metrics=("mae",)),
        "sums": sums_another_shape,
        "sum after fit": sums_after_fit,
        "sum before fit": sums_before_fit,
        "goes on": goes_on_after_an_error,
        "hangs within": hangs_before_a_later_value,
        "forks": forks,
    }
    ends = joined({name: MpiCluster(body) for name, body in bodies.items()})
    well = {f"late {late}": MpiCluster(ends_well(late)) for late in range(2)}
    return {**ends, **joined(well, since=0.0)}
