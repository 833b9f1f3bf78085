"""The recipe's learning rate for a model that was compiled with a float rate."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_largebatch.callbacks._running_fit import callbacks_in_use
from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.core.nested_differences import nested_differences
from tf_largebatch.core.recipe import Recipe, checked_recipe
from tf_largebatch.optimizers._loss_scale_optimizer import innermost

_INSTEAD = (
    "compile the model with recipe.learning_rate_schedule() and leave this callback out (with "
    "tf_largebatch.optimizers.MomentumSGD in place of Keras' SGD, whose momentum buffer nobody "
    "would correct then)"
)


class LearningRateWarmup(keras.callbacks.Callback):
    """Gives update t the rate `recipe.learning_rate_at(t)`: warmup, decay, the whole schedule.

    t is read from `optimizer.iterations` before every update, so `initial_epoch`, a second `fit`
    and a resumed run continue where the optimizer stands; the rate the model was compiled with is
    never used. The value applied, as the optimizer holds it, goes into the logs of batches and
    epochs as "learning_rate"; callbacks that write logs see it when they come later in the list.

    `keras.optimizers.SGD` keeps the rate inside its momentum buffer, `v = m * v - rate * g`. When
    the rate changes the buffer is multiplied, once, by new rate / old rate (momentum correction,
    Goyal et al. 2017, section 3, remark 2). `tf_largebatch.optimizers` keep the rate outside and
    need none. For any other optimizer a warning says that the linear scaling rule was not made for
    it, and its state is left alone.

    Args:
        recipe: the `Recipe` of the run.

    Raises:
        ConfigurationError: when made, if `recipe` is no `Recipe`. When training begins, if the
            optimizer has a schedule or accumulates over another number of batches than the recipe,
            if `steps_per_execution` is above 1, or if another callback that sets the rate is
            present. During training, if something else has changed the rate.
    """

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = checked_recipe(recipe)
        self._recipe_rate: float | None = None
        self._applied_rate: float | None = None
        self._scale_momentum: Callable[[Any], None] | None = None

    needs_every_worker = True

    def get_state(self) -> dict[str, Any]:
        """What `TrainingState` saves of it: the recipe, however its global batch is divided."""
        fields = self.recipe.to_dict()
        for name in ("per_replica_batch_size", "num_replicas", "accumulation_steps"):
            del fields[name]
        fields["decay_epochs"] = list(self.recipe.effective_decay_epochs)
        return {**fields, "global_batch_size": self.recipe.global_batch_size}

    def set_state(self, state: dict[str, Any]) -> None:
        """Refuses a state of another recipe than this one.

        Raises:
            ConfigurationError: it has other numbers; both sides are shown.
        """
        lines = [
            f"recipe{path}: {old} in the state, {new} here"
            for path, old, new in nested_differences(state, self.get_state())
        ]
        if lines:
            raise ConfigurationError("The state is of another recipe:\n  " + "\n  ".join(lines))

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Checks that this callback alone can set the rate, and that it can do so exactly."""
        optimizer = innermost(self.model.optimizer)
        _refuse_several_steps_per_call(self.model.steps_per_execution)
        _refuse_fixed_rate(optimizer)
        _refuse_other_accumulation(optimizer, self.recipe)
        # A loop of the user's own has no list; there a changed rate is found before each update.
        _refuse_other_rate_callbacks(self, callbacks_in_use())
        if not (_keeps_rate_in_momentum(optimizer) or _is_ours(optimizer)):
            warnings.warn(
                f"LearningRateWarmup with {type(optimizer).__name__}: the linear scaling rule and "
                "momentum correction are for SGD with momentum; with other optimizers the scaled "
                "rate may be far too high. No correction is made.",
                stacklevel=2,
            )
        self._recipe_rate = None
        self._applied_rate = None
        self._scale_momentum = None

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Sets the rate of the update to come, if it is not the one in force."""
        optimizer = innermost(self.model.optimizer)
        current = float(optimizer.learning_rate.numpy())
        # The first batch of a `fit` takes the optimizer as it stands: compiled, trained, restored.
        if self._applied_rate is not None and current != self._applied_rate:
            raise ConfigurationError(
                f"The learning rate is {current!r}, but LearningRateWarmup had set "
                f"{self._applied_rate!r}: something else sets it too (a callback such as "
                "ReduceLROnPlateau or LearningRateScheduler, or an assignment to "
                "optimizer.learning_rate). Keep one of the two."
            )
        step = int(tf.convert_to_tensor(optimizer.iterations))
        rate = self.recipe.learning_rate_at(step)
        if rate == self._recipe_rate:
            return
        optimizer.learning_rate = rate
        self._recipe_rate = rate
        # Read back, as the optimizer holds it in float32.
        self._applied_rate = float(optimizer.learning_rate.numpy())
        # Before the first update the buffer is empty; a rate of 0 has left nothing to rescale.
        if step > 0 and current not in (0.0, self._applied_rate):
            self._correct_momentum(optimizer, self._applied_rate / current)

    def _correct_momentum(self, optimizer: Any, ratio: float) -> None:
        slots = [slot for slot in getattr(optimizer, "momentums", ()) if slot is not None]
        if not slots or not _keeps_rate_in_momentum(optimizer):
            return
        if self._scale_momentum is None:
            self._scale_momentum = _make_scale(slots, self.model.distribute_strategy)
        self._scale_momentum(tf.constant(ratio, tf.float64))

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Logs the rate of the update just done."""
        if logs is not None and self._applied_rate is not None:
            logs["learning_rate"] = self._applied_rate

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Logs the rate of the epoch's last update."""
        self.on_train_batch_end(epoch, logs)


