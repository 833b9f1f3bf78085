"""All-reduces of a LargeBatchStrategy(transport="mpi"): each rank checks what it gets.

What must be equal between ranks is handed back, as JSON.
"""

from __future__ import annotations

import gc
import json
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import collectives
import equality
import keras
import numpy as np
import tensorflow as tf
from collectives import DTYPES, SHAPES, all_reduced, bound, digest, per_replica, small_integers
from forked_cluster import Cluster
from mpi_cluster import MpiCluster

import tf_largebatch as tlb
import tf_largebatch.distribute  # the forks have it then
from tf_largebatch.distribute._mpi_engine import TransferEngine

Ends = dict[int, dict[str, Any]]
ALGORITHMS = collectives.PLANS
TIMEOUT_SECONDS = 120.0  # of one launch, on a machine that is busy with other tests
TWO_REPLICAS = [{"TF_LARGEBATCH_CPU_REPLICAS": "2"}] * 2


def run_checks(strategy: Any) -> None:
    """Each in turn; prints what it hands back, or its error."""
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            try:
                fact = {"value": check(strategy)}
            except Exception:
                fact = {"error": traceback.format_exc()}
            print("CHECK", json.dumps({"name": name, **fact}), flush=True)


def checked(rank: int) -> None:
    run_checks(tlb.LargeBatchStrategy(transport="mpi", timeout_seconds=60.0))


def case_two_ranks() -> Ends:
    return MpiCluster(checked, num_workers=2).join(TIMEOUT_SECONDS)


def case_three_ranks() -> Ends:
    return MpiCluster(checked, num_workers=3).join(TIMEOUT_SECONDS)


def case_two_ranks_of_two() -> Ends:
    """Each with two replicas."""
    return MpiCluster(checked, env=TWO_REPLICAS).join(TIMEOUT_SECONDS)


@contextmanager
def submissions() -> Iterator[list[Any]]:
    """The buckets that are handed in meanwhile."""
    seen: list[Any] = []
    submit = TransferEngine.submit

    def noted(self: TransferEngine, bucket: Any, **options: Any) -> None:
        seen.append(bucket.description)
        submit(self, bucket, **options)

    TransferEngine.submit = noted  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        TransferEngine.submit = submit  # type: ignore[method-assign]


def check_sums_and_means(strategy: Any) -> None:
    cases = [(dtype, shape) for dtype in DTYPES for shape in (*SHAPES, (16,))]
    values = [
        per_replica(
            strategy,
            lambda member, seed=seed, dtype=dtype, shape=shape: tf.cast(
                small_integers(member, seed, shape), dtype
            ),
        )
        for seed, (dtype, shape) in enumerate(cases)
    ]
    members = range(strategy.num_replicas_in_sync)
    for algorithm, op, eager in (
        ("auto", "SUM", False),
        ("auto", "SUM", True),
        ("ring", "MEAN", False),
    ):
        chosen = [
            place for place, (dtype, _) in enumerate(cases) if op == "SUM" or dtype.is_floating
        ]
        (results,) = all_reduced(
            strategy,
            [values[place] for place in chosen],
            op,
            eager=eager,
            algorithm=algorithm,
            bucket_bytes=1000,
        )
        for place, local in zip(chosen, results, strict=True):
            dtype, shape = cases[place]
            total = sum(small_integers(member, place, shape) for member in members)
            expected = np.asarray(total / len(members) if op == "MEAN" else total)
            exact = expected.astype(dtype.as_numpy_dtype).astype(np.float64)
            for value in local:
                assert value.shape == shape and value.dtype == dtype.as_numpy_dtype
                np.testing.assert_allclose(
                    value.astype(np.float64),
                    exact,
                    # The last bit of a quotient may be another one.
                    rtol=1e-2 if op == "MEAN" else 0,
                    err_msg=f"{algorithm} {op} {eager} {dtype} {shape}",
                )


