"""What a `fit` trains on, and where in it a position can be found again."""

from __future__ import annotations

from typing import Any

from tf_largebatch.callbacks._running_fit import RunningFit
from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.data._training_position import position_of


class TrainedData:
    """The data of a `fit`.

    Args:
        fit: the running one; None in a loop of the user's own.
        steps: Keras' number of steps an epoch, if it knows it.
        steps_per_execution: of the model.
    """

    def __init__(
        self, fit: RunningFit | None, *, steps: int | None, steps_per_execution: int
    ) -> None:
        self.position = position_of(fit.data) if fit else None
        self._kind = type(fit.data).__name__ if fit else "a loop of your own"
        self._steps = steps
        self._steps_per_execution = steps_per_execution
        self._offset = 0  # from epochs of `fit` to those of the sharder

    @property
    def steps_per_epoch(self) -> int:
        assert self.position is not None
        return self.position.sharder.steps_per_epoch

    def begin(self, epoch: int) -> None:
        """Notes that the next pass is epoch `epoch` of `fit`."""
        if self.position is not None:
            self._offset = self.position.next_epoch - epoch

    def state(self, *, epoch: int, step: int) -> dict[str, Any] | None:
        """`GlobalShuffleSharder.state` of a place in `fit`; None without a sharder."""
        if self.position is None:
            return None
        return self.position.sharder.state(epoch=epoch + self._offset, step=step)

    def can_be_resumed(self, step: int) -> bool:
        """Whether what follows in an epoch is found, and read by whole executions to its end."""
        if step == 0:
            return True
        if self.position is None:
            return False
        return (self.steps_per_epoch - step) % self._steps_per_execution == 0

    def check(self, *, within_epochs: bool) -> None:
        """Refuses data in which positions cannot be found that are asked for.

        Args:
            within_epochs: whether states are to be saved there.

        Raises:
            ConfigurationError: says what to change.
        """
        if self.position is None:
            if within_epochs:
                raise ConfigurationError(
                    f"TrainingState is to save within epochs, but fit trains on data of "
                    f"{self._kind}, in which a position cannot be found again. Train on "
                    f"GlobalShuffleSharder.train_dataset, {_OR_BETWEEN_EPOCHS}"
                )
            return
        if self._steps != self.steps_per_epoch:
            raise ConfigurationError(
                f"fit has steps_per_epoch={self._steps}, but the sharder's epochs have "
                f"{self.steps_per_epoch} steps. Leave steps_per_epoch out."
            )
        executed = self._steps_per_execution
        if within_epochs and self.steps_per_epoch % executed:
            raise ConfigurationError(
                f"TrainingState is to save within epochs, but steps_per_execution={executed} does "
                f"not divide the {self.steps_per_epoch} steps of an epoch, and the rest of one "
                f"could not be read by whole executions. Use one that divides them, "
                f"{_OR_BETWEEN_EPOCHS}"
            )

    def check_rest(self, step: int) -> None:
        """Refuses to resume before `step` if the rest of the epoch cannot be read.

        Raises:
            ConfigurationError: with the numbers.
        """
        if not self.can_be_resumed(step):
            raise ConfigurationError(
                f"The state stands before step {step} of {self.steps_per_epoch}, and what is left "
                f"of the epoch is no multiple of steps_per_execution={self._steps_per_execution}. "
                "Use the one that it was saved with."
            )


_OR_BETWEEN_EPOCHS = (
    "or leave save_every_steps and save_every_seconds out: then states are saved between epochs."
)
