"""TensorFlow's own strategy, as a reference."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class MendedStrategy(tf.distribute.MultiWorkerMirroredStrategy):
    """TensorFlow's strategy with what Keras 3 needs to train under it at all, and no more.

    Keras reduces nested structures, and scalars with `axis=0`; the stock `reduce` takes neither.
    """

    def reduce(self, reduce_op: Any, value: Any, axis: int | None) -> Any:
        def reduce_leaf(leaf: Any) -> Any:
            scalar = self.experimental_local_results(leaf)[0].shape.rank == 0
            return tf.distribute.Strategy.reduce(self, reduce_op, leaf, None if scalar else axis)

        return tf.nest.map_structure(reduce_leaf, value)
