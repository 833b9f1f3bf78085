"""Scaling rules, warmup and decay: one formula each, for numbers, NumPy arrays and tensors.

A step `t` is the number of optimizer updates already done, so `t = 0` is the first update. Every
formula takes a namespace `xp` with `where` and `minimum` (the modules `numpy` and `tensorflow`
both have them) and uses plain arithmetic otherwise. Steps stay integers until they are divided,
which NumPy and TensorFlow do in float64 for int64: exact up to 2**53 updates, where float32 ends
at 2**24. Rates given as tensors must be float64 for the same reason.
"""

from __future__ import annotations

import math
import operator
from typing import Any, Protocol

import numpy as np

from tf_largebatch.core.errors import ConfigurationError

MAX_COUNT = 2**53  # up to here, float64 holds every integer


class ArrayNamespace(Protocol):
    """What a formula needs from `numpy` or `tensorflow`."""

    @property
    def where(self) -> Any: ...

    @property
    def minimum(self) -> Any: ...


def require_count(name: str, value: Any, *, minimum: int = 1) -> int:
    """Returns `value` as a Python int.

    Raises:
        ConfigurationError: `value` is not an integer (a bool or a float is none), is smaller than
            `minimum`, or larger than `MAX_COUNT`.
    """
    try:
        # True would pass for 1, and is never meant as a count.
        count = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        count = None
    if count is None or count < minimum:
        raise ConfigurationError(f"{name}={value!r}: must be an integer, {minimum} or more.")
    if count > MAX_COUNT:
        raise ConfigurationError(f"{name}={value!r}: must be at most 2**53, to be counted exactly.")
    return count


def require_number(
    name: str, value: Any, *, minimum: float = 0.0, may_equal_minimum: bool = False
) -> float:
    """Returns `value` as a Python float.

    Raises:
        ConfigurationError: `value` is no number, is not finite, or is not above `minimum`
            (`may_equal_minimum`: not `minimum` or above).
    """
    is_number = isinstance(value, (int, float, np.integer, np.floating))
    try:
        number = float(value) if is_number and not isinstance(value, bool) else math.nan
    except OverflowError:  # of an int
        number = math.inf
    if not (number > minimum or (may_equal_minimum and number == minimum)) or math.isinf(number):
        rule = f"{minimum:g} or more" if may_equal_minimum else f"greater than {minimum:g}"
        raise ConfigurationError(f"{name}={value!r}: must be a finite number, {rule}.")
    return number


def linear_scaling_rule(
    base_learning_rate: float, *, global_batch_size: int, base_batch_size: int = 256
) -> float:
    """The linear scaling rule: `base_learning_rate * global_batch_size / base_batch_size`.

    Goyal et al. 2017, section 2.1: when the minibatch is k times larger, so is the rate. Made for
    SGD with momentum; everything else (weight decay, momentum, epochs) stays as it was.

    Args:
        base_learning_rate: the rate that is known to work at `base_batch_size`.
        global_batch_size: examples that one optimizer update averages over, all replicas and
            accumulated batches together.
        base_batch_size: the global batch of `base_learning_rate`; the paper's is 256 (8 GPUs of
            32), not the batch of one GPU.

    Returns:
        The scaled rate, a Python float.

    Raises:
        ConfigurationError: a rate or a size is not positive and finite, or a size is no integer.
    """
    return _scaled(base_learning_rate, _batch_ratio(global_batch_size, base_batch_size))


def sqrt_scaling_rule(
    base_learning_rate: float, *, global_batch_size: int, base_batch_size: int = 256
) -> float:
    """The square root rule: `base_learning_rate * sqrt(global_batch_size / base_batch_size)`.

    Krizhevsky 2014 (arXiv 1404.5997), section 5: keeps the variance of the update rather than its
    mean. Often preferred with adaptive optimizers. Arguments, return and errors as in
    `linear_scaling_rule`.
    """
    return _scaled(base_learning_rate, math.sqrt(_batch_ratio(global_batch_size, base_batch_size)))


