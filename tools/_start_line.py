"""Lets the workers of a benchmark start together."""

from __future__ import annotations

import time
from typing import Any

import tensorflow as tf

import tf_largebatch as tlb

_WARMUP = 3
_FACTOR = 1.25
_RESERVE_SECONDS = 0.002


class StartLine:
    """A moment at which to start, on which all workers agree, by the clock that they share.

    They leave a collective milliseconds apart, as long as a short all-reduce takes. So they use it
    to agree on a moment by which all will have left it: the mean of when they came, and the mean of
    how long the last one took them, with some reserve. One that leaves later starts at once.
    """

    def __init__(self, strategy: Any) -> None:
        self._workers = strategy.num_replicas_in_sync
        options = tlb.AllReduceOptions(algorithm="tensorflow")

        def sum_over_workers(value: tf.Tensor) -> tf.Tensor:
            return tf.distribute.get_replica_context().all_reduce("SUM", value, options=options)

        self._sum = tf.function(lambda value: strategy.run(sum_over_workers, args=(value,)))
        self._seconds = 0.0
        for _ in range(_WARMUP):
            self.wait()

    def wait(self, flag: bool = False) -> bool:
        """Whether any worker passed True."""
        came = time.monotonic()
        total = self._sum(tf.constant([float(flag), came, self._seconds], tf.float64))
        left = time.monotonic()
        self._seconds = left - came
        flags_mean, came_mean, seconds_mean = total.numpy() / self._workers
        start = came_mean + _FACTOR * seconds_mean + _RESERVE_SECONDS
        time.sleep(max(0.0, start - left))
        return bool(flags_mean > 0.0)
