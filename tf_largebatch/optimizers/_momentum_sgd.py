"""SGD with the learning rate outside the momentum buffer, and weight decay as L2."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any, NoReturn

import keras
import tensorflow as tf

from tf_largebatch.core.errors import ConfigurationError


@keras.saving.register_keras_serializable(package="tf_largebatch")
class MomentumSGD(keras.optimizers.Optimizer):
    """Momentum SGD that needs no momentum correction when the learning rate changes.

    At each update, for gradient `g`, weights `w`, buffer `v` (zeros at first) and rate `lr`:

        g = g + weight_decay * w        (only where w has two or more dimensions)
        v = momentum * v + g
        w = w - lr * v                  or, with nesterov, w - lr * (g + momentum * v)

    `keras.optimizers.SGD` keeps `lr * g` in its buffer, so after a change of rate the old one goes
    on acting for some `1 / (1 - momentum)` steps (Goyal et al. 2017, section 3, momentum
    correction). At a constant rate the two are the same.

    The decay is L2, part of the gradient, as in the paper (section 3, weight decay); Keras' own
    `weight_decay` subtracts `lr * weight_decay * w` from the weights beside the momentum.
    Variables of one dimension or none (biases, gamma and beta of batch norm) are not decayed
    (section 5.1). Decay follows clipping, and with `gradient_accumulation_steps` comes once an
    update. Sparse gradients, as of an embedding, are made dense: a row that was not looked up
    still decays and moves by its momentum, as it would with a dense gradient.

    Args:
        learning_rate: A float, or a schedule over updates.
        momentum: In [0, 1); with 0 there is no buffer.
        nesterov: Whether to look ahead; needs a momentum above 0.
        weight_decay: `lambda` of `lambda / 2 * sum(w ** 2)`, 0 or more; the paper's is 1e-4. It is
            kept as `l2_weight_decay`; the inherited attribute `weight_decay` stays None.
        **keras_options: `clipnorm`, `clipvalue`, `global_clipnorm`, `use_ema`, `ema_momentum`,
            `ema_overwrite_frequency`, `loss_scale_factor`, `gradient_accumulation_steps` and `name`
            of `keras.optimizers.Optimizer`.

    Raises:
        ConfigurationError: for a value out of range; when built, if a variable that is decayed here
            carries an L2 regulariser as well.
    """

    def __init__(
        self,
        learning_rate: Any,
        *,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        **keras_options: Any,
    ) -> None:
        _check_range(momentum, "momentum", 1.0, "0.9 is the paper's")
        _check_range(weight_decay, "weight_decay", math.inf, "1e-4 is the paper's, 0.0 is none")
        if nesterov and momentum == 0.0:
            raise ConfigurationError(
                f"nesterov={nesterov} with momentum={momentum} has no buffer to look ahead with; "
                "set momentum above 0, as 0.9, or nesterov=False."
            )
        super().__init__(learning_rate=learning_rate, **keras_options)
        self.momentum = float(momentum)
        self.nesterov = bool(nesterov)
        self.l2_weight_decay = float(weight_decay)

    def build(self, variables: Sequence[Any]) -> None:
        """Make the momentum buffers, one for each variable."""
        if self.built:
            return
        if self.l2_weight_decay:
            _refuse_double_decay(variables)
        super().build(variables)
        self.momentums = []
        if self.momentum:
            # Not `add_optimizer_variables`, which Keras has from 3.10 on only.
            self.momentums = [
                self.add_variable_from_reference(variable, name="momentum")
                for variable in variables
            ]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """One update of one variable."""
        dtype = variable.dtype
        step = tf.cast(tf.convert_to_tensor(gradient), dtype)
        if self.l2_weight_decay and _is_decayed(variable):
            decay = keras.ops.cast(self.l2_weight_decay, dtype)
            step = keras.ops.add(step, keras.ops.multiply(variable, decay))
        if self.momentum:
            momentum = keras.ops.cast(self.momentum, dtype)
            buffer = self.momentums[self._get_variable_index(variable)]
            new_buffer = keras.ops.add(keras.ops.multiply(buffer, momentum), step)
            self.assign(buffer, new_buffer)
            if self.nesterov:
                step = keras.ops.add(step, keras.ops.multiply(new_buffer, momentum))
            else:
                step = new_buffer
        rate = keras.ops.cast(learning_rate, dtype)
        self.assign_sub(variable, keras.ops.multiply(step, rate))

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> NoReturn:
        """Refused: which variables decay is decided by their number of dimensions alone."""
        raise ConfigurationError(
            f"exclude_from_weight_decay(var_list={var_list!r}, var_names={var_names!r}) is not "
            "taken: MomentumSGD decays every variable of two or more dimensions and no other. For "
            "a choice of your own, set weight_decay=0.0 and give keras.regularizers.L2(x / 2) to "
            "layers, x being the decay."
        )

    def get_config(self) -> dict[str, Any]:
        """Arguments that make an equal optimizer."""
        return {
            **super().get_config(),
            "momentum": self.momentum,
            "nesterov": self.nesterov,
            "weight_decay": self.l2_weight_decay,
        }


def _is_decayed(variable: Any) -> bool:
    return len(variable.shape) > 1


def _refuse_double_decay(variables: Sequence[Any]) -> None:
    twice = [
        variable.path
        for variable in variables
        if _is_decayed(variable) and _has_l2(getattr(variable, "regularizer", None))
    ]
    if twice:
        raise ConfigurationError(
            f"weight_decay of MomentumSGD would decay {len(twice)} variables for a second time, as "
            f"they carry an L2 regulariser (the first: {twice[0]}); drop the regularisers or the "
            "optimizer's weight_decay. A regulariser L2(x) equals weight_decay = 2 * x."
        )


def _has_l2(regularizer: Any) -> bool:
    is_l2 = isinstance(regularizer, keras.regularizers.L2 | keras.regularizers.L1L2)
    return is_l2 and float(regularizer.l2) != 0.0


def _check_range(value: Any, name: str, high: float, hint: str) -> None:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not (is_number and 0.0 <= value < high):
        raise ConfigurationError(f"{name}={value!r} is not a number in [0, {high:g}); {hint}.")
