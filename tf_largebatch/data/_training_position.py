"""Where a training data set stands, for those that save the position and come back to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_largebatch.data._epoch_cursor import EpochCursor
from tf_largebatch.data._sharder_state import position_in

if TYPE_CHECKING:
    from tf_largebatch.data._sharder import GlobalShuffleSharder

_ATTRIBUTE = "_tf_largebatch_training_position"


@dataclass(frozen=True)
class TrainingPosition:
    """The position of what `GlobalShuffleSharder.train_dataset` returned."""

    sharder: GlobalShuffleSharder
    cursor: EpochCursor

    @property
    def next_epoch(self) -> int:
        """The epoch that the next pass reads, as the sharder counts them."""
        return self.cursor.place[0]

    def seek(self, state: Mapping[str, Any]) -> None:
        """Has the next pass begin where `sharder.state()` says, and the others follow it.

        Raises:
            ConfigurationError: the state belongs to another sharder; both sides are shown.
        """
        epoch, step = position_in(
            state, self.sharder.identity, steps_per_epoch=self.sharder.steps_per_epoch
        )
        self.cursor.seek(epoch, step)


def keep_position(dataset: Any, position: TrainingPosition) -> Any:
    """`dataset`, by which `position_of` finds `position`."""
    # An attribute, as neither plain nor distributed data sets have a place for it.
    setattr(dataset, _ATTRIBUTE, position)
    return dataset


def position_of(dataset: Any) -> TrainingPosition | None:
    """The position of a training data set; None for one that was not made by a sharder.

    Also of one that was derived from a sharder's, by `map` or otherwise.
    """
    position = getattr(dataset, _ATTRIBUTE, None)
    if position is not None or not isinstance(dataset, tf.data.Dataset):
        return position
    # TensorFlow has no public way back from a data set to those that it was made of.
    found = (position_of(each) for each in dataset._inputs())
    return next((each for each in found if each is not None), None)
