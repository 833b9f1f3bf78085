"""Clusters that fail. Each case hands back how every worker ended; see `Cluster.join`."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from done_alone import case_done_alone
from forked_cluster import Cluster, RelayedCluster
from small_training import (
    ALL_REDUCE,
    LONG_SECONDS,
    START_SECONDS,
    WAIT_SECONDS,
    Acts,
    Ends,
    Slow,
    batches,
    compiled_model,
    join,
    new_strategy,
)

import tf_largebatch as tlb
from tf_largebatch.distribute._cluster import start_cluster
from tf_largebatch.distribute._options import DEFAULT_BUCKET_BYTES, DEFAULT_BUCKETS_IN_FLIGHT

assert case_done_alone  # is run with those below


# --- Start


def start_only(rank: int) -> None:
    new_strategy(start_timeout_seconds=START_SECONDS)


def meet_and_leave(leaver: int) -> Callable[[int], None]:
    """`leaver` ends between the meeting of all workers and TensorFlow's start."""

    def body(rank: int) -> None:
        if rank != leaver:
            new_strategy(start_timeout_seconds=START_SECONDS)
            return
        options = {
            "all_reduce": ALL_REDUCE,
            "bucket_bytes": DEFAULT_BUCKET_BYTES,
            "max_buckets_in_flight": DEFAULT_BUCKETS_IN_FLIGHT,
            "wire_dtype": None,
            "transport": "tensorflow",
            "parallel_initialization": False,
            "all_reduce_costs": None,
            "timeout_seconds": LONG_SECONDS,
            "replicas_per_worker": 1,
        }
        topology = tlb.ClusterTopology.from_environment()
        start_cluster(topology, options=options, timeout_seconds=START_SECONDS)
        print("MET", flush=True)

    return body


def case_one_of_two_is_started() -> list[Ends]:
    return join(Cluster(start_only, ranks=[0]), Cluster(start_only, ranks=[1]))


def case_peer_leaves_before_the_server_starts() -> list[Ends]:
    return join(Cluster(meet_and_leave(1)), Cluster(meet_and_leave(0)))


def other_version(rank: int) -> None:
    tlb.__version__ = f"0.0.{rank}"
    new_strategy()


def case_settings_differ() -> list[Ends]:
    return join(
        Cluster(lambda rank: new_strategy(timeout_seconds=10.0 + rank)),
        Cluster(lambda _: new_strategy(), env=[{}, {"TF_LARGEBATCH_CPU_REPLICAS": "2"}]),
        Cluster(other_version),
    )


def case_port_is_busy() -> list[Ends]:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        return join(Cluster(start_only, addresses=["127.0.0.1:14999", f"127.0.0.1:{port}"]))


def case_refused_at_once() -> list[Ends]:
    def after_an_op(rank: int) -> None:
        tf.constant(1.0)
        new_strategy()

    def evaluator(rank: int) -> None:
        os.environ["TF_CONFIG"] = (
            '{"cluster": {"worker": ["a:1", "b:1"], "evaluator": ["c:1"]},'
            ' "task": {"type": "evaluator", "index": 0}}'
        )
        new_strategy()

    def bad_options(rank: int) -> None:
        for options in (
            {"all_reduce": "rng"},
            {"timeout_seconds": 0},
            {"timeout_seconds": float("nan")},
            {"timeout_seconds": float("inf")},
            {"start_timeout_seconds": "60"},
            {"start_timeout_seconds": True},
        ):
            try:
                tlb.LargeBatchStrategy(**options)
            except tlb.ConfigurationError as error:
                print("REFUSED", error)
        for replicas in ("0", "-1", "two", ""):
            os.environ["TF_LARGEBATCH_CPU_REPLICAS"] = replicas
            try:
                tlb.LargeBatchStrategy()
            except tlb.ConfigurationError as error:
                print("REFUSED", error)

    def twice(rank: int) -> None:
        new_strategy()
        new_strategy()

    bodies = (after_an_op, evaluator, bad_options)
    return join(*(Cluster(body, ranks=[0]) for body in bodies), Cluster(twice))


# --- Training


def trains_for_long(
    act_on: int, act: Callable[[], None], *, all_reduce: str = ALL_REDUCE, **timeouts: float
) -> Callable[[int], None]:
    """Trains for minutes; rank `act_on` acts after 4 batches."""

    def body(rank: int) -> None:
        model = compiled_model(new_strategy(all_reduce=all_reduce, **timeouts))
        callbacks = [Acts(lambda: print("TRAINS", flush=True), after_batch=3)]
        if rank == act_on:
            callbacks.append(Acts(act, after_batch=4))
        slow = Slow()
        data = batches().repeat()
        model.fit(data, steps_per_epoch=100_000, verbose=0, callbacks=[*callbacks, slow])

    return body


