"""What momentum SGD and LARS share: buffer, decay, exclusions, the order of clipping."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_largebatch.core.errors import ConfigurationError, ProgramOrderError
from tf_largebatch.optimizers._exclusion_report import exclusion_report
from tf_largebatch.optimizers._exclusions import Exclusions, path_of
from tf_largebatch.optimizers._gradient_squares import GradientSquares


class MomentumOptimizer(keras.optimizers.Optimizer):
    """Base of optimizers whose learning rate is outside the momentum buffer.

    At each update, for the step `s` of a variable `w`, its buffer `v` (zeros at first), rate `lr`:

        s = scale * (g + weight_decay * w)      scale is 1 here; a subclass says otherwise
        v = momentum * v + s
        w = w - lr * v                  or, with nesterov, w - lr * (s + momentum * v)

    Here `g` is the gradient summed over all replicas, made dense, divided by the loss scale,
    averaged over accumulated batches, and then clipped: k replicas make the update of one.

    Args and errors: see `MomentumSGD`.

    Attributes:
        gradient_squares: a `GradientSquares` to measure gradients with, from the next trace of a
            training step on; None, the default, measures nothing.
    """

    clips_summed_gradients = True  # what the strategy would warn of otherwise

    def __init__(
        self,
        learning_rate: Any,
        *,
        momentum: float,
        nesterov: bool,
        weight_decay: float,
        **keras_options: Any,
    ) -> None:
        check_range(momentum, "momentum", "0.9 is the paper's", high=1.0)
        check_range(weight_decay, "weight_decay", "1e-4 is the paper's, 0.0 is none")
        if nesterov and momentum == 0.0:
            raise ConfigurationError(
                f"nesterov={nesterov} with momentum={momentum} has no buffer to look ahead with; "
                "set momentum above 0, as 0.9, or nesterov=False."
            )
        super().__init__(learning_rate=learning_rate, **keras_options)
        self.momentum = float(momentum)
        self.nesterov = bool(nesterov)
        self.l2_weight_decay = float(weight_decay)
        self._exclusions = Exclusions()
        self.gradient_squares: GradientSquares | None = None

    def build(self, variables: Sequence[Any]) -> None:
        """Make the momentum buffers, one for each variable, and find what is excluded."""
        if self.built:
            return
        variables = list(variables)
        self._exclusions.resolve(variables, self._var_key)
        if self.l2_weight_decay:
            self._refuse_double_decay(variables)
        super().build(variables)
        self.momentums = (
            self.add_optimizer_variables(variables, "momentum") if self.momentum else []
        )

    def exclude(self, target: Any, *, layer_types: Any = None) -> None:
        """Leave variables out of weight decay, and out of layer-wise rates where there are any.

        Call it before the optimizer is built, and as often as you like. Variables of one dimension
        or none need no call. Those that may: embeddings, normalisation over several axes, biases
        of several dimensions as in attention. `exclusion_report()` shows what came of it.

        What is excluded is stored with the optimizer's configuration, by position, so that it
        survives saving, and other names of layers in the process that loads. What has been frozen
        since is not among the variables of the optimizer that is loaded, which warns of it.

        Args:
            target: a model, a layer, a variable, or a list of them. Layers must be built.
            layer_types: only of layers of this class, or of a list of classes, wherever they are
                nested in `target`; as `exclude(model, layer_types=keras.layers.Embedding)`.

        Raises:
            ConfigurationError: nothing there can be trained; when the optimizer is built, if a
                variable is not among those that it updates.
            ProgramOrderError: the optimizer is built.
        """
        self._refuse_if_built("exclude()")
        self._exclusions.add(target, layer_types)

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        """Keras' name for `exclude`: what it leaves out of decay has no layer-wise rate either.

        Args:
            var_list: variables or layers, as in `exclude`.
            var_names: regular expressions, each of which must be found in the path of a variable
                (`"block/dense/kernel"`) when the optimizer is built.

        Raises:
            ConfigurationError: as `exclude`; neither is given; when the optimizer is built, if an
                expression is found in no path.
            ProgramOrderError: the optimizer is built.
        """
        self._refuse_if_built("exclude_from_weight_decay()")
        if not var_list and not var_names:
            raise ConfigurationError(
                "exclude_from_weight_decay() is given neither var_list nor var_names; give one."
            )
        if var_list:
            self._exclusions.add(var_list)
        if var_names:
            self._exclusions.add_patterns(var_names)

    def exclusion_report(self) -> str:
        """Which variables decay (and have a layer-wise rate) and which do not, and why.

        Raises:
            ProgramOrderError: the optimizer is not built, and knows no variables.
        """
        if not self.built:
            raise ProgramOrderError(
                "exclusion_report() needs an optimizer that is built: train a step, or call "
                "optimizer.build(model.trainable_variables)."
            )
        return exclusion_report(
            self._trainable_variables, self._exclusions.reasons, treatment=self._treatment()
        )

    def is_excluded(self, variable: Any) -> bool:
        """Whether a variable neither decays nor has a layer-wise rate.

        Args:
            variable: one of those that the optimizer is built with.
        """
        position = self._get_variable_index(variable)
        return len(variable.shape) <= 1 or position in self._exclusions.reasons

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """One update of one variable.

        Args:
            gradient: a tensor; or a tuple of it and the step's `scale`, as `step_scales` has it.
            variable: one of those that the optimizer is built with.
            learning_rate: a scalar.
        """
        gradient, scale = gradient if isinstance(gradient, tuple) else (gradient, None)
        dtype = tf.as_dtype(variable.dtype)
        if self.momentum and dtype.size >= 4:
            self._update_in_place(gradient, scale, variable, learning_rate)
            return
        wide = tf.float32 if dtype.size == 2 else dtype
        weights = tf.cast(variable, wide)
        step = _scaled_sum(tf.cast(gradient, wide), scale, self._decay_of(variable), weights)
        if self.momentum:
            buffer = self.momentums[self._get_variable_index(variable)]
            new_buffer = self.momentum * tf.cast(buffer, wide) + step
            self.assign(buffer, new_buffer)
            step = step + self.momentum * new_buffer if self.nesterov else new_buffer
        rate = keras.ops.cast(learning_rate, wide.name)
        self.assign(variable, weights - rate * step)

    def _update_in_place(self, gradient: Any, scale: Any, variable: Any, rate: Any) -> None:
        """By TensorFlow's fused ops, which pass over memory once, without temporaries.

        They take half the time of single ops. There is none for bfloat16 on a GPU.
        """
        dtype = tf.as_dtype(variable.dtype)
        buffer = self.momentums[self._get_variable_index(variable)].value
        step = tf.cast(gradient, dtype)
        decay = self._decay_of(variable)
        weights = tf.convert_to_tensor(variable)
        if decay and not self.nesterov:
            # The buffer is about to be multiplied by momentum.
            share = decay / self.momentum
            tf.raw_ops.ResourceApplyGradientDescent(
                var=buffer.handle,
                alpha=tf.cast(-share if scale is None else -share * scale, dtype),
                delta=weights,
            )
            decay = 0.0
        step = _scaled_sum(step, scale, decay, weights)
        tf.raw_ops.ResourceApplyMomentum(
            var=variable.handle,
            accum=buffer.handle,
            lr=keras.ops.cast(rate, dtype.name),
            grad=step,
            momentum=tf.cast(self.momentum, dtype),
            use_nesterov=self.nesterov,
        )

    def step_scales(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """`scale` of each variable: a float32 or float64 scalar, or None for 1.

        Args:
            gradients: dense, summed over the replicas and clipped.
            variables: in the same order.
        """
        return [None for _ in variables]

    def _treatment(self) -> str:
        """What variables are that are not excluded; for the report."""
        return "decayed" if self.l2_weight_decay else "free to decay, though weight_decay is 0"

    def _clip_gradients(self, grads: Sequence[Any]) -> Sequence[Any]:
        # Keras calls it before the replicas' gradients are summed, when k of them would be clipped
        # to k times the bound.
        return grads

    def _backend_apply_gradients(self, grads: Sequence[Any], variables: Sequence[Any]) -> None:
        # The one place that sees each batch's gradients, where several make an update.
        if self.gradient_squares is not None:
            self.gradient_squares.add_batch(grads)
        super()._backend_apply_gradients(grads, variables)

    def _all_reduce_sum_gradients(self, grads_and_vars: Any) -> list[tuple[Any, Any]]:
        """Sums the replicas' gradients, as Keras does; then clips and adds the steps' scales.

        It is the one place that sees all gradients summed. Keras hands each item's first part to
        `update_step`, on each device.
        """
        local = list(grads_and_vars)
        squares = self.gradient_squares
        if squares is not None:  # travels with the gradients
            local.append((squares.take_local(), squares.local))
        summed = super()._all_reduce_sum_gradients(local)
        square = None if squares is None else summed.pop()[0]
        variables = [variable for _, variable in summed]
        dense = [tf.convert_to_tensor(gradient) for gradient, _ in summed]
        if squares is not None:
            squares.add_update(square, dense)
        gradients = super()._clip_gradients(dense)
        scales = self.step_scales(gradients, variables)
        return list(zip(zip(gradients, scales, strict=True), variables, strict=True))

    def _decay_of(self, variable: Any) -> float:
        return 0.0 if self.is_excluded(variable) else self.l2_weight_decay

    def _refuse_if_built(self, call: str) -> None:
        if self.built:
            raise ProgramOrderError(
                f"{call} comes too late: the optimizer is built with "
                f"{len(self._trainable_variables)} variables. Call it before the first step."
            )

    def _refuse_double_decay(self, variables: Sequence[Any]) -> None:
        twice = [
            path_of(variable)
            for position, variable in enumerate(variables)
            if len(variable.shape) > 1
            and position not in self._exclusions.reasons
            and _has_l2(getattr(variable, "regularizer", None))
        ]
        if twice:
            raise ConfigurationError(
                f"weight_decay of {type(self).__name__} would decay {len(twice)} variables for a "
                f"second time, as they carry an L2 regulariser (the first: {twice[0]}); drop the "
                "regularisers or the optimizer's weight_decay. A regulariser L2(x) equals "
                "weight_decay = 2 * x."
            )

    def get_config(self) -> dict[str, Any]:
        """Arguments that make an equal optimizer, and what is excluded."""
        return {
            **super().get_config(),
            "momentum": self.momentum,
            "nesterov": self.nesterov,
            "weight_decay": self.l2_weight_decay,
            "exclusions": self._exclusions.get_config(),
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any], custom_objects: Any = None) -> Any:
        """The optimizer that `get_config` describes."""
        arguments = dict(config)
        exclusions = arguments.pop("exclusions", None)
        optimizer = super().from_config(arguments, custom_objects=custom_objects)
        if exclusions is not None:
            optimizer._exclusions = Exclusions.from_config(exclusions)
        return optimizer


def check_range(
    value: Any, name: str, hint: str, *, high: float = math.inf, zero_is_allowed: bool = True
) -> None:
    """Raises ConfigurationError unless `0 <= value < high`, or `0 < value < high`."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not (is_number and 0.0 <= value < high and (value or zero_is_allowed)):
        bracket = "[" if zero_is_allowed else "("
        raise ConfigurationError(
            f"{name}={value!r} is not a number in {bracket}0, {high:g}); {hint}."
        )


def _scaled_sum(gradient: tf.Tensor, scale: Any, decay: float, weights: Any) -> tf.Tensor:
    """`scale * (gradient + decay * weights)`, without what does nothing."""
    step = gradient + decay * weights if decay else gradient
    return step if scale is None else tf.cast(scale, step.dtype) * step


def _has_l2(regularizer: Any) -> bool:
    is_l2 = isinstance(regularizer, keras.regularizers.L2 | keras.regularizers.L1L2)
    return is_l2 and float(regularizer.l2) != 0.0
