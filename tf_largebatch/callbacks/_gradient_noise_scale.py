"""Estimates during training how large a minibatch still pays."""

from __future__ import annotations

import math
import warnings
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.core.noise_scale import (
    example_efficiency,
    gain_of_doubling,
    gradient_moments,
    noise_scale,
)
from tf_largebatch.core.recipe import Recipe, checked_recipe
from tf_largebatch.optimizers._gradient_squares import GradientSquares
from tf_largebatch.optimizers._loss_scale_optimizer import innermost

LOG_NAME = "gradient_noise_scale"


class GradientNoiseScale(keras.callbacks.Callback):
    """Estimates the minibatch beyond which more workers stop paying (McCandlish et al. 2018).

    The gradient of one replica's batch of b examples is noisier than that of an update of B: from
    how much longer it is on average follow the length of the true gradient G and the variance S of
    one example's, and from these the simple noise scale (arXiv 1812.06162, section 2.2)

        noise scale = tr(S) / |G|^2      in examples

    A minibatch well below it loses next to nothing by being large; at the noise scale an update is
    worth half as much per example as a small one; well above it more examples make a step hardly
    better. It grows as training goes on, most where the rate decays, so a run may pay with fewer
    workers at first. It says nothing about stability: whether the scaled rate still converges is
    for the recipe to show.

    Both lengths are taken from gradients that exist anyway, before and after the all-reduce (or
    accumulation), within the step: two passes over the gradients' memory, one number more to
    reduce. The means run over some `1 / (1 - decay)` updates. What goes into the logs of each
    epoch as "gradient_noise_scale" is the same on all workers: infinite while no gradient stands
    out from the noise, so that any minibatch pays; not a number before the first update, and after
    gradients that were not finite. At the end of training the result is logged by absl; a global
    batch above the noise scale is warned of.

    It is needed on every worker. Weight decay of the optimizer is no part of the gradient here; an
    L2 term of the loss is. Batches must be weighted alike: a loss that is a sum rather than a mean
    is measured wrongly. After an exception within `fit` the step goes on measuring until the model
    is compiled again.

    Args:
        recipe: the `Recipe` of the run, for b = `per_replica_batch_size` and B =
            `global_batch_size`.
        decay: of the running means, in (0, 1).

    Attributes:
        noise_scale: the last estimate, in examples; None before the end of the first epoch with an
            update.

    Raises:
        ConfigurationError: when made, if `recipe` is no `Recipe`, if B = b (one replica without
            accumulation has nothing to compare), or for a `decay` out of range. When training
            begins, if the optimizer is not of this package, or its accumulation or the number of
            replicas are not the recipe's.
    """

    def __init__(self, recipe: Recipe, *, decay: float = 0.99) -> None:
        super().__init__()
        self.recipe = checked_recipe(recipe)
        if recipe.global_batch_size == recipe.per_replica_batch_size:
            raise ConfigurationError(
                f"GradientNoiseScale compares the gradient of a replica's batch with that of an "
                f"update, but both have {recipe.global_batch_size} examples here. Train on several "
                "replicas, or with accumulation_steps above 1."
            )
        if not (isinstance(decay, float) and 0.0 < decay < 1.0):
            raise ConfigurationError(f"decay={decay!r} is not a float in (0, 1); 0.99 is usual.")
        self.noise_scale: float | None = None
        self._decay = decay
        self._squares: GradientSquares | None = None

    needs_every_worker = True

    @property
    def state_variables(self) -> list[tf.Variable]:
        """What `TrainingState` saves of it."""
        return [] if self._squares is None else self._squares.variables

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Has the optimizer measure, from the next trace of the training step on."""
        optimizer = innermost(self.model.optimizer)
        self._check(optimizer)
        with self.model.distribute_strategy.scope():
            self._squares = GradientSquares(decay=self._decay)
        optimizer.gradient_squares = self._squares
        self.model.make_train_function(force=True)
        self._warn_of_other_batches()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Logs the estimate."""
        assert self._squares is not None
        if logs is not None:
            logs[LOG_NAME] = math.nan
        if not self._squares.reduced.numpy():  # no update yet
            return
        moments = gradient_moments(
            small_square=float(self._squares.local.numpy()),
            large_square=float(self._squares.reduced.numpy()),
            small_batch_size=self.recipe.per_replica_batch_size,
            large_batch_size=self.recipe.global_batch_size,
        )
        self.noise_scale = noise_scale(moments)
        if logs is not None:
            logs[LOG_NAME] = self.noise_scale

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Says what came of it, and leaves the training step as it was."""
        innermost(self.model.optimizer).gradient_squares = None
        self.model.make_train_function(force=True)
        if self.noise_scale is None:
            return
        if math.isnan(self.noise_scale):
            warnings.warn(self.describe(), stacklevel=2)
            return
        logging.info("%s", self.describe())
        if self.noise_scale < self.recipe.global_batch_size:
            warnings.warn(self.describe(), stacklevel=2)

    def describe(self) -> str:
        """The estimate in words, with what the run's global batch and twice of it are worth.

        Raises:
            ConfigurationError: there is no estimate yet.
        """
        if self.noise_scale is None:
            raise ConfigurationError(
                "GradientNoiseScale has no estimate yet; it has one at the end of an epoch."
            )
        if math.isnan(self.noise_scale):
            return "Gradient noise scale: unknown, as gradients were not finite."
        batch = self.recipe.global_batch_size
        return (
            f"Gradient noise scale: {self.noise_scale:.3g} examples, beyond which more workers "
            f"hardly pay. The global batch is {batch}: an example is worth "
            f"{example_efficiency(batch, self.noise_scale):.0%} of one in a small batch, and with "
            "twice the workers a step would come "
            f"{gain_of_doubling(batch, self.noise_scale):.2f} times as far."
        )

    def _warn_of_other_batches(self) -> None:
        recipe, steps = self.recipe, self.params.get("steps")
        whole = recipe.steps_per_epoch * recipe.accumulation_steps
        rows = recipe.per_replica_batch_size * recipe.num_replicas
        if steps is not None and not whole <= steps <= math.ceil(recipe.num_examples / rows):
            warnings.warn(
                f"An epoch has {steps} batches, where the recipe's {recipe.num_examples} examples "
                f"make {whole} of {rows}. GradientNoiseScale is right only if that is the number "
                "of rows in a batch.",
                stacklevel=2,
            )

    def _check(self, optimizer: Any) -> None:
        if not hasattr(optimizer, "gradient_squares"):
            raise ConfigurationError(
                f"GradientNoiseScale cannot see the gradients of {type(optimizer).__name__}; "
                "compile with tf_largebatch.optimizers.MomentumSGD (for keras.optimizers.SGD) or "
                "LARS."
            )
        replicas = self.model.distribute_strategy.num_replicas_in_sync
        accumulated = optimizer.gradient_accumulation_steps or 1
        if (replicas, accumulated) != (self.recipe.num_replicas, self.recipe.accumulation_steps):
            raise ConfigurationError(
                f"Training runs on {replicas} replicas with gradient_accumulation_steps="
                f"{accumulated}, but the recipe has num_replicas={self.recipe.num_replicas} and "
                f"accumulation_steps={self.recipe.accumulation_steps}; they must be the same."
            )
