"""Wishes of single workers that all workers learn of after the same training step.

A worker that is told to stop, or to save, cannot act alone: the others would wait for it in the
next step. The step's packed scalars carry one number more for each kind of wish, so that to agree
costs no collective.
"""

from __future__ import annotations

import tensorflow as tf

WISHES = ("save", "stop", "leave")


class AgreedFlags:
    """One flag for each of `WISHES`, of this worker and of all of them.

    Args:
        num_workers: with one worker nothing is sent.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._waiting: set[str] = set()
        # Plain variables on the host, made outside of any strategy scope.
        with tf.init_scope(), tf.device("CPU:0"):
            self._wished = tf.Variable(tf.zeros(len(WISHES)), trainable=False)
            self._agreed = tf.Variable(tf.zeros(len(WISHES)), trainable=False)

    def wish(self, name: str) -> None:
        """From the next training step on, which carries it to all workers."""
        self._waiting.add(name)
        self._write_wishes()

    def in_step(self) -> list[tf.Tensor]:
        """This worker's wishes, scalars to be summed over the replicas within a training step."""
        return tf.unstack(self._wished.read_value())

    def note_sum(self, sums: list[tf.Tensor]) -> None:
        """Keeps what came of `in_step`, which is equal on all workers."""
        # Added, as one call may make several steps.
        self._agreed.assign_add(tf.stack([tf.cast(each, tf.float32) for each in sums]))

    def take(self, name: str) -> bool:
        """Whether the wish has travelled since it was last taken: the same on all workers."""
        if self._num_workers == 1:
            taken = name in self._waiting
        else:
            place = WISHES.index(name)
            taken = bool(self._agreed.numpy()[place])
            if taken:
                self._agreed.scatter_update(tf.IndexedSlices([0.0], [place]))
        if taken:
            self._waiting.discard(name)
            self._write_wishes()
        return taken

    def withdraw(self, name: str) -> None:
        """Takes back a wish that has not travelled."""
        self._waiting.discard(name)
        self._write_wishes()

    def _write_wishes(self) -> None:
        self._wished.assign([float(name in self._waiting) for name in WISHES])
