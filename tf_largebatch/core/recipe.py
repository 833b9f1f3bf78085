"""The recipe of a run: batch, learning rate, warmup and decay, checked and computed once."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tf_largebatch.core.batch_norm import batch_norm_momentum_advice
from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.core.recipe_text import batch_formula, description
from tf_largebatch.core.scaling import (
    MAX_COUNT,
    constant_warmup,
    epochs_to_steps,
    gradual_warmup,
    linear_scaling_rule,
    require_count,
    require_number,
    step_decay,
)

WARMUPS = ("gradual", "constant", "none")


def checked_recipe(recipe: object) -> Recipe:
    """`recipe`; raises ConfigurationError if it is none."""
    if not isinstance(recipe, Recipe):
        raise ConfigurationError(f"recipe={recipe!r}: must be a tf_largebatch.Recipe.")
    return recipe


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Large-minibatch SGD after Goyal et al. 2017: linear scaling, warmup, step decay.

    With n = `per_replica_batch_size`, k = `num_replicas` and a = `accumulation_steps`, one
    optimizer update averages over n * k * a examples. At update t (t = 0 is the first one) the
    rate is

        rate(t) = warmup(t) * decay_factor ** (number of decay boundaries b with b <= t)

        warmup(t) = initial + (peak - initial) * t / w    for t < w, "gradual"
                  = initial                               for t < w, "constant"
                  = peak                                  for t >= w, and always for "none"

    where peak = `base_learning_rate * n * k * a / base_batch_size`, initial =
    min(`base_learning_rate`, peak) (warmup never starts above its end, so a batch smaller than the
    reference has no ramp), w = `warmup_steps`. Warmup and decay are given in epochs, counted from
    the start of training, and become whole updates by rounding to the nearest, halves up. Warmup
    may be longer than training or reach past a decay; the formula holds as it is. All splits of
    one global batch into n, k and a have the same rates.

    Attributes:
        num_examples: examples in the training set.
        per_replica_batch_size: n, examples that one replica (one device) takes at once.
        num_replicas: k, devices over all workers.
        base_learning_rate: the rate known to work at `base_batch_size`; the paper's is 0.1.
        epochs: passes over the training set; the paper's is 90.
        base_batch_size: the global batch of `base_learning_rate`; the paper's is 256.
        warmup: "gradual", "constant" or "none".
        warmup_epochs: length of the warmup, may be fractional; not used for "none".
        decay_epochs: increasing, each above 0 and below `epochs`; () never decays. None (the
            default) is 1/3, 2/3 and 8/9 of `epochs`, the paper's 30, 60 and 80 of 90.
        decay_factor: what each decay multiplies the rate by, above 0 and below 1.
        accumulation_steps: a, batches whose gradients are averaged into one update.

    Raises:
        ConfigurationError: a value breaks its rule, there are fewer examples than one global
            batch, more than 2**53 updates, or the peak is not finite.
    """

    num_examples: int
    per_replica_batch_size: int
    num_replicas: int
    base_learning_rate: float
    epochs: int
    base_batch_size: int = 256
    warmup: str = "gradual"
    warmup_epochs: float = 5.0
    decay_epochs: tuple[float, ...] | None = None
    decay_factor: float = 0.1
    accumulation_steps: int = 1

    def __post_init__(self) -> None:
        for name in (
            "num_examples",
            "per_replica_batch_size",
            "num_replicas",
            "epochs",
            "base_batch_size",
            "accumulation_steps",
        ):
            self._set(name, require_count(name, getattr(self, name)))
        self._set(
            "base_learning_rate", require_number("base_learning_rate", self.base_learning_rate)
        )
        if self.warmup not in WARMUPS:
            raise ConfigurationError(f"warmup={self.warmup!r}: must be one of {WARMUPS}.")
        self._set(
            "warmup_epochs",
            require_number("warmup_epochs", self.warmup_epochs, may_equal_minimum=True),
        )
        self._set("decay_factor", require_number("decay_factor", self.decay_factor))
        if self.decay_factor >= 1:
            raise ConfigurationError(
                f"decay_factor={self.decay_factor!r}: must be below 1; decay_epochs=() turns decay "
                "off."
            )
        if self.decay_epochs is not None:
            self._set("decay_epochs", self._checked_decay_epochs())
        if self.num_examples < self.global_batch_size:
            raise ConfigurationError(self._batch_too_large_message())
        self._refuse_too_many_updates()
        require_number("peak_learning_rate", self.peak_learning_rate)

    def _set(self, name: str, value: Any) -> None:
        # The one way to write a field of a frozen dataclass, used while it is being made only.
        object.__setattr__(self, name, value)

    def _checked_decay_epochs(self) -> tuple[float, ...]:
        given = self.decay_epochs
        if not isinstance(given, (tuple, list)):
            raise ConfigurationError(
                f"decay_epochs={given!r}: must be a sequence of epochs, as (30, 60, 80), or None."
            )
        epochs = tuple(require_number("decay_epochs", epoch) for epoch in given)
        increasing = all(first < second for first, second in itertools.pairwise(epochs))
        if not increasing or any(epoch >= self.epochs for epoch in epochs):
            raise ConfigurationError(
                f"decay_epochs={given!r}: must increase and lie below epochs={self.epochs}."
            )
        return epochs

    def _refuse_too_many_updates(self) -> None:
        names = ("epochs",) if self.warmup == "none" else ("epochs", "warmup_epochs")
        for name in names:
            epochs = getattr(self, name)
            if epochs * self.steps_per_epoch > MAX_COUNT:
                raise ConfigurationError(
                    f"{name}={epochs!r}: at {self.steps_per_epoch} updates an epoch must be at "
                    "most 2**53 updates, to be counted exactly."
                )

    def _batch_too_large_message(self) -> str:
        replicas = self.num_examples // (self.per_replica_batch_size * self.accumulation_steps)
        per_replica = self.num_examples // (self.num_replicas * self.accumulation_steps)
        ways = [
            f"{name}={largest}"
            for name, largest in (
                ("num_replicas", replicas),
                ("per_replica_batch_size", per_replica),
            )
            if largest
        ]
        advice = f" Use at most {' or '.join(ways)}." if ways else ""
        return (
            f"num_examples={self.num_examples} is less than one global batch of "
            f"{batch_formula(self)}, so an epoch would have no update.{advice}"
        )

    @property
    def global_batch_size(self) -> int:
        """Examples of one optimizer update: n * k * a."""
        return self.per_replica_batch_size * self.num_replicas * self.accumulation_steps

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer updates an epoch: whole global batches in `num_examples`, the rest dropped."""
        return self.num_examples // self.global_batch_size

    @property
    def total_steps(self) -> int:
        """Optimizer updates in all `epochs`."""
        return self.epochs * self.steps_per_epoch

    @property
    def warmup_steps(self) -> int:
        """w: update w is the first one at the peak; 0 for `warmup="none"`."""
        if self.warmup == "none":
            return 0
        return epochs_to_steps(self.warmup_epochs, steps_per_epoch=self.steps_per_epoch)

    @property
    def decay_steps(self) -> tuple[int, ...]:
        """The decay boundaries: each is the first update at its lower rate."""
        return tuple(
            epochs_to_steps(epoch, steps_per_epoch=self.steps_per_epoch)
            for epoch in self.effective_decay_epochs
        )

    @property
    def effective_decay_epochs(self) -> tuple[float, ...]:
        """`decay_epochs`, or its default."""
        if self.decay_epochs is not None:
            return self.decay_epochs
        # Multiplied before divided, so that 90 gives exactly 30, 60 and 80.
        return (self.epochs / 3, self.epochs * 2 / 3, self.epochs * 8 / 9)

    @property
    def peak_learning_rate(self) -> float:
        """The rate after warmup and before any decay, from `linear_scaling_rule`."""
        return linear_scaling_rule(
            self.base_learning_rate,
            global_batch_size=self.global_batch_size,
            base_batch_size=self.base_batch_size,
        )

    @property
    def initial_learning_rate(self) -> float:
        """Where warmup starts: `base_learning_rate`, or the peak if that is lower."""
        return min(self.base_learning_rate, self.peak_learning_rate)

    @property
    def batch_norm_momentum(self) -> float:
        """For batch norm's moving averages: `batch_norm_momentum_advice` of the last phase.

        That is the batches a replica sees at the lowest rate, after the last decay; 0.9, the
        paper's, unless they are fewer than 100. Averages that look back further hold statistics of
        weights that are no more. A decay that rounding moves to the end of training counts as none.
        """
        decays = (step for step in self.decay_steps if step < self.total_steps)
        updates = self.total_steps - max(decays, default=0)
        return batch_norm_momentum_advice(updates * self.accumulation_steps)

    def learning_rate_at(self, step: npt.ArrayLike) -> Any:
        """The rate at optimizer update `step`, by the formula of the class, in float64.

        Args:
            step: an integer or an array of integers, 0 or more; may lie beyond `total_steps`.

        Returns:
            A Python float for a scalar, else a float64 array of `step`'s shape.

        Raises:
            ConfigurationError: a step is negative or no integer.
        """
        steps = np.asarray(step)
        if steps.dtype.kind not in "iu" or np.any(steps < 0):
            raise ConfigurationError(f"step={step!r}: must be integers, 0 or more.")
        steps = steps.astype(np.int64)
        rate = np.broadcast_to(self._rate(steps), steps.shape).astype(np.float64)
        return float(rate) if rate.ndim == 0 else rate

    def _rate(self, steps: npt.NDArray[np.int64]) -> Any:
        rate: Any = self.peak_learning_rate
        if self.warmup == "gradual":
            rate = gradual_warmup(
                steps,
                rate,
                warmup_steps=self.warmup_steps,
                initial_learning_rate=self.initial_learning_rate,
                peak_learning_rate=self.peak_learning_rate,
                xp=np,
            )
        elif self.warmup == "constant":
            rate = constant_warmup(
                steps,
                rate,
                warmup_steps=self.warmup_steps,
                initial_learning_rate=self.initial_learning_rate,
                xp=np,
            )
        return step_decay(
            steps, rate, boundaries=self.decay_steps, decay_factor=self.decay_factor, xp=np
        )

    def learning_rate_schedule(self) -> Any:
        """The same rates as a Keras `LearningRateSchedule`, to compile an optimizer with.

        Keras hands a schedule the number of batches the optimizer has seen. With
        `accumulation_steps=a` the optimizer must have `gradient_accumulation_steps=a`, and the
        schedule divides by a, so that update t still has `learning_rate_at(t)`.
        """
        # The one reference to a higher floor, by name and late: a recipe is made and printed
        # without TensorFlow.
        return importlib.import_module("tf_largebatch.schedules").schedule_of_recipe(self)

    def to_dict(self) -> dict[str, Any]:
        """The fields as a dictionary that JSON can hold; `from_dict` takes it back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Recipe:
        """A recipe from `to_dict`'s dictionary, also after a way through JSON.

        Raises:
            ConfigurationError: a key is unknown or missing, or a value breaks its rule.
        """
        known = {field.name: field for field in dataclasses.fields(cls)}
        for name in fields:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                advice = f"Did you mean {near[0]!r}?" if near else f"Known are {sorted(known)}."
                raise ConfigurationError(f"A recipe has no field {name!r}. {advice}")
        missing = [
            name
            for name, field in known.items()
            if field.default is dataclasses.MISSING and name not in fields
        ]
        if missing:
            raise ConfigurationError(f"A recipe needs {missing}; given were {sorted(fields)}.")
        return cls(**fields)

    def describe(self) -> str:
        """What to read before a long run starts: the formulas with their numbers, then the rates.

        The table at the end has the first update, the last one of warmup and the one after it (at
        the peak, unless a decay came before), each decay and the last update.
        """
        return description(self)
