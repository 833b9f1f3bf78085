"""Cross-entropy with label smoothing for integer labels."""

from __future__ import annotations

import inspect
import numbers
from types import FrameType
from typing import Any

import keras

from tf_largebatch.core.errors import ConfigurationError

_HALF_DTYPES = ("float16", "bfloat16")


@keras.saving.register_keras_serializable(package="tf_largebatch")
class SparseCategoricalCrossentropy(keras.losses.Loss):
    """Cross-entropy of integer labels, smoothed, without making one-hot rows.

    With `K` classes, label `y`, predicted probabilities `p` and smoothing `s`, an example's loss is

        (1 - s) * (-log p[y]) + s * mean_k(-log p[k])

    which is the cross-entropy against `(1 - s) * one_hot(y) + s / K` (Szegedy et al. 2016,
    arXiv 1512.00567, section 7): that of `keras.losses.CategoricalCrossentropy` with
    `label_smoothing=s` on one-hot labels. With `s = 0` it is
    `keras.losses.SparseCategoricalCrossentropy`.

    Validation is not smoothed: called from a model's `test_step`, as in `evaluate` and for
    `val_loss`, `s` is 0, so that losses of runs with different smoothings compare (keras 23487).
    Smoothed is what `fit` minimises and shows as `loss`, and what a direct call returns. A loop
    of the user's own decides by itself: outside of `test_step` it gets the smoothed loss, and
    `label_smoothing=0.0` makes the other one. So does a `tf.function` of the user's own that is
    called from both steps, as it keeps what it was first traced for.

    Args:
        from_logits: Whether predictions are logits (the more exact choice) or probabilities. The
            latter are clipped to `[epsilon, 1 - epsilon]`, with `keras.config.epsilon()`, and
            scaled to sum to one.
        label_smoothing: `s`, in [0, 1).
        reduction: As for every Keras loss.
        name: Name of the loss.
        dtype: Of the computation, float32 or float64; predictions in float16 or bfloat16 are cast
            to it first. None is `keras.config.floatx()`, or float32 where that is shorter.

    Shapes: labels `[...]` or `[..., 1]`, predictions `[..., K]`; before reduction the loss is
    `[...]`. Labels lie in `[0, K)`.

    Raises:
        ConfigurationError: for a smoothing outside [0, 1) or a dtype shorter than float32.
    """

    def __init__(
        self,
        from_logits: bool = False,
        *,
        label_smoothing: float = 0.0,
        reduction: str | None = "sum_over_batch_size",
        name: str = "sparse_categorical_crossentropy",
        dtype: Any = None,
    ) -> None:
        if dtype is None and keras.config.floatx() in _HALF_DTYPES:
            dtype = "float32"
        super().__init__(name=name, reduction=reduction, dtype=dtype)
        if self.dtype in _HALF_DTYPES:
            raise ConfigurationError(
                f"dtype={self.dtype!r} is too short for a loss, which would round labels as well "
                "(float16 has no 2049); use 'float32', the predictions may stay as they are."
            )
        if not isinstance(from_logits, bool):
            raise ConfigurationError(
                f"from_logits={from_logits!r} is not a bool; a smoothing goes to label_smoothing."
            )
        self.from_logits = from_logits
        self.label_smoothing = _checked_smoothing(label_smoothing)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Loss of each example, `[...]`."""
        logits = y_pred if self.from_logits else _log_of_clipped(y_pred)
        loss = keras.ops.sparse_categorical_crossentropy(y_true, logits, from_logits=True)
        if self.label_smoothing == 0.0 or _is_evaluating():
            return loss
        uniform = -keras.ops.mean(keras.ops.log_softmax(logits, axis=-1), axis=-1)
        return (1.0 - self.label_smoothing) * loss + self.label_smoothing * uniform

    def get_config(self) -> dict[str, Any]:
        """Arguments that make an equal loss."""
        return {
            **super().get_config(),
            "from_logits": self.from_logits,
            "label_smoothing": self.label_smoothing,
            "dtype": self.dtype,
        }


def _is_evaluating() -> bool:
    """Whether a model's `test_step` is calling, rather than its `train_step` or anybody else.

    Keras tells `compute_loss` whether it trains, but not the compiled loss. Which of a model's two
    public methods is running stands on the stack: for a graph, while it is traced.
    """
    frame = inspect.currentframe()
    while frame is not None:
        method = frame.f_code.co_name.removeprefix("tf__")  # AutoGraph's name for what it converted
        if method in ("test_step", "train_step") and isinstance(_owner_of(frame), keras.Model):
            return method == "test_step"
        frame = frame.f_back
    return False


def _owner_of(frame: FrameType) -> Any:
    """The first argument of a method, whatever it is called."""
    arguments = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    return frame.f_locals.get(arguments[0]) if arguments else None


def _log_of_clipped(probabilities: Any) -> Any:
    """Logits with these probabilities: softmax(log p) = p / sum(p)."""
    epsilon = keras.config.epsilon()
    return keras.ops.log(keras.ops.clip(probabilities, epsilon, 1.0 - epsilon))


def _checked_smoothing(value: Any) -> float:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if is_number and 0.0 <= value < 1.0:
        return float(value)
    raise ConfigurationError(
        f"label_smoothing={value!r} is not a number in [0, 1); 0.0 smooths nothing, 0.1 is usual."
    )
