"""What Keras' training, test and prediction steps need when several workers run them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.distribute._agreed_flags import AgreedFlags

TRAIN, TEST, PREDICT = "train_step", "test_step", "predict_step"


def keras_step_kind(fn: Callable[..., Any]) -> str | None:
    """Which of Keras' steps `fn` is, as handed to `strategy.run`; None for anybody else's."""
    name = getattr(fn, "__name__", "")
    if isinstance(getattr(fn, "__self__", None), keras.Model) and name in (TRAIN, TEST, PREDICT):
        return name
    # `predict` wraps the model's step in a function of its own.
    return PREDICT if getattr(fn, "__module__", "").startswith("keras.") else None


class AveragedScalars:
    """Averages the scalar floats that a step returns over all replicas, in one collective.

    Keras reduces a step's logs afterwards, one scalar and one collective at a time. Here they are
    packed, summed and unpacked in replica context, and `averaged` remembers which leaves of the
    output need no further reduction, since they are equal on every replica.

    Args:
        step: what is wrapped.
        flags: what the workers wish for travels along; None where nobody asks for it.
    """

    def __init__(self, step: Callable[..., Any], flags: AgreedFlags | None = None) -> None:
        self._step = step
        self._flags = flags
        self.averaged: list[bool] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self._step(*args, **kwargs)
        leaves = tf.nest.flatten(outputs)
        self.averaged = [_is_float_scalar(leaf) for leaf in leaves]
        scalars = [leaf for leaf, chosen in zip(leaves, self.averaged, strict=True) if chosen]
        wishes = self._flags.in_step() if self._flags else []
        if not scalars and not wishes:
            return outputs
        widest = tf.float64 if any(leaf.dtype == tf.float64 for leaf in scalars) else tf.float32
        packed = tf.stack([tf.cast(leaf, widest) for leaf in [*scalars, *wishes]])
        averages = tf.unstack(tf.distribute.get_replica_context().all_reduce("MEAN", packed))
        if self._flags:
            self._flags.note_sum(averages[len(scalars) :])
        means = iter(averages)
        return tf.nest.pack_sequence_as(
            outputs,
            [
                tf.cast(next(means), leaf.dtype) if chosen else leaf
                for leaf, chosen in zip(leaves, self.averaged, strict=True)
            ],
        )


def _is_float_scalar(leaf: Any) -> bool:
    return tf.is_tensor(leaf) and leaf.shape.rank == 0 and leaf.dtype.is_floating


def skip_without_rows(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The test or prediction step `step(batch)`, left out where the batch has no rows.

    An evaluation over fewer rows than replicas leaves some replicas without any, and the mean
    loss of no rows is not a number. A step without collectives can be left out on one worker
    alone: its outputs are then zeros, with no rows, and the metrics' variables stay as they are.
    """

    def guarded(batch: Any) -> Any:
        rows = leading_rows(batch)
        if isinstance(rows, int) and rows > 0:
            return step(batch)
        if tf.executing_eagerly():
            if int(rows) > 0:
                return step(batch)
            raise ConfigurationError(
                "A replica got no rows, as the batch has fewer than there are replicas; with "
                "run_eagerly=True such a step cannot be left out. Use run_eagerly=False."
            )
        outputs: list[Any] = []

        def with_rows() -> Any:
            outputs.append(step(batch))
            return outputs[0]

        def without_rows() -> Any:  # traced second, so that the shapes are known
            return tf.nest.map_structure(_no_rows_like, outputs[0])

        return tf.cond(tf.convert_to_tensor(rows) > 0, with_rows, without_rows)

    return guarded


def refuse_without_rows(step: Callable[[Any], Any], *, replicas: int) -> Callable[[Any], Any]:
    """The training step `step(batch)`, which fails where the batch has no rows."""

    def guarded(batch: Any) -> Any:
        rows = leading_rows(batch)
        if isinstance(rows, int) and rows > 0:
            return step(batch)
        check = tf.debugging.assert_positive(
            rows,
            f"A training batch has fewer rows than there are replicas ({replicas}), so that a "
            "replica has none to train on. Use GlobalShuffleSharder, or "
            "dataset.batch(global_batch_size, drop_remainder=True).",
        )
        with tf.control_dependencies([] if check is None else [check]):
            return step(
                tf.nest.map_structure(
                    lambda leaf: None if leaf is None else tf.identity(leaf), batch
                )
            )

    return guarded


def check_optimizer(model: Any) -> None:
    """Refuses stock loss scaling, and warns of gradient clipping: each replica acts alone.

    A replica with a non-finite gradient would skip, and the others wait for it for ever, or go on
    with another loss scale (keras 21366). Keras clips each replica's gradient, which is already
    divided by the number of replicas, before they are summed; optimizers of this package clip the
    sum.
    """
    optimizer = getattr(model, "optimizer", None)
    stock = keras.optimizers.LossScaleOptimizer
    if isinstance(optimizer, stock) and type(optimizer).check_finite is stock.check_finite:
        raise ConfigurationError(
            "The model is compiled with Keras' LossScaleOptimizer (the mixed_float16 policy adds "
            "it), which lets every replica decide alone whether to skip an update. Compile with "
            "optimizer=tf_largebatch.optimizers.LossScaleOptimizer(your_optimizer), whose replicas "
            "decide together, or use the mixed_bfloat16 policy, which needs no loss scaling."
        )
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if getattr(inner, "clips_summed_gradients", False):
        return
    for name in ("clipnorm", "global_clipnorm", "clipvalue"):
        if getattr(inner, name, None) is not None:
            warnings.warn(
                f"{type(inner).__name__}({name}={getattr(inner, name)!r}): Keras clips each "
                "replica's gradient before they are summed, so that the bound grows with the "
                "number of replicas, and training differs from one replica's with the same "
                "global batch.",
                stacklevel=2,
            )


def leading_rows(batch: Any) -> Any:
    """The number of rows: an int where it is static, else a scalar tensor."""
    for leaf in tf.nest.flatten(batch):
        if isinstance(leaf, tf.SparseTensor):
            return leaf.dense_shape[0]
        if isinstance(leaf, tf.RaggedTensor):
            return leaf.nrows()
        if tf.is_tensor(leaf) and leaf.shape.rank:
            return tf.shape(leaf)[0] if leaf.shape[0] is None else int(leaf.shape[0])
    return 1  # nothing with rows: the step's own business


def _no_rows_like(leaf: Any) -> tf.Tensor:
    shape = [0 if size is None else size for size in leaf.shape.as_list()]
    return tf.zeros(shape, leaf.dtype)
