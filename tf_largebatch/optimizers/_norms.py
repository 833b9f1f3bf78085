"""The Euclidean norms of many tensors at once."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

# Below it, squares of single elements may have been lost to underflow: those of 10^7 elements add
# up to less than 1e-6 of it.
_LEAST_EXACT_SQUARE = 1e-24


def joint_norms(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """`sqrt(sum(x ** 2))` of each tensor, without overflow or underflow; `[len(tensors)]`.

    One pass over each tensor, which makes nothing of its size, and a handful of ops on all sums
    together. Only where one of the sums is beyond what float32 squares hold are all tensors divided
    by their largest element first. Tensors of zeros are such a case, as they look like underflow.

    Args:
        tensors: float tensors; float16 and bfloat16 are summed in float32.

    Returns:
        float32; float64 where one of the tensors is.
    """
    wide = [_at_least_float32(x) for x in tensors]
    squares = _square_sums(wide)
    exact = tf.reduce_all((squares > _LEAST_EXACT_SQUARE) & tf.math.is_finite(squares))
    return tf.cond(exact, lambda: tf.sqrt(squares), lambda: _scaled_norms(wide))


def joint_square(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """`sum(x ** 2)` over all elements of all tensors; a float32 scalar, which may overflow."""
    return tf.cast(tf.reduce_sum(_square_sums([_at_least_float32(x) for x in tensors])), tf.float32)


def _at_least_float32(tensor: tf.Tensor) -> tf.Tensor:
    return tf.cast(tensor, tf.float32) if tensor.dtype.size == 2 else tensor


def _square_sums(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    # `l2_loss` is half of the sum, and the one op that squares and sums in the same pass.
    widest = tf.float64 if any(x.dtype == tf.float64 for x in tensors) else tf.float32
    return 2 * tf.stack([tf.cast(tf.nn.l2_loss(x), widest) for x in tensors])


# Inlined, all of its ops would be walked through at each step, to find that none is to run.
@tf.function(autograph=False, experimental_attributes={"_noinline": True})
def _scaled_norms(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    largest = [tf.reduce_max(tf.abs(x)) for x in tensors]
    scaled = [
        x / tf.where(top > 0, top, tf.ones_like(top))
        for x, top in zip(tensors, largest, strict=True)
    ]
    roots = tf.sqrt(_square_sums(scaled))
    return roots * tf.stack([tf.cast(top, roots.dtype) for top in largest])
