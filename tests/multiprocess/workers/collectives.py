"""All-reduce by every algorithm: against NumPy's sums, bit by bit between workers, run after run.

Each case forks clusters of its own. Workers check what they get; what must be equal between them
they print, as digests.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from forked_cluster import Cluster

import tf_largebatch as tlb
import tf_largebatch.distribute  # the forks have it then

Ends = dict[int, dict[str, Any]]
ALGORITHMS = ("tensorflow", "ring", "halving_doubling", "auto")
PLANS = ALGORITHMS[1:]
DTYPES = (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.int64)
SHAPES = ((), (3,), (0,), (40, 25))


def clusters(body: Callable[[Any], None], *, all_reduce: str = "ring") -> list[Ends]:
    """A power of two of workers, another number, and workers of two replicas each.

    Args:
        body: what each worker runs, with its strategy.
        all_reduce: the strategy's; "auto" measures at start, in about a second.
    """
    replicas = [{"TF_LARGEBATCH_CPU_REPLICAS": "2"}] * 2
    started = []
    for num_workers, env in ((4, ()), (3, ()), (2, replicas)):
        cluster = Cluster(
            lambda rank: body(tlb.LargeBatchStrategy(all_reduce=all_reduce, timeout_seconds=60.0)),
            num_workers=num_workers,
            env=env,
        )
        started.append(cluster.join(timeout_seconds=60.0))
    return started


def members_of(strategy: Any) -> list[int]:
    """The numbers of this worker's replicas among all."""
    local = strategy.num_replicas_in_sync // strategy.topology.num_workers
    return [strategy.topology.rank * local + index for index in range(local)]


def per_replica(strategy: Any, make: Callable[[int], Any]) -> Any:
    return strategy.experimental_distribute_values_from_function(
        lambda context: make(context.replica_id_in_sync_group)
    )


def all_reduced(
    strategy: Any, values: Any, op: str, *, runs: int = 1, eager: bool = False, **options: Any
) -> Any:
    """Of each run, every value's results on the local replicas."""

    def step(*values: Any) -> Any:
        context = tf.distribute.get_replica_context()
        return context.all_reduce(op, values, options=tlb.AllReduceOptions(**options))

    def run() -> Any:
        return strategy.run(step, args=values)

    run = run if eager else tf.function(run, autograph=False)
    return [
        [
            [local.numpy() for local in strategy.experimental_local_results(result)]
            for result in run()
        ]
        for _ in range(runs)
    ]


def small_integers(member: int, seed: int, shape: tuple[int, ...]) -> Any:
    return np.random.default_rng([member, seed]).integers(0, 9, shape)


def digest(results: Any) -> str:
    return hashlib.sha256(
        b"".join(value.tobytes() for values in results for value in values)
    ).hexdigest()


def case_sums_and_means() -> list[Ends]:
    def body(strategy: Any) -> None:
        cases = [(dtype, shape) for dtype in DTYPES for shape in SHAPES]
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
        floats = [
            value for value, (dtype, _) in zip(values, cases, strict=True) if dtype.is_floating
        ]
        for algorithm in ALGORITHMS:
            eagerly = [("MEAN", True, floats)] if algorithm in ("tensorflow", "auto") else []
            for op, eager, chosen in (("SUM", False, values), *eagerly):
                (results,) = all_reduced(
                    strategy, chosen, op, eager=eager, algorithm=algorithm, bucket_bytes=1000
                )
                for seed, local in enumerate(results):
                    dtype, shape = cases[seed]
                    total = sum(small_integers(member, seed, shape) for member in members)
                    # Of the result's dtype, but for the last bit of a quotient.
                    expected = np.asarray(total / len(members) if op == "MEAN" else total)
                    exact = expected.astype(dtype.as_numpy_dtype).astype(np.float64)
                    for value in local:
                        assert value.shape == shape and value.dtype == dtype.as_numpy_dtype
                        np.testing.assert_allclose(
                            value.astype(np.float64),
                            exact,
                            rtol=1e-2 if op == "MEAN" else 0,
                            err_msg=f"{algorithm} {op} {dtype} {shape}",
                        )
        print("DONE", flush=True)
        strategy.barrier()

    return clusters(body)