def _make_scale(slots: Sequence[Any], strategy: tf.distribute.Strategy) -> Callable[[Any], None]:
    """A function that multiplies every slot by a ratio: one graph call, as warmup needs it often.

    Each replica scales the copy it holds, by the same number, so nothing is communicated.
    """

    def multiply(slot: tf.Variable, ratio: tf.Tensor) -> tf.Operation:
        return slot.assign(slot * tf.cast(ratio, slot.dtype))

    @tf.function
    def scale(ratio: tf.Tensor) -> None:
        for slot in slots:
            strategy.extended.update(slot.value, multiply, args=(ratio,), group=False)

    return scale


def _keeps_rate_in_momentum(optimizer: Any) -> bool:
    """Whether updates are those of Keras' own SGD; a subclass may have changed them."""
    return getattr(type(optimizer), "update_step", None) is keras.optimizers.SGD.update_step


def _is_ours(optimizer: Any) -> bool:
    return keras.saving.get_registered_name(type(optimizer)).startswith("tf_largebatch>")


def _refuse_several_steps_per_call(steps_per_execution: int) -> None:
    if steps_per_execution > 1:
        raise ConfigurationError(
            f"steps_per_execution={steps_per_execution}: a callback runs once for that many "
            "updates, so LearningRateWarmup cannot give each its rate. Use steps_per_execution=1, "
            f"or {_INSTEAD}."
        )


def _refuse_fixed_rate(optimizer: Any) -> None:
    """The rate must be a variable of the optimizer, as it is for a float."""
    # An optimizer made of several has no rate of its own, and raises AttributeError.
    rate = getattr(optimizer, "learning_rate", None)
    if not any(rate is variable for variable in optimizer.variables):
        raise ConfigurationError(
            f"The {type(optimizer).__name__} was not built with a float learning rate (but with a "
            "schedule, a callable, or several optimizers), so LearningRateWarmup cannot set it. "
            f"Compile with a float rate, or {_INSTEAD}."
        )


def _refuse_other_accumulation(optimizer: Any, recipe: Recipe) -> None:
    accumulated = optimizer.gradient_accumulation_steps or 1
    if accumulated != recipe.accumulation_steps:
        raise ConfigurationError(
            f"The optimizer has gradient_accumulation_steps={accumulated}, the recipe "
            f"accumulation_steps={recipe.accumulation_steps}; they must be the same, or the "
            "global batch and its learning rate are wrong."
        )


def _refuse_other_rate_callbacks(mine: LearningRateWarmup, in_use: Sequence[Any]) -> None:
    setters = (
        keras.callbacks.LearningRateScheduler,
        keras.callbacks.ReduceLROnPlateau,
        LearningRateWarmup,
    )
    for other in in_use:
        if isinstance(other, setters) and other is not mine:
            raise ConfigurationError(
                f"LearningRateWarmup and {type(other).__name__} are both in callbacks and both set "
                "the learning rate. Keep one of the two; decay belongs into the recipe "
                "(decay_epochs, decay_factor)."
            )
