"""What the sources of serialised records share: reading by number, parsing, naming."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tf_largebatch.core.errors import ConfigurationError, DataError

ParseFn = Callable[[tf.Tensor], Any]


class RecordSource:
    """Base of sources whose rows are records, byte strings that are read by number.

    A subclass reads (`read_records`, plain Python that releases the GIL while it waits) and names
    (`describe_row`); this class calls it from a graph, in one `tf.numpy_function` a batch, and
    parses what it read there.

    Args:
        num_rows: the number of records.
        parse_fn: a function of TensorFlow ops from a batch of records, string `[batch]`, to the
            structure of a batch, each leaf `[batch, ...]`, as `parse_image_examples`; `None`
            leaves the records as they are.

    Raises:
        ConfigurationError: `parse_fn` is no function, or returns a leaf without the batch
            dimension.
        DataError: there is no record.
    """

    def __init__(self, num_rows: int, parse_fn: ParseFn | None) -> None:
        if num_rows < 1:
            raise DataError(f"{type(self).__name__} has no rows; give at least one.")
        if parse_fn is not None and not callable(parse_fn):
            raise ConfigurationError(f"parse_fn must be a function or None, but is {parse_fn!r}.")
        self._num_rows = num_rows
        self._parse_fn = parse_fn
        self._element_spec = _parsed_spec(parse_fn)

    def __len__(self) -> int:
        return self._num_rows

    @property
    def element_spec(self) -> Any:
        """The nest of `tf.TensorSpec` of one row."""
        return self._element_spec

    def read_records(self, rows: npt.NDArray[np.int64]) -> Sequence[bytes]:
        """The records of these rows, in this order; called from TensorFlow's threads at once.

        Raises:
            DataError: a record cannot be read; names the file and the place in it.
        """
        raise NotImplementedError

    def describe_row(self, row: int) -> str:
        """Where a row lies, for messages: its file and its place in it."""
        raise NotImplementedError

    @property
    def fingerprint(self) -> str:
        """What tells this source from one of other records; see `RandomAccessSource`."""
        raise NotImplementedError

    def check_rows(self, rows: npt.NDArray[np.int64]) -> None:
        """Raises `DataError` for a row that there is not."""
        outside = rows[(rows < 0) | (rows >= len(self))]
        if outside.size:
            raise DataError(
                f"There is no row {outside[0]} in a source of {len(self)} rows; the rows are 0 to "
                f"{len(self) - 1}."
            )

    def gather(self, rows: tf.Tensor) -> Any:
        """See `RandomAccessSource.gather`."""
        records = tf.numpy_function(self._read, [rows], tf.string)
        records.set_shape([rows.shape[0]])
        return records if self._parse_fn is None else self._parse_fn(records)

    def _read(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.object_]:
        records = np.empty(len(rows), dtype=np.object_)  # np.array would make an array of texts
        records[:] = self.read_records(rows)
        return records


def _parsed_spec(parse_fn: ParseFn | None) -> Any:
    if parse_fn is None:
        return tf.TensorSpec([], tf.string)
    parsed = traced_outputs(parse_fn, tf.TensorSpec([None], tf.string))

    def row_spec(leaf: Any) -> Any:
        if leaf.shape.rank == 0:
            raise ConfigurationError(
                "parse_fn is given a batch of records, string [batch], and must return leaves "
                f"[batch, ...], but one of them is {leaf}."
            )
        return tf.TensorSpec(leaf.shape[1:], leaf.dtype)

    return tf.nest.map_structure(row_spec, parsed)


def traced_outputs(function: ParseFn, spec: tf.TensorSpec) -> Any:
    """What `function` of TensorFlow ops returns for such an argument: symbolic tensors.

    Tracing a `tf.function` starts TensorFlow's runtime, after which no multi-worker strategy can
    be made any more. Building a graph does not, so that a source may be made before the strategy.
    """
    try:
        with tf.Graph().as_default():
            return function(tf.raw_ops.Placeholder(dtype=spec.dtype, shape=spec.shape))
    except RuntimeError:
        # It uses a tensor from outside, which only a tf.function takes in; the runtime runs then.
        traced = tf.function(function, autograph=False).get_concrete_function(spec)
        return traced.structured_outputs


def parse_image_examples(records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """`parse_fn` for images in `tf.train.Example`, under the keys usual for ImageNet.

    Args:
        records: string `[batch]`, with the features `image/encoded` (a byte string) and
            `image/class/label` (one integer), as `write_tfrecords` and `write_array_records`
            store them. Many ImageNet files count labels from 1: subtract it in a function of
            your own.

    Returns:
        `(encoded image, label)`: string `[batch]` and int64 `[batch]`.
    """
    features = tf.io.parse_example(
        records,
        {
            "image/encoded": tf.io.FixedLenFeature([], tf.string),
            "image/class/label": tf.io.FixedLenFeature([], tf.int64),
        },
    )
    return features["image/encoded"], features["image/class/label"]