def check_equal_bits(strategy: Any) -> list[Any]:
    """Normal numbers, in every dtype on the wire: within the bound; digests are handed back."""
    sizes = [5, 5, 20_000, 7, 1, 16]
    members = range(strategy.num_replicas_in_sync)

    def normal(member: int, seed: int) -> Any:
        return np.random.default_rng([member, seed]).normal(size=sizes[seed]).astype(np.float32)

    values = [
        per_replica(strategy, lambda member, seed=seed: tf.constant(normal(member, seed)))
        for seed in range(len(sizes))
    ]
    found = []
    for algorithm, wire_dtype in (
        *((algorithm, None) for algorithm in ALGORITHMS),
        ("auto", "bfloat16"),
        ("ring", "float16"),
        ("halving_doubling", "bfloat16"),
    ):
        runs = all_reduced(
            strategy,
            values,
            "SUM",
            runs=2,
            algorithm=algorithm,
            wire_dtype=wire_dtype,
            bucket_bytes=16_000,
        )
        digests = {digest([local[:1] for local in results]) for results in runs}
        assert len(digests) == 1, f"{algorithm} differs from run to run"
        found.append([algorithm, wire_dtype, digests.pop()])
        for seed, (first, *others) in enumerate(runs[0]):
            assert all(np.array_equal(first, other) for other in others)
            rows = np.stack([normal(member, seed) for member in members])
            error = np.abs(first - rows.astype(np.float64).sum(axis=0))
            # Replicas of one worker are summed before anything travels.
            assert np.all(error <= bound(rows, wire_dtype)), (algorithm, wire_dtype)
    return found


def check_kept_results(strategy: Any) -> None:
    """What a user keeps of earlier steps stays as it was: all of it, parts, NumPy's views."""
    replicas = strategy.num_replicas_in_sync
    weights = sum(range(1, replicas + 1))
    shapes = ((700,), (16,), (3,), ())

    def step(number: tf.Tensor) -> Any:
        context = tf.distribute.get_replica_context()
        member = tf.cast(context.replica_id_in_sync_group, tf.float32) + 1.0
        values = [tf.fill(shape, member * (number + len(shape))) for shape in shapes]
        return context.all_reduce("SUM", values)

    in_graph = tf.function(lambda number: strategy.run(step, args=(number,)))
    kept: list[tuple[float, Any]] = []
    for run in (in_graph, lambda number: strategy.run(step, args=(number,))):
        for number in range(12):
            results = run(tf.constant(float(number)))
            for shape, result in zip(shapes, results, strict=True):
                expected = weights * (number + len(shape))
                for local in strategy.experimental_local_results(result):
                    kept.append((expected, local))  # TensorFlow's own
                    if shape:
                        kept.append((expected, local.numpy()[1:]))  # of which it knows nothing
                        kept.append((expected, local[:2]))
                    kept.append((expected, tf.reshape(local, [-1])))
            # One of two is let go, so that memory is used again.
            kept = kept[::2] if number % 3 == 0 else kept
            del results, result, local
            gc.collect()
    assert len(kept) > 50
    for expected, value in kept:
        np.testing.assert_array_equal(np.asarray(value), np.full(np.shape(value), expected))


def check_updates_in_place(strategy: Any) -> None:
    """A variable that takes a result as its value, and is added to, changes nothing else."""
    replicas = strategy.num_replicas_in_sync
    with strategy.scope():
        variable = tf.Variable(tf.zeros([64]))

    def step() -> Any:
        context = tf.distribute.get_replica_context()
        first, second = context.all_reduce("SUM", [tf.ones([64]), 2 * tf.ones([64])])
        return first, second, first + second

    @tf.function
    def run() -> Any:
        first, second, both = (
            strategy.experimental_local_results(each)[0] for each in strategy.run(step)
        )
        variable.assign(first)
        variable.assign_add(second)
        return first, second, both

    for _ in range(5):
        first, second, both = run()
        np.testing.assert_array_equal(variable.numpy(), np.full(64, 3.0 * replicas))
        np.testing.assert_array_equal(both, np.full(64, 3.0 * replicas))
        np.testing.assert_array_equal(first, np.full(64, 1.0 * replicas))
        np.testing.assert_array_equal(second, np.full(64, 2.0 * replicas))


