"""Variables that each replica updates by itself, and that are summed when they are read: metrics.

TensorFlow sums them by a collective whenever one is read outside of replicas, and also reads each
one that is assigned, though all workers know what they have assigned. So resetting a metric is a
collective as well, and a worker that reads a metric alone, as a chief that prints one, is paired
with a reset on the others: it gets a wrong value, and everything after it is out of step.

Here an assignment is local; a sum is kept until something may have changed it on any worker, so
that what Keras has read at the end of an epoch can be read again by one worker alone; and each
variable's sum is a collective of its own, which pairs with no other.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tf_largebatch.distribute._tf_internals import SyncOnReadVariable

_DTYPES = (tf.float32, tf.float64, tf.int32, tf.int64)
# Of all workers together. What is larger is summed piece by piece, by an all-reduce.
_LARGEST_BYTES = 2**24


class Workers(Protocol):
    """What a sum asks of the cluster."""

    def gather_from_workers(self, value: tf.Tensor, *, purpose: str, detail: str) -> tf.Tensor: ...

    def progress(self) -> tuple[int, int]:
        """Changes with everything that may change variables on any worker."""
        ...


@dataclass(frozen=True)
class _Sum:
    """A sum that was read: when, from what of this worker, and what it is."""

    progress: tuple[int, int]
    local: npt.NDArray[Any]
    value: npt.NDArray[Any]


class SumOnReadVariable(SyncOnReadVariable):  # type: ignore[misc]
    """A variable of this worker's replicas, of which readers see the sum or mean over all replicas.

    Args:
        variable: TensorFlow's, whose components this one takes over.
        workers: how to reach the others.
        num_workers: how many there are.
        number: counts these variables up, alike on all workers.
    """

    def __init__(
        self, variable: SyncOnReadVariable, workers: Workers, *, num_workers: int, number: int
    ) -> None:
        super().__init__(
            variable._distribute_strategy,
            variable._values,
            variable._aggregation,
            var_policy=variable._policy,
        )
        self._workers = workers
        self._num_workers = num_workers
        self._number = number
        self._last_sum: _Sum | None = None

    def assign(
        self,
        value: Any,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        """As TensorFlow's, without a collective: all workers must assign the same value."""
        self._last_sum = None
        outside = tf.distribute.in_cross_replica_context() or not tf.distribute.has_strategy()
        if not read_value or not outside:
            return super().assign(value, use_locking, name, read_value)
        update = super().assign(value, use_locking, name, False)
        with tf.control_dependencies([] if update is None else [update]):
            return tf.identity(tf.convert_to_tensor(value, dtype=self.dtype))

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncOnReadVariable:
        """TensorFlow's own variable, as a copy need not be made alike on all workers."""
        copied = SyncOnReadVariable(
            self._distribute_strategy,
            copy.deepcopy(self._values, memo),
            self._aggregation,
            var_policy=copy.deepcopy(self._policy, memo),
        )
        memo[id(self)] = copied
        return copied

    def _get_cross_replica(self) -> Any:
        if not tf.executing_eagerly() or not self._can_be_gathered():
            return super()._get_cross_replica()
        return tf.constant(self._sum_over_workers())

    def _can_be_gathered(self) -> bool:
        aggregations = (tf.VariableAggregation.SUM, tf.VariableAggregation.MEAN)
        if self._aggregation not in aggregations or self.dtype not in _DTYPES:
            return False
        size = self.shape.num_elements()  # None where it may change
        return size is not None and size * self.dtype.size * self._num_workers <= _LARGEST_BYTES

    def _sum_over_workers(self) -> npt.NDArray[Any]:
        parts = np.stack([component.read_value().numpy() for component in self._values])
        progress, last = self._workers.progress(), self._last_sum
        # Equal parts without progress: a value that was set behind the strategy's back is seen.
        if last is not None and last.progress == progress and _same_bits(last.local, parts):
            return last.value
        gathered = self._workers.gather_from_workers(
            tf.constant(parts),
            purpose=f"sum of variable {self._number} over replicas",
            detail=f"reads {self.name}",
        ).numpy()  # [replica, ...]
        summed = np.add.reduce(gathered, axis=0)
        is_mean = self._aggregation == tf.VariableAggregation.MEAN
        value = np.asarray(summed / len(gathered) if is_mean else summed, dtype=parts.dtype)
        self._last_sum = _Sum(progress, parts, value)
        return value


def _same_bits(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> bool:
    return first.tobytes() == second.tobytes()
