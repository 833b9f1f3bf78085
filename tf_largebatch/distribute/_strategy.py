"""`LargeBatchStrategy`: a multi-worker strategy that Keras 3 can train under."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from tf_largebatch.core.algorithm_choice import AllReduceCosts
from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.core.topology import ClusterTopology
from tf_largebatch.distribute._cluster import start_cluster, watch_progress
from tf_largebatch.distribute._comparison import require_equal_facts
from tf_largebatch.distribute._extended import LargeBatchExtended
from tf_largebatch.distribute._input import InputBatch
from tf_largebatch.distribute._keras_step import (
    PREDICT,
    TRAIN,
    AveragedScalars,
    check_optimizer,
    keras_step_kind,
    refuse_without_rows,
    skip_without_rows,
)
from tf_largebatch.distribute._model_facts import model_facts
from tf_largebatch.distribute._mpi_workers import MpiWorkers
from tf_largebatch.distribute._options import (
    ALGORITHMS,
    DEFAULT_BUCKET_BYTES,
    DEFAULT_BUCKETS_IN_FLIGHT,
    AllReduceOptions,
    check_choice,
)
from tf_largebatch.distribute._start_guard import end_if_server_hangs, keep_terminate_handler
from tf_largebatch.distribute._strategy_checks import (
    check_costs,
    check_launcher,
    check_order,
    check_timeouts,
    check_transport,
    cpu_replicas,
)
from tf_largebatch.distribute._tf_internals import (
    DistributedValues,
    Mirrored,
    in_xla_context,
)
from tf_largebatch.distribute._variable_sync import SynchronisingScope


class LargeBatchStrategy(tf.distribute.MultiWorkerMirroredStrategy):
    """Synchronous training on several workers, with `model.fit`, `evaluate` and `predict`.

    A `tf.distribute.MultiWorkerMirroredStrategy`: build and compile the model within
    `strategy.scope()`, and start the same script on every worker of `TF_CONFIG`, or as the tasks of
    a SLURM step. Without a cluster, or with a single worker, it runs on this host's GPUs, or on its
    CPU.

    Keras 3 cannot train under the stock strategy (keras 20585). Beyond mending that:

    - Scalar floats that Keras' steps return are averaged over all replicas in one collective a
      step, so that callbacks see equal values on all workers; an epoch's final metrics are exact.
    - A plain `tf.data.Dataset` (or arrays) given to Keras is taken as the same stream of global
      batches on all workers; each replica gets its part of every batch's rows. A shuffle must
      therefore be seeded alike on all workers, or use `GlobalShuffleSharder`. Where the replicas
      do not divide a batch, its loss is the mean of their means, as in all of `tf.distribute`.
    - Data sets that hold the same number of steps on all workers cost no collective to find out;
      others are checked each step, and end with an error that says who is short.
    - Every wait ends: at start after `start_timeout_seconds`, in a collective after
      `timeout_seconds`, with the missing worker's rank and address. Workers that run different
      programs find out, and show both sides.

    Args:
        all_reduce: how gradients are summed over the workers. `"ring"`; `"halving_doubling"`
            (Goyal et al. 2017, section 4.1), in which fewer messages follow one another;
            `"tensorflow"`: TensorFlow's own collectives (a ring on CPU, NCCL on GPU); or `"auto"`:
            for each bucket the one with the least time by what is measured at start.
        bucket_bytes: gradients are summed in buckets of at most this size, in the order in which
            backward makes them, each as soon as it is complete; default 8 MiB.
        max_buckets_in_flight: how many buckets travel at once; default 4.
        wire_dtype: `"bfloat16"` or `"float16"`: float32 and float64 gradients travel in half
            precision, and are summed in their own. Default None: as they are.
        parallel_initialization: all workers must make equal variables by themselves, from one seed
            or one file; a checksum proves it, and an error names the first variable that differs
            (Yamazaki et al. 2019). Default False: those that differ come from the chief.
        transport: how gradients, and all else that replicas sum, travel between workers.
            `"tensorflow"`, the default: by TensorFlow (gRPC on CPU, NCCL on GPU). `"mpi"`: by MPI,
            for CPU clusters, several times faster; start the program by `mpiexec -n N` or `srun`,
            without `TF_CONFIG`. `all_reduce="auto"` then leaves the algorithm to MPI. Variables,
            evaluation, checkpoints and the watch over the workers stay with TensorFlow. Needs
            `pip install 'tf_largebatch[mpi]'`.
        all_reduce_costs: what `strategy.all_reduce_costs` was in an earlier run on this cluster,
            instead of measuring; the same on all workers. Default None: measured at start, in
            about a second, where `all_reduce` leaves a choice.
        start_timeout_seconds: how long workers wait for one another at start; default 300.
        timeout_seconds: how late a worker may be in a collective; default 600. (One whose process
            is frozen altogether is given up by TensorFlow after some 10 s.)

    Environment:
        TF_CONFIG, SLURM_*: the cluster, see `tf_largebatch.ClusterTopology`.
        TF_LARGEBATCH_HOST, TF_LARGEBATCH_PORT: with `transport="mpi"` and without `TF_CONFIG`,
            where others reach this host, if not by its name, and the first of the ports of its
            ranks; default: any free ones.
        TF_LARGEBATCH_CPU_REPLICAS: on a host without GPUs, this many replicas (logical CPU
            devices) instead of one, to try out several replicas a worker.

    Raises:
        ConfigurationError: an option is not valid, this worker's port is taken, or this task is
            an evaluator.
        TopologyError: the description of the cluster cannot be used.
        ProgramOrderError: this process has joined the cluster already; or TensorFlow already ran
            an op, so that it can no longer join one (tensorflow 30551).
        PeerTimeoutError: a worker is absent at start.
        MismatchError: workers were started with different options or versions.
    """

    _has_joined = False  # whether this process has joined a cluster

    def __init__(
        self,
        *,
        all_reduce: str = "auto",
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        max_buckets_in_flight: int = DEFAULT_BUCKETS_IN_FLIGHT,
        wire_dtype: str | None = None,
        transport: str = "tensorflow",
        parallel_initialization: bool = False,
        all_reduce_costs: Mapping[str, Any] | None = None,
        start_timeout_seconds: float = 300.0,
        timeout_seconds: float = 600.0,
    ) -> None:
        check_choice("all_reduce", all_reduce, ALGORITHMS)
        check_timeouts(start_timeout_seconds, timeout_seconds)
        options = AllReduceOptions(
            algorithm=all_reduce,
            bucket_bytes=bucket_bytes,
            max_buckets_in_flight=max_buckets_in_flight,
            wire_dtype=wire_dtype,
            transport=check_transport(transport, all_reduce),
        )
        mpi = None
        if transport == "mpi":
            if LargeBatchStrategy._has_joined:  # alone, perhaps: the others are not asked to come
                check_order(has_joined=True)
            mpi = MpiWorkers(
                start_timeout_seconds=start_timeout_seconds, timeout_seconds=timeout_seconds
            )
        topology = mpi.topology if mpi else ClusterTopology.from_environment()
        if topology.is_evaluator:
            raise ConfigurationError(
                "This task is an evaluator by TF_CONFIG; it takes no part in training. Evaluate "
                "without a strategy, or make this task a worker."
            )
        replicas = cpu_replicas()
        costs = None if all_reduce_costs is None else AllReduceCosts.from_dict(all_reduce_costs)
        if topology.num_workers > 1:
            check_order(has_joined=LargeBatchStrategy._has_joined)
            if mpi is not None:
                mpi.limit_threads()
        elif mpi is None:
            check_launcher()
        start_cluster(
            topology,
            options={
                "all_reduce": all_reduce,
                "bucket_bytes": bucket_bytes,
                "max_buckets_in_flight": max_buckets_in_flight,
                "wire_dtype": wire_dtype,
                "transport": transport,
                "parallel_initialization": parallel_initialization,
                "all_reduce_costs": costs and json.dumps(costs.to_dict(), sort_keys=True),
                "timeout_seconds": float(timeout_seconds),
                "replicas_per_worker": replicas,
            },
            timeout_seconds=start_timeout_seconds,
        )
        with end_if_server_hangs(topology, timeout_seconds=start_timeout_seconds):
            extended = LargeBatchExtended(
                self,
                topology=topology,
                cpu_replicas=replicas,
                options=options,
                parallel_initialization=parallel_initialization,
                engine=mpi and mpi.engine,
            )
        LargeBatchStrategy._has_joined |= topology.num_workers > 1
        keep_terminate_handler()
        # Past MultiWorkerMirroredStrategy's own constructor, which would make its own extended.
        tf.distribute.Strategy.__init__(self, extended)
        self._topology = topology
        # Of each model that was compared the optimizer that it had.
        self._compared: weakref.WeakKeyDictionary[keras.Model, Any] = weakref.WeakKeyDictionary()
        if topology.num_workers > 1:
            self._watch = watch_progress(
                topology, extended.journal, timeout_seconds, engine=mpi and mpi.engine
            )
            on_cpu = extended._local_device_type == "CPU"
            chooses = all_reduce == "halving_doubling" or (
                all_reduce == "auto" and (mpi is None or wire_dtype is not None)
            )
            if costs is not None:
                check_costs(costs, extended.selector.costs)
                extended.selector.use(costs, "given")
            elif on_cpu and chooses:
                extended.selector.use(extended.measure_costs(), "measured at start")

    @property
    def topology(self) -> ClusterTopology:
        """The workers, and which of them this process is."""
        return self._topology

    def all_reduce_report(self) -> str:
        """Which algorithm was chosen for buffers of which size, with predicted times."""
        return self.extended.all_reduce_report()

    @property
    def all_reduce_costs(self) -> dict[str, Any]:
        """What predictions are made from, the same on all workers; can be stored as JSON."""
        return self.extended.selector.costs.to_dict()

    def scope(self) -> Any:
        """As `tf.distribute.Strategy.scope`; at its end, variables made in it are made equal."""
        return SynchronisingScope(super().scope(), self.extended.variables)

    def barrier(self) -> None:
        """Returns once all workers have come here; at the latest after `timeout_seconds`.

        For the end of a script whose chief still writes files: a worker that leaves early is
        reported as crashed by TensorFlow.
        """
        self.extended.gather_from_workers(tf.constant([self._topology.rank]), purpose="barrier")

    def run(
        self,
        fn: Callable[..., Any],
        args: Any = (),
        kwargs: Any = None,
        options: Any = None,
    ) -> Any:
        """As `tf.distribute.Strategy.run`; see the class for what is done to Keras' steps."""
        if in_xla_context():
            raise ConfigurationError(
                "jit_compile=True compiles the step with XLA, which cannot run TensorFlow's "
                "cross-worker collectives. Use jit_compile=False, or leave Keras' 'auto'."
            )
        kind = keras_step_kind(fn)
        if kind == TRAIN:
            self._check_model_once(fn.__self__)  # type: ignore[attr-defined]
        self.extended.variables.synchronise()
        if self._topology.num_workers > 1:
            self.extended.journal.note_run()
        if kind is None or self.num_replicas_in_sync == 1:
            return super().run(fn, args, kwargs, options)
        if kind == TRAIN:
            check_optimizer(getattr(fn, "__self__", None))
            step = refuse_without_rows(fn, replicas=self.num_replicas_in_sync)
        else:
            step = skip_without_rows(fn)
        if kind == PREDICT or self._topology.num_workers == 1:
            return super().run(step, args, kwargs, options)
        averaged_step = AveragedScalars(step, self.extended.agreed_flags if kind == TRAIN else None)
        outputs = super().run(averaged_step, args, kwargs, options)
        return tf.nest.pack_sequence_as(
            outputs,
            [
                Mirrored(_local_values(leaf)) if equal else leaf
                for leaf, equal in zip(
                    tf.nest.flatten(outputs), averaged_step.averaged, strict=True
                )
            ],
        )

    def _check_model_once(self, model: keras.Model) -> None:
        """Compares a model and its optimizer before the first step after each `compile`.

        Its weights as well: a file may have been loaded since they were made. Not before later
        steps, as one worker may trace again where others do not.

        Raises:
            MismatchError: workers are about to train differently; the message shows who has what.
        """
        optimizer = getattr(model, "optimizer", None)
        compared = self._compared.get(model, lambda: self)()  # self: not yet
        if self._topology.num_workers == 1 or compared is optimizer:
            return
        with tf.init_scope():  # a function may be being traced
            require_equal_facts(
                model_facts(model),
                self.extended,
                purpose="comparison of models, optimizers and losses",
                head="Workers must train the same model in the same way",
            )
        self._compared[model] = (lambda: None) if optimizer is None else weakref.ref(optimizer)
        for variable in model.trainable_variables:
            self.extended.variables.add(variable.value)

    def reduce(self, reduce_op: Any, value: Any, axis: int | None) -> Any:
        """As `tf.distribute.Strategy.reduce`, also for nested structures, leaf by leaf.

        - `axis=0` of scalars, as Keras asks for, means `axis=None`.
        - Values that are equal on all replicas by construction are returned without a collective.
        - The mean of a batch as it comes from an iterator is this worker's first replica's batch:
          Keras asks for it to learn shapes and types, and the replicas' batches may differ in
          length.
        """
        return tf.nest.map_structure(lambda leaf: self._reduce_leaf(reduce_op, leaf, axis), value)

    def _reduce_leaf(self, reduce_op: Any, leaf: Any, axis: int | None) -> Any:
        if leaf is None or isinstance(leaf, tf.experimental.Optional):
            return leaf
        is_mean = reduce_op in ("MEAN", "mean", tf.distribute.ReduceOp.MEAN)
        if is_mean and isinstance(leaf, InputBatch | Mirrored):
            return leaf.values[0]
        if axis == 0 and all(
            getattr(value, "shape", None) is not None and value.shape.rank == 0
            for value in _local_values(leaf)
        ):
            axis = None
        return super().reduce(reduce_op, leaf, axis)


def _local_values(value: Any) -> tuple[Any, ...]:
    return value.values if isinstance(value, DistributedValues) else (value,)
