"""The strategy's machinery behind `LargeBatchStrategy`: devices, cross-device ops, input."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tf_largebatch.core.algorithm_choice import AllReduceCosts, Candidate
from tf_largebatch.core.topology import ClusterTopology
from tf_largebatch.distribute._agreed_flags import AgreedFlags
from tf_largebatch.distribute._comparison import fingerprint, raise_mismatch
from tf_largebatch.distribute._cross_device_ops import LargeBatchAllReduce
from tf_largebatch.distribute._input import (
    UNKNOWN,
    ReplicaBatchesDataset,
    identity_of,
    steps_of,
)
from tf_largebatch.distribute._journal import CollectiveJournal
from tf_largebatch.distribute._measurement import measure_costs
from tf_largebatch.distribute._mpi_engine import TransferEngine
from tf_largebatch.distribute._mpi_reducer import MpiReducer
from tf_largebatch.distribute._options import AllReduceOptions
from tf_largebatch.distribute._replica_seeds import is_seed_state, spread_seeds
from tf_largebatch.distribute._row_split import split_rows
from tf_largebatch.distribute._selection import AlgorithmSelector
from tf_largebatch.distribute._sum_on_read import SumOnReadVariable
from tf_largebatch.distribute._tf_internals import (
    CollectiveAllReduceExtended,
    SyncOnReadVariable,
    broadcast_recv_v2,
    broadcast_send_v2,
    context,
)
from tf_largebatch.distribute._variable_sync import VariableSynchroniser

_FIRST_BROADCAST_KEY = 2**29


class LargeBatchExtended(CollectiveAllReduceExtended):  # type: ignore[misc]
    """See `LargeBatchStrategy`, which makes it."""

    def __init__(
        self,
        strategy: Any,
        *,
        topology: ClusterTopology,
        cpu_replicas: int,
        options: AllReduceOptions,
        parallel_initialization: bool,
        engine: TransferEngine | None,
    ) -> None:
        self._topology = topology
        self._cpu_replicas = cpu_replicas
        self._broadcasts = 0
        self._sums_on_read = 0
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(_cluster_of(topology)),
            task_type="worker",
            task_id=topology.rank,
            rpc_layer="grpc",
        )
        super().__init__(
            strategy,
            cluster_resolver=resolver,
            # No timeout here: TensorFlow keeps a sleeping thread for each collective that has one,
            # until its time is over. `_progress.py` ends waits, and names who is waited for.
            communication_options=options,
        )
        self.journal = CollectiveJournal()
        self.agreed_flags = AgreedFlags(self._num_workers)
        self.variables = VariableSynchroniser(topology, self, must_be_equal=parallel_initialization)
        self.selector = AlgorithmSelector(
            num_workers=self._num_workers,
            replicas_per_worker=len(self.worker_devices),
            has_nccl=self._local_device_type == "GPU",
        )
        mpi = engine and MpiReducer(engine, replicas=len(self.worker_devices))
        self._host_cross_device_ops = self._make_cross_device_ops([self._worker_device], None)
        self._cross_device_ops = self._make_cross_device_ops(
            self.worker_devices, self.selector, mpi
        )
        self._selectors = [self.selector]
        if mpi is not None:
            self.selector = mpi.selector
            self._selectors.insert(0, mpi.selector)

    def _make_cross_device_ops(
        self,
        devices: Any,
        selector: AlgorithmSelector | None,
        mpi: MpiReducer | None = None,
    ) -> LargeBatchAllReduce:
        return LargeBatchAllReduce(
            devices=devices,
            group_size=len(devices) * self._num_workers,
            options=self._communication_options,
            collective_keys=self._collective_keys,
            journal=self.journal,
            global_devices=self._global_devices(devices),
            first_member=self._topology.rank * len(devices),
            selector=selector,
            mpi=mpi,
        )

    def _global_devices(self, devices: Any) -> list[str]:
        """The devices of all workers that answer to `devices` of this one, in rank order."""
        if self._topology.num_workers == 1:
            return list(devices)
        specs = [tf.DeviceSpec.from_string(device) for device in devices]
        return [
            spec.replace(job="worker", replica=0, task=rank, **_host_of(spec)).to_string()
            for rank in range(self._topology.num_workers)
            for spec in specs
        ]

    def _initialize_local_devices(
        self, cluster_resolver: Any, worker_device: str
    ) -> tuple[tuple[str, ...], str]:
        # The base class sees no GPU behind a resolver that is not the TF_CONFIG one.
        gpus = len(context().list_logical_devices("GPU"))
        kind, count = ("GPU", gpus) if gpus else ("CPU", self._cpu_replicas)
        return tuple(f"{worker_device}/device:{kind}:{index}" for index in range(count)), kind

    def _use_merge_call(self) -> bool:
        # In a graph each replica launches its own collectives. Leaving replica context for it, as
        # the base class does, fails within `tf.cond`, where Keras puts the update under gradient
        # accumulation and loss scaling. In eager mode replicas run one after the other, so that
        # one which waits for the next would wait for ever.
        return tf.executing_eagerly()

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        # `optimizer.iterations` takes the first replica's value on all replicas, for which
        # TensorFlow leaves replica context, and loss scaling advances it within a `tf.cond`. A
        # count advances alike on all of them, so each can count for itself.
        counts = kwargs.get("dtype") is not None and tf.as_dtype(kwargs["dtype"]).is_integer
        if counts and kwargs.get("aggregation") == tf.VariableAggregation.ONLY_FIRST_REPLICA:
            kwargs["aggregation"] = tf.VariableAggregation.NONE
        variable = super()._create_variable(next_creator, **kwargs)
        if self._num_workers > 1 and tf.executing_eagerly():
            if isinstance(variable, SyncOnReadVariable):
                self._sums_on_read += 1
                variable = SumOnReadVariable(
                    variable, self, num_workers=self._num_workers, number=self._sums_on_read
                )
            self.variables.add(variable)
        if is_seed_state(kwargs) and tf.executing_eagerly():
            first = self._topology.rank * len(self.worker_devices)
            self.variables.once_equal(partial(spread_seeds, variable, first_replica=first))
        return variable

    def progress(self) -> tuple[int, int]:
        """See `CollectiveJournal.progress`."""
        return self.journal.progress()

    def _get_variable_creator_initial_value(
        self, replica_id: int, device: str, primary_var: Any, **kwargs: Any
    ) -> Callable[[], Any]:
        """This worker's own value; `variables` makes it equal on all of them."""
        if replica_id != 0 or self._num_workers == 1:
            return super()._get_variable_creator_initial_value(  # type: ignore[no-any-return]
                replica_id, device, primary_var, **kwargs
            )

        def initial_value() -> tf.Tensor:
            value = kwargs["initial_value"]
            value = value() if callable(value) else value
            value = getattr(value, "wrapped_value", value)  # as a checkpoint hands it over
            with tf.device(device):
                value = tf.convert_to_tensor(value, dtype=kwargs.get("dtype"))
                return value if tf.executing_eagerly() else self._broadcast(value)

        return initial_value

    def gather(
        self, value: npt.NDArray[np.int64], *, purpose: str, detail: str = ""
    ) -> npt.NDArray[np.int64]:
        """`[n]` of every worker, of one length, as `[workers, n]`; see `gather_from_workers`."""
        gathered = self.gather_from_workers(
            tf.constant(value[None]), purpose=purpose, detail=detail
        )
        return gathered.numpy()  # type: ignore[no-any-return]

    def broadcast(self, value: npt.NDArray[np.int32], *, root: int = 0) -> npt.NDArray[np.int32]:
        """The `[n]` of the worker of rank `root`; others give anything of that shape."""
        with tf.device(self._worker_device):
            return self._broadcast(tf.constant(value), root).numpy()  # type: ignore[no-any-return]

    def _broadcast(self, value: tf.Tensor, root: int = 0) -> tf.Tensor:
        """The root's value, by a key that only workers with the same one here have."""
        self._broadcasts += 1
        record = f"broadcast {self._broadcasts} {value.dtype.name}{value.shape}"
        if tf.executing_eagerly():
            self.journal.arrive(record)
        digest = hashlib.sha256(record.encode()).digest()
        group = {
            "group_size": self._num_workers,
            "group_key": self._collective_keys.get_group_key([self._worker_device]),
            "instance_key": _FIRST_BROADCAST_KEY
            + int.from_bytes(digest[:4], "little") % _FIRST_BROADCAST_KEY,
        }
        if self._topology.rank != root:
            return broadcast_recv_v2(tf.shape(value), value.dtype, **group)
        sent = broadcast_send_v2(value, **group)
        with tf.control_dependencies([] if sent is None else [sent]):
            return tf.identity(value)

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        policy = dataset.options().experimental_distribute.auto_shard_policy
        policies = tf.data.experimental.AutoShardPolicy
        if policy in (policies.OFF, policies.FILE):  # what to read was decided by the caller
            stock = super()._experimental_distribute_dataset(dataset, options)
            local = stock._cloned_datasets[0]
            return self._replica_batches(local, options, identity_of(dataset))
        local = split_rows(
            dataset,
            worker=self._topology.rank,
            num_workers=self._num_workers,
            local_replicas=len(self.worker_devices),
        )
        return self._replica_batches(local, options, identity_of(dataset))

    def _distribute_datasets_from_function(self, dataset_fn: Any, options: Any) -> Any:
        local = dataset_fn(self._make_input_context())
        return self._replica_batches(local, options, identity_of(local))

    def _replica_batches(
        self, dataset: tf.data.Dataset, options: Any, identity: Any
    ) -> ReplicaBatchesDataset:
        steps = steps_of(dataset, local_replicas=len(self.worker_devices))
        by_rank = self.gather(  # [rank, (steps, fingerprint)]
            np.array([steps, fingerprint(identity)], np.int64), purpose="comparison of data sets"
        )
        if np.any(by_rank[:, 1] != by_rank[0, 1]):
            raise_mismatch(
                identity,
                self,
                purpose="comparison of data sets",
                head="Workers must read the same data in the same order",
            )
        agreed = bool(steps != UNKNOWN and np.all(by_rank[:, 0] == steps))
        return ReplicaBatchesDataset(
            input_workers=self._input_workers_with_options(options),
            strategy=self._container_strategy(),
            dataset=dataset,
            # Where workers differ, Keras must not stop one of them by its own count: all go on to
            # the step at which they find out.
            steps=steps if agreed else UNKNOWN,
            agreed=agreed,
            options=options,
        )

    def all_reduce_report(self) -> str:
        """What was chosen for the strategy's transport, and for calls that go by TensorFlow's."""
        first, *others = self._selectors
        used = [each for each in others if each.has_decided]
        return "\n".join(each.report() for each in (first, *used))

    def measure_costs(self) -> AllReduceCosts:
        """What an all-reduce costs between the workers; equal on all, which must all call it."""

        def prepare(candidate: Candidate, size_bytes: int) -> Callable[[], Any]:
            length = size_bytes // tf.float32.size
            plan = self.selector.plan_of(candidate, length=length, item_bytes=tf.float32.size)
            return self._cross_device_ops.trial(plan, length=length)

        def agree(seconds: Sequence[float]) -> list[float]:
            by_rank = self.gather_from_workers(
                tf.constant([seconds], tf.float64), purpose="costs of an all-reduce"
            )
            return np.max(by_rank.numpy(), axis=0).tolist()

        costs = measure_costs(
            prepare,
            agree=agree,
            num_workers=self._num_workers,
            replicas_per_worker=self.selector.replicas_per_worker,
        )
        return dataclasses.replace(costs, transport=self.selector.costs.transport)

    def gather_from_workers(self, value: tf.Tensor, *, purpose: str, detail: str = "") -> tf.Tensor:
        """`[n, ...]` of every worker, of one static shape, joined in rank order.

        Args:
            value: this worker's.
            purpose: the same on all workers, and only there where the same is exchanged; shown
                where they find that they run different programs.
            detail: shown as well, where it runs eagerly.
        """
        if self._num_workers == 1:
            return value
        return self._host_cross_device_ops.gather_equal_shapes(
            value, purpose=purpose, detail=detail
        )


def _host_of(spec: tf.DeviceSpec) -> dict[str, Any]:
    """A worker's name without a device means its CPU."""
    return {} if spec.device_type else {"device_type": "CPU", "device_index": 0}


def _cluster_of(topology: ClusterTopology) -> dict[str, list[str]]:
    """One job with a task a rank, however TF_CONFIG names them: the chief is task 0."""
    return {"worker": list(topology.addresses)} if topology.num_workers > 1 else {}
