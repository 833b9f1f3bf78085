"""A data set that is sent to another place of its epochs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.data._helpers import numbered_rows
from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.data import GlobalShuffleSharder
from tf_largebatch.data._epoch_cursor import EpochCursor
from tf_largebatch.data._training_position import position_of

ROWS, BATCH, STEPS = 23, 5, 4


def sharder_of(**changes: Any) -> GlobalShuffleSharder:
    return GlobalShuffleSharder(
        numbered_rows(ROWS), **{"global_batch_size": BATCH, "seed": 5, **changes}
    )


def steps_of(sharder: GlobalShuffleSharder, epoch: int, first: int = 0) -> list[list[int]]:
    return [sharder.positions(epoch=epoch, step=step).tolist() for step in range(first, STEPS)]


def rows_read(dataset: Any, steps: int) -> list[list[int]]:
    """Of the next pass, not read beyond its last step."""
    return [x.numpy()[:, 0].astype(int).tolist() for x, _ in itertools.islice(dataset, steps)]


@pytest.mark.parametrize("epoch", [0, 3])
@pytest.mark.parametrize("step", range(STEPS))
def test_the_next_pass_is_the_rest_and_then_whole_ones_follow(epoch: int, step: int) -> None:
    sharder = sharder_of()
    dataset = sharder.train_dataset()
    position = position_of(dataset)
    assert position is not None and position.sharder is sharder
    position.seek(sharder.state(epoch=epoch, step=step))
    assert rows_read(dataset, STEPS - step) == steps_of(sharder, epoch, step)
    for later in (epoch + 1, epoch + 2):
        assert position.next_epoch == later
        assert rows_read(dataset, STEPS) == steps_of(sharder, later)


def test_back_to_an_epoch_that_was_read() -> None:
    sharder = sharder_of()
    dataset = sharder.train_dataset(initial_epoch=4)
    position = position_of(dataset)
    assert position is not None and position.next_epoch == 4
    rows_read(dataset, STEPS)
    assert position.next_epoch == 5
    position.seek(sharder.state(epoch=4, step=1))
    assert position.next_epoch == 4
    assert rows_read(dataset, STEPS - 1) == steps_of(sharder, 4, 1)
    assert position.next_epoch == 5


def test_behind_the_last_step_is_the_next_epoch() -> None:
    sharder = sharder_of()
    dataset = sharder.train_dataset()
    position = position_of(dataset)
    assert position is not None
    position.seek(sharder.state(epoch=1, step=STEPS))
    assert rows_read(dataset, STEPS) == steps_of(sharder, 2)


def test_data_sets_of_one_sharder_do_not_share_their_place() -> None:
    sharder = sharder_of()
    one, other = sharder.train_dataset(), sharder.train_dataset()
    position = position_of(one)
    assert position is not None
    position.seek(sharder.state(epoch=7, step=0))
    assert rows_read(other, STEPS) == steps_of(sharder, 0)
    assert rows_read(one, STEPS) == steps_of(sharder, 7)


@pytest.mark.parametrize("changes", [{"seed": 6}, {"global_batch_size": 4}, {"remainder": "wrap"}])
def test_a_state_of_another_sharder(changes: dict[str, Any]) -> None:
    position = position_of(sharder_of().train_dataset())
    assert position is not None
    (name,) = changes
    with pytest.raises(ConfigurationError, match=f"another sharder(.|\n)*{name}: "):
        position.seek(sharder_of(**changes).state(epoch=1, step=1))
    assert position.next_epoch == 0


def test_other_data_sets_have_none() -> None:
    sharder = sharder_of()
    assert position_of(sharder.rest_of_epoch(sharder.state(epoch=0, step=1))) is None
    assert position_of(numbered_rows(3)) is None


def test_data_sets_derived_from_a_sharders_have_its_position() -> None:
    dataset = sharder_of().train_dataset()
    mapped = dataset.map(lambda x, y: (x, y)).prefetch(2)
    assert position_of(mapped) is position_of(dataset) is not None


def test_a_cursor_goes_back_only_when_it_is_sought() -> None:
    cursor = EpochCursor(2, first_step=3)
    assert cursor.place == (2, 3)
    cursor.mark_begun(1)  # by an old iterator, late
    assert cursor.place == (2, 3)
    cursor.mark_begun(2)
    assert cursor.place == (3, 0)
    cursor.seek(0, 2)
    assert cursor.place == (0, 2)
    cursor.mark_begun(0)
    assert cursor.place == (1, 0)


def test_a_cursor_that_is_held() -> None:
    cursor = EpochCursor(2, first_step=3, advances=False)
    cursor.mark_begun(2)
    assert cursor.place == (2, 3)