def _scaled(base_learning_rate: float, factor: float) -> float:
    rate = require_number("base_learning_rate", base_learning_rate) * factor
    if rate == 0 or math.isinf(rate):
        raise ConfigurationError(
            f"base_learning_rate={base_learning_rate!r}: times {factor:g} must be a finite number, "
            f"greater than 0, and is {rate}."
        )
    return rate


def _batch_ratio(global_batch_size: int, base_batch_size: int) -> float:
    return require_count("global_batch_size", global_batch_size) / require_count(
        "base_batch_size", base_batch_size
    )


def epochs_to_steps(epochs: float, *, steps_per_epoch: int) -> int:
    """Whole optimizer updates nearest to `epochs * steps_per_epoch`; a half is rounded up."""
    return math.floor(epochs * steps_per_epoch + 0.5)


def gradual_warmup(
    step: Any,
    after_warmup: Any,
    *,
    warmup_steps: int,
    initial_learning_rate: Any,
    peak_learning_rate: Any,
    xp: ArrayNamespace,
) -> Any:
    """Gradual warmup (Goyal et al. 2017, section 2.2), at update `step` = t, `warmup_steps` = w.

        rate(t) = initial + (peak - initial) * t / w    for t < w
                = after_warmup                          for t >= w

    The rate grows by the same amount every update. The first update (t = 0) has the initial rate,
    update w is the first one at the peak. `w = 0` is no warmup.

    Args:
        step: integer, or int64 array or tensor of any shape.
        after_warmup: the rate at `step` once warmup is over; a scalar or of `step`'s shape.
        warmup_steps: w, a Python int of 0 or more.
        initial_learning_rate: the rate at t = 0.
        peak_learning_rate: where the line ends, at t = w.
        xp: `numpy` or `tensorflow`.

    Returns:
        The rate, float64, of `step`'s shape (`after_warmup` as it is when there is no warmup).
    """
    if warmup_steps == 0:
        return after_warmup
    # `minimum` keeps the unused branch finite for steps far beyond warmup.
    fraction = xp.minimum(step, warmup_steps) / warmup_steps
    line = initial_learning_rate + (peak_learning_rate - initial_learning_rate) * fraction
    return xp.where(step < warmup_steps, line, after_warmup)


def constant_warmup(
    step: Any,
    after_warmup: Any,
    *,
    warmup_steps: int,
    initial_learning_rate: Any,
    xp: ArrayNamespace,
) -> Any:
    """Constant warmup (Goyal et al. 2017, section 2.2), the comparison to the gradual one.

        rate(t) = initial         for t < w
                = after_warmup    for t >= w

    Arguments and return as in `gradual_warmup`.
    """
    return xp.where(step < warmup_steps, initial_learning_rate, after_warmup)


def step_decay(
    step: Any,
    learning_rate: Any,
    *,
    boundaries: tuple[int, ...],
    decay_factor: float,
    xp: ArrayNamespace,
) -> Any:
    """Step decay: `learning_rate * decay_factor ** n`, n the number of boundaries b with b <= t.

    Update b itself is the first one at the lower rate (Keras' `PiecewiseConstantDecay` still has
    the higher rate there).

    Args:
        step: integer, or int64 array or tensor of any shape.
        learning_rate: the rate at `step` without decay; a scalar or of `step`'s shape.
        boundaries: updates counted from the start of training, warmup included.
        decay_factor: what each boundary multiplies the rate by; the paper's is 0.1.
        xp: `numpy` or `tensorflow`.

    Returns:
        The rate, float64, of `step`'s shape (`learning_rate` as it is when there are no
        boundaries).
    """
    for boundary in boundaries:
        learning_rate = xp.where(step >= boundary, learning_rate * decay_factor, learning_rate)
    return learning_rate