def case_equal_bits() -> list[Ends]:
    def body(strategy: Any) -> None:
        sizes = [5] * 8 + [20_000] + [7, 1] * 4  # many small, one larger than a bucket, one of 1
        values = [
            per_replica(
                strategy,
                lambda member, seed=seed, size=size: tf.constant(
                    np.random.default_rng([member, seed]).normal(size=size), tf.float32
                ),
            )
            for seed, size in enumerate(sizes)
        ]
        members = range(strategy.num_replicas_in_sync)
        for algorithm in ALGORITHMS:
            for wire_dtype in (None, "bfloat16", "float16"):
                if wire_dtype is not None and algorithm in ("tensorflow", "auto"):
                    continue
                runs = all_reduced(
                    strategy,
                    values,
                    "SUM",
                    runs=3,
                    algorithm=algorithm,
                    wire_dtype=wire_dtype,
                    bucket_bytes=16_000,
                )
                digests = {digest([local[:1] for local in results]) for results in runs}
                assert len(digests) == 1, f"{algorithm} differs from run to run"
                print("DIGEST", json.dumps([algorithm, wire_dtype, digests.pop()]), flush=True)
                results = runs[0]
                for first, *others in results:
                    assert all(np.array_equal(first, other) for other in others), algorithm
                for seed, (size, local) in enumerate(zip(sizes, results, strict=True)):
                    rows = np.stack(
                        [
                            np.random.default_rng([member, seed]).normal(size=size)
                            for member in members
                        ]
                    ).astype(np.float32)
                    error = np.abs(local[0] - rows.astype(np.float64).sum(axis=0))
                    assert np.all(error <= bound(rows, wire_dtype)), (algorithm, wire_dtype)
        strategy.barrier()

    return clusters(body)


def bound(rows: Any, wire_dtype: str | None) -> Any:
    """How far a sum may lie from the exact one.

    A value is rounded once each time it travels. A term of the sum travels, in partial sums, in at
    most R - 1 hops of the reduction (a ring), and the sum once more: at most R roundings of
    relative error u each, of partial sums that are never larger than S, the sum of the absolute
    values, times (1 + u)^R. So the error is at most S ((1 + u)^R - 1), and the additions in float32
    add another S ((1 + v)^(R - 1) - 1). Half the spacing at 1 is u = 2^-8 for bfloat16, 2^-11 for
    float16 and v = 2^-24 for float32.
    """
    replicas = len(rows)
    total = np.abs(rows.astype(np.float64)).sum(axis=0)
    wire = {None: 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11}[wire_dtype]
    subnormal = replicas * 2.0**-25 if wire_dtype == "float16" else 0.0
    return total * ((1 + wire) ** replicas * (1 + 2.0**-24) ** replicas - 1) + subnormal


def case_overflow_and_loops() -> list[Ends]:
    def body(strategy: Any) -> None:
        large = per_replica(strategy, lambda member: tf.fill([2000], 60_000.0))
        for algorithm in PLANS:
            for wire_dtype, finite in (("float16", False), ("bfloat16", True)):
                (((first, *_),),) = all_reduced(
                    strategy, [large], "SUM", algorithm=algorithm, wire_dtype=wire_dtype
                )
                assert np.all(np.isfinite(first)) == finite, (algorithm, wire_dtype)
        replicas = strategy.num_replicas_in_sync
        for algorithm in PLANS:
            options = tlb.AllReduceOptions(algorithm=algorithm, bucket_bytes=1000)

            def step(count: tf.Tensor, options: tlb.AllReduceOptions = options) -> tf.Tensor:
                context = tf.distribute.get_replica_context()
                member = tf.cast(context.replica_id_in_sync_group, tf.float32)
                value = tf.fill([1000], (member + 1) * tf.cast(count, tf.float32))
                return context.all_reduce("SUM", value, options=options)

            @tf.function
            def steps(step: Callable[..., Any] = step) -> tf.Tensor:
                total = tf.zeros([1000])
                for count in tf.range(5):
                    total += strategy.experimental_local_results(strategy.run(step, args=(count,)))[
                        0
                    ]
                return total

            np.testing.assert_array_equal(
                steps(), np.full(1000, 10 * replicas * (replicas + 1) / 2)
            )
        for algorithm in ALGORITHMS:
            options = tlb.AllReduceOptions(algorithm=algorithm)

            def total(options: tlb.AllReduceOptions = options) -> tf.Tensor:
                context = tf.distribute.get_replica_context()
                return context.all_reduce("SUM", tf.ones([1]), options=options)

            def nested(total: Callable[..., Any] = total) -> list[tf.Tensor]:
                """The same all-reduce in a graph and in graphs within it, all at a time."""
                yes = tf.random.uniform([]) < 2.0
                branches = [tf.cond(yes, total, lambda: tf.zeros([1])) for _ in range(2)]
                return [total(), *branches, tf.function(total)()]

            for result in tf.function(lambda nested=nested: strategy.run(nested))():
                for value in strategy.experimental_local_results(result):
                    assert value.numpy() == [replicas], algorithm
        report = strategy.all_reduce_report()
        assert "'ring': ring" in report and "halving_doubling" in report, report
        print("REPORT", json.dumps(report), flush=True)
        strategy.barrier()

    return clusters(body, all_reduce="auto")


