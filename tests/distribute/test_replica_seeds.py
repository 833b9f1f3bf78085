"""Each replica draws its own random numbers, the same in every run."""

from __future__ import annotations

import types

import numpy as np
import pytest
import tensorflow as tf

from tests.processes import json_from_replicas
from tf_largebatch.distribute._replica_seeds import is_seed_state, spread_seeds


def spread(seed: int, *, replicas: int, first_replica: int = 0) -> list[list[int]]:
    states = [tf.Variable([seed, 5], dtype=tf.int64) for _ in range(replicas)]
    spread_seeds(types.SimpleNamespace(values=states), first_replica=first_replica)
    return [state.numpy().tolist() for state in states]


@pytest.mark.parametrize("seed", [0, 1, 2**31 - 1, 2**32 - 1])
def test_states_are_all_different_and_the_first_is_kept(seed: int) -> None:
    states = spread(seed, replicas=64)
    assert states[0] == [seed, 5]
    assert len({first for first, _ in states}) == 64
    assert {count for _, count in states} == {5}


def test_a_worker_counts_its_replicas_among_all() -> None:
    assert spread(9, replicas=2, first_replica=2) == spread(9, replicas=4)[2:]


def test_the_states_of_keras_generators_are_known() -> None:
    import keras

    made = []

    def note(next_creator, **arguments):
        made.append(is_seed_state(arguments))
        return next_creator(**arguments)

    with tf.variable_creator_scope(note):
        keras.layers.Dropout(0.5)
        keras.layers.Dense(1).build((1, 1))
    assert made == [True, False, False]


def test_dropout_differs_between_replicas_and_not_between_runs() -> None:
    """Of 64 units: two equal masks of one replica's rows would be a matter of 2^-64."""
    first, again = (
        np.array(json_from_replicas("tests.distribute._dropout_script", replicas=2))
        for _ in range(2)
    )
    assert first.shape == (2, 2, 64)  # [call, replica, unit]
    assert not np.array_equal(first[0, 0], first[0, 1])
    assert not np.array_equal(first[0], first[1])
    np.testing.assert_array_equal(first, again)