def strike(
    number: int, rank: int, *, num_workers: int = 2, **options: Any
) -> tuple[Cluster, float]:
    """Sends a signal to one of the workers while all train; returns when that was."""
    cluster = Cluster(trains_for_long(-1, lambda: None, **options), num_workers=num_workers)
    for each in range(num_workers):
        cluster.wait_for(each, "TRAINS")
    struck = time.monotonic()
    cluster.kill(rank, number)
    return cluster, struck


def case_killed_workers() -> list[Ends]:
    ends = []
    for rank in (1, 0):
        cluster, struck = strike(signal.SIGKILL, rank)
        ends.append(cluster.join(since=struck))
    return ends


def case_killed_in_plans() -> list[Ends]:
    """Three workers, so that halving/doubling folds: one of its sides hears from one peer only."""
    struck = [
        strike(signal.SIGKILL, rank, num_workers=3, all_reduce=all_reduce)
        for rank, all_reduce in ((2, "ring"), (1, "halving_doubling"))
    ]
    return [cluster.join(since=since) for cluster, since in struck]


def case_stopped_workers() -> list[Ends]:
    ends = []
    for rank in (1, 0):
        cluster, struck = strike(signal.SIGSTOP, rank, timeout_seconds=WAIT_SECONDS)
        cluster.wait_until_ended(1 - rank)
        ends.append(cluster.join(0.0, since=struck))
    return ends


def raise_an_error() -> None:
    print("RAISES", flush=True)
    raise ValueError("an error of the user's own")


def hang() -> None:
    print("HANGS", flush=True)
    time.sleep(60.0)


def case_hanging_worker() -> list[Ends]:
    cluster = Cluster(trains_for_long(1, hang, timeout_seconds=WAIT_SECONDS))
    cluster.wait_for(1, "HANGS")
    since = time.monotonic()
    cluster.wait_until_ended(0)
    return [cluster.join(0.0, since=since)]


def case_hanging_forward_pass() -> list[Ends]:
    """The worker is within its step, ahead of the collective for which others have posted."""

    def body(rank: int) -> None:
        strategy = new_strategy(all_reduce="ring", timeout_seconds=WAIT_SECONDS)
        calls = []

        def sleeps_once(values: Any) -> Any:
            calls.append(None)
            if rank == 1 and len(calls) == 4:
                hang()
            return values

        class Sleeps(keras.layers.Layer):
            def call(self, inputs: Any) -> Any:
                values = tf.numpy_function(sleeps_once, [inputs], tf.float32)
                return tf.ensure_shape(values, inputs.shape)

        with strategy.scope():
            inputs = keras.Input((3,))
            model = keras.Model(inputs, keras.layers.Dense(1)(Sleeps()(inputs)))
            model.compile("sgd", "mse")
        model.fit(batches().repeat(), steps_per_epoch=100, verbose=0)

    cluster = Cluster(body)
    cluster.wait_for(1, "HANGS")
    since = time.monotonic()
    cluster.wait_until_ended(0)
    return [cluster.join(0.0, since=since)]


def case_worker_that_raises() -> list[Ends]:
    return join(*(Cluster(trains_for_long(rank, raise_an_error)) for rank in (1, 0)))


