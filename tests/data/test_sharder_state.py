from __future__ import annotations

import itertools
import json
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.data._helpers import OneWorkerOf, numbered_rows, recording_model
from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.data import ArraySource, GlobalShuffleSharder


def sharder_of(rows: int = 53, batch: int = 12, **changes: Any) -> GlobalShuffleSharder:
    return GlobalShuffleSharder(
        numbered_rows(rows), global_batch_size=batch, **{"seed": 5, **changes}
    )


def rows_read(dataset: Any) -> list[list[int]]:
    return [x.numpy()[:, 0].astype(int).tolist() for x, _ in dataset]


def as_workers(
    sharder: GlobalShuffleSharder, workers: int, state: dict[str, Any] | None = None
) -> list[list[int]]:
    """The steps of the next epoch, or the rest of one, joined from what each worker reads."""
    parts = []
    for index in range(workers):
        strategy = OneWorkerOf(index=index, workers=workers, local_replicas=1)
        if state is None:
            parts.append(rows_read(sharder.train_dataset(strategy)))
        else:
            parts.append(rows_read(sharder.rest_of_epoch(state, strategy)))
    return [list(itertools.chain(*step)) for step in zip(*parts, strict=True)]


@pytest.mark.parametrize("remainder", ["drop", "wrap"])
@pytest.mark.parametrize("step", [0, 1, 3])
def test_another_number_of_workers_goes_on_exactly(remainder: str, step: int) -> None:
    whole = as_workers(sharder_of(remainder=remainder), 4)
    text = json.dumps(sharder_of(remainder=remainder).state(epoch=0, step=step))
    for workers in (1, 2, 3):
        rest = as_workers(sharder_of(remainder=remainder), workers, json.loads(text))
        assert whole[:step] + rest == whole
    seen = np.bincount(np.ravel(whole), minlength=53)
    assert seen.sum() == {"drop": 48, "wrap": 60}[remainder]


def test_each_pass_is_the_same_rest_of_the_epoch() -> None:
    sharder = sharder_of()
    rest = sharder.rest_of_epoch(sharder.state(epoch=7, step=2))
    assert int(rest.cardinality()) == 2
    expected = [sharder.positions(epoch=7, step=step).tolist() for step in (2, 3)]
    assert rows_read(rest) == expected
    assert rows_read(rest) == expected


def test_fit_goes_on_where_it_was_broken_off() -> None:
    model, straight = recording_model(built=True)
    model.fit(sharder_of().train_dataset(), epochs=3, shuffle=False, verbose=0)

    class StopAt(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if self.model.optimizer.iterations == 6:
                raise KeyboardInterrupt

    model, batches = recording_model(built=True)
    with pytest.raises(KeyboardInterrupt):
        model.fit(
            sharder_of().train_dataset(), epochs=3, shuffle=False, verbose=0, callbacks=[StopAt()]
        )
    sharder = sharder_of()
    epoch, step = divmod(int(model.optimizer.iterations), sharder.steps_per_epoch)
    state = sharder.state(epoch=epoch, step=step)
    fit = {"shuffle": False, "verbose": 0}
    model.fit(sharder.rest_of_epoch(state), initial_epoch=epoch, epochs=epoch + 1, **fit)
    model.fit(sharder.train_dataset(initial_epoch=epoch + 1), initial_epoch=2, epochs=3, **fit)
    assert batches == straight


def test_a_large_epoch_is_entered_at_once() -> None:
    """A step far into an epoch of a hundred million rows, none of which before it is read."""

    class Numbers:
        element_spec = tf.TensorSpec([], tf.int64)

        def __len__(self) -> int:
            return 100_000_000

        def gather(self, rows: tf.Tensor) -> tf.Tensor:
            return rows

    sharder = GlobalShuffleSharder(Numbers(), global_batch_size=1000, seed=0)
    rest = sharder.rest_of_epoch(sharder.state(epoch=3, step=99_998))
    steps = [batch.numpy().tolist() for batch in rest]
    assert steps == [sharder.positions(epoch=3, step=s).tolist() for s in (99_998, 99_999)]


@pytest.mark.parametrize(
    ("other", "sides"),
    [
        ({"seed": 6}, ["seed: 5, 6"]),
        ({"batch": 13}, ["global_batch_size: 12, 13"]),
        ({"remainder": "wrap"}, ["remainder: 'drop', 'wrap'"]),
        ({"rows": 54, "seed": 7}, ["num_rows: 53, 54", "seed: 5, 7", "source_fingerprint: '"]),
    ],
)
def test_a_state_of_something_else_is_refused_with_both_sides(
    other: dict[str, Any], sides: list[str]
) -> None:
    state = sharder_of().state(epoch=1, step=2)
    with pytest.raises(ConfigurationError, match="belongs to another sharder") as caught:
        sharder_of(**other).rest_of_epoch(state)
    for side in sides:
        assert side in str(caught.value)


def test_other_values_in_arrays_of_the_same_shape_are_another_data_set() -> None:
    arrays = np.arange(1000, dtype=np.float32)
    state = GlobalShuffleSharder(ArraySource(arrays), global_batch_size=10, seed=0).state(
        epoch=0, step=1
    )
    other = GlobalShuffleSharder(ArraySource(arrays + 1), global_batch_size=10, seed=0)
    with pytest.raises(ConfigurationError, match="source_fingerprint"):
        other.rest_of_epoch(state)
    same = GlobalShuffleSharder(ArraySource(arrays.copy()), global_batch_size=10, seed=0)
    same.rest_of_epoch(state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": 4}, r"the step of the state must be in \[0, 3\], but is 4"),
        ({"step": 1.0}, "the step of the state must be an integer"),
        ({"epoch": -1}, "the epoch of the state must be at least 0"),
        ({"version": 0}, "version: 0, 1"),
        ({"more": 1}, r"state must be what GlobalShuffleSharder.state\(\) returned"),
    ],
)
def test_a_damaged_state_is_refused(change: dict[str, Any], message: str) -> None:
    state = {**sharder_of().state(epoch=0, step=0), **change}
    with pytest.raises(ConfigurationError, match=message):
        sharder_of().rest_of_epoch(state)


@pytest.mark.parametrize("state", [None, [], "{}", {}, {"epoch": 1, "step": 2}])
def test_what_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(ConfigurationError, match="state must be what"):
        sharder_of().rest_of_epoch(state)


def test_behind_the_last_step_is_the_next_epoch() -> None:
    sharder = sharder_of()
    assert sharder.state(epoch=2, step=4) == sharder.state(epoch=3, step=0)


def test_positions_outside_of_the_epoch_have_no_state() -> None:
    with pytest.raises(ConfigurationError, match=r"step must be in \[0, 4\], but is 5"):
        sharder_of().state(epoch=0, step=5)
    with pytest.raises(ConfigurationError, match="epoch must be at least 0"):
        sharder_of().state(epoch=-1, step=0)
