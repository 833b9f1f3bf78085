from __future__ import annotations

from collections import namedtuple

import numpy as np
import pytest
import tensorflow as tf

from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.data import ArraySource, RandomAccessSource

Pair = namedtuple("Pair", "left right")


def gathered(source: ArraySource, rows: list[int]):
    dataset = tf.data.Dataset.from_tensors(tf.constant(rows, tf.int64)).map(source.gather)
    return dataset.element_spec, next(iter(dataset))


def test_gather_returns_the_rows_of_every_leaf_in_order() -> None:
    arrays = (
        {"b": np.arange(12, dtype=np.int32).reshape(6, 2), "a": np.arange(6) % 2 == 0},
        Pair(np.arange(6, dtype=">f4"), [10, 11, 12, 13, 14, 15]),
        np.arange(6, dtype=np.float16)[::-1],
    )
    source = ArraySource(arrays)
    assert isinstance(source, RandomAccessSource)
    assert len(source) == 6
    spec, (features, pair, last) = gathered(source, [5, 0, 0, 3])
    assert features["b"].numpy().tolist() == [[10, 11], [0, 1], [0, 1], [6, 7]]
    assert features["a"].numpy().tolist() == [False, True, True, False]
    assert pair.left.numpy().tolist() == [5.0, 0.0, 0.0, 3.0]
    assert pair.right.numpy().tolist() == [15, 10, 10, 13]
    assert last.numpy().tolist() == [0.0, 5.0, 5.0, 2.0]
    assert last.dtype == tf.float16
    # The batch is the row's spec with the batch dimension in front, static.
    batched = tf.nest.map_structure(
        lambda row: tf.TensorSpec([4, *row.shape], row.dtype), source.element_spec
    )
    assert spec == batched


def test_a_single_array_and_an_empty_batch() -> None:
    source = ArraySource(np.ones((3, 2, 2), np.uint8))
    assert source.element_spec == tf.TensorSpec([2, 2], tf.uint8)
    assert gathered(source, [])[1].shape == (0, 2, 2)


def test_the_arrays_are_not_copied() -> None:
    array = np.zeros(4)
    source = ArraySource((array,))
    array[2] = 7.0
    assert gathered(source, [2])[1][0].numpy().tolist() == [7.0]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            ({"a": np.zeros(3)}, np.zeros(4)),
            r"arrays\[1\] has 4 rows, but arrays\[0\]\['a'\] has 3",
        ),
        (np.zeros((0, 2)), r"arrays has shape \(0, 2\), no rows"),
        ((np.zeros(3), 5.0), r"arrays\[1\] is the scalar"),
        ((np.zeros(3), None), r"arrays\[1\] has dtype object, which holds no numbers"),
        (({"x": np.array(["a", "b"])},), r"arrays\[0\]\['x'\] has dtype <U1"),
        (np.array([b"a"]), "has dtype |S1"),
        (np.array(["2020-01-01"], "datetime64[D]"), "has dtype datetime64"),
        (np.zeros(2, np.longdouble), "which holds no numbers|has dtype"),
        ([[1, 2], [3]], "arrays cannot be made an array"),
        ((), "must hold at least one array"),
    ],
)
def test_refused(arrays, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ArraySource(arrays)


def test_a_list_of_arrays_is_ambiguous() -> None:
    """Taken as one array, features and labels of one shape would be stacked, unseen."""
    with pytest.raises(ConfigurationError, match="as a tuple"):
        ArraySource([np.zeros(4), np.zeros(4)])