def case_input_pipeline_raises() -> list[Ends]:
    """On one worker only: in a row's map function, within TensorFlow's own threads."""

    def body(raiser: int) -> Callable[[int], None]:
        def trains(rank: int) -> None:
            rows: list[None] = []

            def decode(x: Any) -> Any:
                rows.append(None)
                if rank == raiser and len(rows) == 100:
                    print(f"RAISES {time.monotonic()}", flush=True)
                    raise ValueError("a row that cannot be read")
                return x

            def row_fn(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
                return tf.ensure_shape(tf.numpy_function(decode, [x], x.dtype), x.shape), y

            model = compiled_model(new_strategy())
            data = batches().unbatch().map(row_fn).batch(8, drop_remainder=True).repeat()
            model.fit(data, steps_per_epoch=100_000, verbose=0, callbacks=[Slow()])

        return trains

    clusters = [Cluster(body(raiser)) for raiser in (1, 0)]
    return [cluster.join(since=0.0) for cluster in clusters]  # as RAISES


def case_cut_off() -> list[Ends]:
    """Three workers, of which one reaches the others through a relay that stops, or ends."""
    strikes = ((2, signal.SIGSTOP), (2, signal.SIGKILL), (0, signal.SIGSTOP))
    body = trains_for_long(-1, lambda: None, timeout_seconds=WAIT_SECONDS)
    clusters = [RelayedCluster(body, num_workers=3, relayed=rank) for rank, _ in strikes]
    for cluster in clusters:
        for each in range(3):
            cluster.wait_for(each, "TRAINS")
    since = time.monotonic()
    for cluster, (_, number) in zip(clusters, strikes, strict=True):
        cluster.relay.send_signal(number)
    return [cluster.join(since=since) for cluster in clusters]


# --- Programs that differ


def fits(**of_rank_1: Any) -> Callable[[int], None]:
    """Rank 1 makes its model with other arguments than rank 0."""

    def body(rank: int) -> None:
        model = compiled_model(new_strategy(), **(of_rank_1 if rank == 1 else {}))
        model.fit(batches(), verbose=0)

    return body


class LogsMore(keras.Model):
    """A model whose steps return one log more on rank 1."""

    rank = 0

    def train_step(self, data: Any) -> dict[str, Any]:
        logs = super().train_step(data)
        return logs | {"more": logs["loss"]} if self.rank == 1 else logs


def fits_with_other_logs(rank: int) -> None:
    strategy = new_strategy()
    with strategy.scope():
        inputs = keras.Input((3,))
        model = LogsMore(inputs, keras.layers.Dense(3, use_bias=False)(inputs))
        model.rank = rank
        model.compile("sgd", "mse")
    model.fit(batches(), verbose=0)


def case_models_differ() -> list[Ends]:
    return join(Cluster(fits(widths=(5,))), Cluster(fits(widths=(4, 4))))


def case_steps_differ() -> list[Ends]:
    bodies = (fits(metrics=("mae",)), fits(optimizer="adam"), fits_with_other_logs)
    return join(*map(Cluster, bodies))


def case_only_one_worker_predicts() -> list[Ends]:
    def body(rank: int) -> None:
        model = compiled_model(new_strategy())
        if rank == 0:
            model.predict(batches().map(lambda x, _: x), verbose=0)
        model.fit(batches(), verbose=0)

    return join(Cluster(body))


def case_only_one_worker_fits() -> list[Ends]:
    def body(rank: int) -> None:
        model = compiled_model(new_strategy(timeout_seconds=WAIT_SECONDS))
        if rank == 1:
            time.sleep(LONG_SECONDS)
        model.fit(batches(), verbose=0)

    cluster = Cluster(body)
    cluster.wait_until_ended(0)
    return [cluster.join(0.0)]


# --- Data


def case_uneven_data_sets() -> list[Ends]:
    def unknown(rank: int) -> None:
        strategy = new_strategy()
        steps = (3, 5)[rank]

        def dataset(context: tf.distribute.InputContext) -> tf.data.Dataset:
            def rows() -> Any:
                for _ in range(steps):
                    yield np.ones((4, 3), np.float32), np.ones((4, 1), np.float32)

            spec = (tf.TensorSpec((4, 3)), tf.TensorSpec((4, 1)))
            return tf.data.Dataset.from_generator(rows, output_signature=spec)

        model = compiled_model(strategy)
        model.fit(strategy.distribute_datasets_from_function(dataset), verbose=0)

    def known(rank: int) -> None:
        strategy = new_strategy()
        model = compiled_model(strategy)
        data = strategy.distribute_datasets_from_function(lambda context: batches().take(3 + rank))
        model.fit(data, verbose=0)

    return join(Cluster(unknown), Cluster(known))


def case_fewer_rows_than_replicas() -> list[Ends]:
    def body(rank: int) -> None:
        compiled_model(new_strategy()).fit(batches(rows=9), verbose=0)

    return join(Cluster(body))


# --- No failure


def case_clean_ends() -> list[Ends]:
    """One worker ends later than the other: rank 0, then rank 1."""

    def body(late: int) -> Callable[[int], None]:
        def trains(rank: int) -> None:
            strategy = new_strategy()
            with strategy.scope():
                variable = tf.Variable(float(rank))
            total = strategy.reduce("SUM", strategy.run(lambda: variable + 1.0), axis=None)
            assert float(total) == 2.0
            if rank == late:
                time.sleep(3.0)
            print(f"ENDS {time.monotonic()}", flush=True)

        return trains

    clusters = [Cluster(body(late)) for late in range(2)]
    return [cluster.join(since=0.0) for cluster in clusters]  # as the clock that ENDS shows