def case_training() -> list[Ends]:
    """A few steps with each algorithm, in buckets smaller than a layer, from the same start."""

    def body(strategy: Any) -> None:
        replicas = strategy.num_replicas_in_sync
        rows = np.random.default_rng(0).normal(size=(4 * 12, 6)).astype(np.float32)
        targets = rows.sum(axis=1, keepdims=True)
        for algorithm in ("tensorflow", "halving_doubling"):
            # As a strategy made with this option; a process can make one strategy only.
            strategy.extended._cross_device_ops._options = tlb.AllReduceOptions(
                algorithm=algorithm, bucket_bytes=100
            )
            keras.utils.set_random_seed(3)
            with strategy.scope():
                model = keras.Sequential(
                    [keras.Input((6,)), keras.layers.Dense(9, "tanh"), keras.layers.Dense(1)]
                )
                model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
            model.fit(rows[: 4 * replicas], targets[: 4 * replicas], 2 * replicas, 3, 0)
            weights = np.concatenate([each.ravel() for each in model.get_weights()])
            print("WEIGHTS", json.dumps(weights.tolist()), flush=True)
        strategy.barrier()

    return clusters(body)


def small_model(units: int = 3) -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((2,)),
            keras.layers.Dense(4, name="dense"),
            keras.layers.Dense(units, name="dense_1"),
        ]
    )
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9))
    model.optimizer.build(model.trainable_variables)
    return model


def case_variables() -> list[Ends]:
    """Equal seeds; other seeds; other seeds where they must be equal; other models."""

    def body(seed: Callable[[int], int], **options: Any) -> Callable[[int], None]:
        units = options.pop("units", lambda rank: 3)

        def starts(rank: int) -> None:
            strategy = tlb.LargeBatchStrategy(
                all_reduce="tensorflow", timeout_seconds=60.0, **options
            )
            keras.utils.set_random_seed(seed(rank))
            with strategy.scope():
                model = small_model(units(rank))
            values = [each.numpy().tolist() for each in model.variables + model.optimizer.variables]
            print("VARIABLES", json.dumps(values), flush=True)
            print("BROADCASTS", strategy.extended._broadcasts, flush=True)
            with strategy.scope():  # later ones as well
                later = tf.Variable(np.random.default_rng(rank).normal(size=5))
            print("VARIABLES", json.dumps(later.numpy().tolist()), flush=True)
            for weight in model.trainable_variables:  # as from files that differ
                weight.assign(tf.ones(weight.shape) * (rank + 1))
            with strategy.scope():
                model.compile(keras.optimizers.SGD(0.0), "mse")
            model.fit(np.ones((4, 2)), np.ones((4, 3)), 4, verbose=0)
            print(
                "VARIABLES", json.dumps(model.trainable_variables[0].numpy().tolist()), flush=True
            )
            strategy.barrier()

        return starts

    bodies = [
        body(lambda rank: 7),
        body(lambda rank: rank),
        body(lambda rank: rank, parallel_initialization=True),
        body(lambda rank: 7, units=lambda rank: 3 - rank),
    ]
    return [Cluster(each, num_workers=2).join(timeout_seconds=60.0) for each in bodies]