def check_options_of_a_call(strategy: Any) -> list[Any]:
    """By what a call's buckets travel, told by what reaches the engine."""
    value = per_replica(strategy, lambda member: tf.fill([3000], float(member + 1)))
    replicas = strategy.num_replicas_in_sync
    seen = []
    for options in (
        {},
        {"transport": "mpi"},
        {"transport": "tensorflow"},
        {"transport": "tensorflow", "algorithm": "ring"},
        {"algorithm": "tensorflow"},
        {"algorithm": "ring"},
        {"algorithm": "halving_doubling", "wire_dtype": "bfloat16"},
    ):
        with submissions() as buckets:
            (((*results,),),) = all_reduced(strategy, [value], "SUM", **options)
        for result in results:
            np.testing.assert_array_equal(result, np.full(3000, replicas * (replicas + 1) / 2))
        seen.append([options, len(buckets)])
    return seen


def check_buckets_in_flight(strategy: Any) -> list[int]:
    """More buckets than may be under way, of a quarter of a MiB each."""
    length = 2**16
    values = [
        per_replica(strategy, lambda member, seed=seed: tf.fill([length], float(member + seed)))
        for seed in range(12)
    ]
    replicas = strategy.num_replicas_in_sync
    members = replicas * (replicas - 1) // 2
    counts = []
    for at_once, algorithm in ((1, "auto"), (3, "ring"), (20, "auto")):
        with submissions() as buckets:
            runs = all_reduced(
                strategy,
                values,
                "SUM",
                runs=3,
                algorithm=algorithm,
                bucket_bytes=4 * length,
                max_buckets_in_flight=at_once,
            )
        counts.append(len(buckets))
        for results in runs:
            for seed, local in enumerate(results):
                for result in local:
                    assert np.all(result == members + replicas * seed), (at_once, algorithm)
    return counts


def check_overlap(strategy: Any) -> list[int]:
    """How many buckets are handed in before the first one has come: as many as may be."""
    values = [per_replica(strategy, lambda member: tf.ones([40])) for _ in range(8)]
    is_late = strategy.topology.rank == strategy.topology.num_workers - 1
    handed_in: list[int] = []
    submit = TransferEngine.submit

    def noted(self: TransferEngine, bucket: Any, **options: Any) -> None:
        handed_in.append(0)
        deliver = bucket.deliver

        def delivered(error: str | None) -> None:
            first.append(len(handed_in))
            deliver(error)

        bucket.deliver = delivered
        submit(self, bucket, **options)

    counts = []
    for at_once in (1, 3):
        first: list[int] = []
        handed_in.clear()

        def step(*values: Any, at_once: int = at_once) -> Any:
            options = tlb.AllReduceOptions(bucket_bytes=160, max_buckets_in_flight=at_once)
            return tf.distribute.get_replica_context().all_reduce("SUM", values, options=options)

        run = tf.function(lambda step=step: strategy.run(step, args=values)).get_concrete_function()
        strategy.barrier()
        if is_late:
            time.sleep(0.5)
        TransferEngine.submit = noted  # type: ignore[method-assign]
        try:
            results = run()
        finally:
            TransferEngine.submit = submit  # type: ignore[method-assign]
        for result in results:
            for local in strategy.experimental_local_results(result):
                assert np.all(local == strategy.num_replicas_in_sync)
        assert len(first) == len(handed_in) == 8
        counts.append(at_once if is_late else first[0])  # the late one's come at once
    return counts


def check_graphs_within_graphs(strategy: Any) -> None:
    """In both branches of conditions, in loops and in functions, next to one another."""
    replicas = strategy.num_replicas_in_sync
    for algorithm in ("auto", "halving_doubling"):
        options = tlb.AllReduceOptions(algorithm=algorithm, bucket_bytes=64)

        def total(value: Any, options: tlb.AllReduceOptions = options) -> Any:
            return tf.distribute.get_replica_context().all_reduce("SUM", value, options=options)

        def nested(number: tf.Tensor, total: Callable[..., Any] = total) -> Any:
            first = total([tf.fill([20], number), tf.fill([30], number)])
            chosen = tf.cond(
                number % 2.0 < 1.0, lambda: total(tf.ones([5])), lambda: total(2 * tf.ones([5]))
            )
            skipped = tf.cond(number < -1.0, lambda: total(tf.ones([5])), lambda: tf.zeros([5]))

            def turn(count: tf.Tensor, summed: tf.Tensor) -> Any:
                return count + 1, summed + total(tf.fill([40], number)) + total(tf.ones([40]))

            _, looped = tf.while_loop(
                lambda count, _: count < 4, turn, (tf.constant(0), tf.zeros([40]))
            )
            called = tf.function(total)(tf.fill([3], number))
            last = total(tf.fill([7], number))
            return [*first, chosen, skipped, looped, called, last]

        run = tf.function(lambda number, nested=nested: strategy.run(nested, args=(number,)))
        for number in (3.0, 4.0, 5.0):
            expected = [
                number * replicas,
                number * replicas,
                (1.0 if number % 2 < 1 else 2.0) * replicas,
                0.0,
                4 * (number + 1) * replicas,
                number * replicas,
                number * replicas,
            ]
            for result, value in zip(run(tf.constant(number)), expected, strict=True):
                for local in strategy.experimental_local_results(result):
                    np.testing.assert_array_equal(
                        local, np.full(local.shape, value), err_msg=f"{algorithm} {number}"
                    )


def check_outside_of_replicas(strategy: Any) -> list[Any]:
    """Sums, gathered rows and a new variable, which is the chief's."""
    values = per_replica(strategy, lambda member: tf.fill([2], float(member)))
    total = strategy.reduce("SUM", values, axis=None)
    rows = strategy.gather(values, axis=0)
    with strategy.scope():
        variable = tf.Variable(tf.fill([3], 1.0 + strategy.topology.rank))
    strategy.barrier()
    return [total.numpy().tolist(), rows.numpy().tolist(), variable.numpy().tolist()]


def check_report(strategy: Any) -> str:
    return strategy.all_reduce_report()


def check_fit(strategy: Any) -> list[Any]:
    """A few epochs in buckets smaller than a layer, by MPI and by TensorFlow: weights."""
    found = []
    for transport in ("mpi", "tensorflow"):
        # As a strategy made with this option; a process can make one strategy only.
        strategy.extended._cross_device_ops._options = tlb.AllReduceOptions(
            transport=transport,
            algorithm="auto" if transport == "mpi" else "tensorflow",
            bucket_bytes=100,
        )
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = keras.Sequential(
                [keras.Input((6,)), keras.layers.Dense(33, "tanh"), keras.layers.Dense(1)]
            )
            model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
        rows = np.random.default_rng(0).normal(size=(48, 6)).astype(np.float32)
        with submissions() as buckets:
            model.fit(rows, rows.sum(axis=1, keepdims=True), 12, 3, 0)
        found.append([len(buckets) > 0, lists(model.get_weights())])
    return found


# --- Training


def lists(weights: Any) -> list[Any]:
    return [np.asarray(weight, np.float64).tolist() for weight in weights]


def train(strategy: Any) -> dict[str, Any]:
    """Twenty steps each of `equality.py`: embeddings, accumulation, batch norm, several steps."""
    equality.OPTIMIZERS = {name: equality.OPTIMIZERS[name] for name in ("momentum_sgd", "lars")}
    found = {"sgd": lists(equality.case_sgd_with_schedule(strategy)["weights"])}
    for name, weights in equality.case_optimizers_and_accumulation(strategy).items():
        found[name] = lists(weights)
    for name, result in equality.case_batch_norm(strategy).items():
        found[f"batch norm, {name}"] = lists(result["trained"])
    steps = equality.case_steps_per_execution(strategy)["5"]["weights"]
    return {**found, "5 steps at a time": lists(steps)}


def trains(transport: str) -> Callable[[int], None]:
    def body(rank: int) -> None:
        strategy = tlb.LargeBatchStrategy(
            all_reduce="auto" if transport == "mpi" else "tensorflow",
            transport=transport,
            bucket_bytes=100,
            timeout_seconds=60.0,
        )
        print("TRAINED", json.dumps(train(strategy)), flush=True)

    return body


def case_training() -> list[Ends]:
    """Two workers, in buckets of 100 bytes, by MPI and by TensorFlow."""
    by_mpi = MpiCluster(trains("mpi")).join(TIMEOUT_SECONDS)
    return [by_mpi, Cluster(trains("tensorflow")).join(TIMEOUT_SECONDS)]
