"""The rows of a source as they are packed: read in chunks, checked, made examples."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tf_largebatch.core.errors import ConfigurationError, DataError
from tf_largebatch.data._image_decoding import decode_image, reason_of
from tf_largebatch.data._sources import RandomAccessSource

CHUNK_ROWS = 16  # some MB of memory for each shard in work; a call's own cost is spread over them
_SURVEY_ROWS = 64


class Row(NamedTuple):
    """A row of the source, and why its image cannot be decoded, if so."""

    number: int
    image: bytes
    label: int
    complaint: str | None


class RowReader:
    """Reads and describes rows; used by several threads at once.

    Args:
        source: rows are `(encoded image, label)`.
        check_images: whether every image is decoded.

    Raises:
        ConfigurationError: the rows are something else.
        DataError: there is no row.
    """

    def __init__(self, source: RandomAccessSource, *, check_images: bool) -> None:
        _check_rows(source)
        self._source = source
        self._path: Callable[[int], Any] | None = getattr(source, "path", None)
        names = getattr(source, "class_names", None)
        self.class_names = None if names is None else tuple(names)
        # Traced here, once; to run it is safe in any thread.
        self._gather = tf.function(source.gather, autograph=False).get_concrete_function(
            tf.TensorSpec([None], tf.int64)
        )
        self._check_images = check_images

    def __len__(self) -> int:
        return len(self._source)

    def chunks(self, begin: int, end: int) -> Iterator[list[Row]]:
        """The rows `[begin, end)`, a chunk at a time.

        Raises:
            DataError: a row cannot be read.
        """
        for first in range(begin, end, CHUNK_ROWS):
            numbers = np.arange(first, min(first + CHUNK_ROWS, end), dtype=np.int64)
            images, labels = self._read(numbers)
            yield [
                Row(int(number), image, int(label), self._complaint(image))
                for number, image, label in zip(numbers, images, labels, strict=True)
            ]

    def example(self, row: Row) -> bytes:
        """The row as a serialised `tf.train.Example`, always with the same bytes."""
        features = {
            "image/encoded": _bytes_feature(row.image),
            "image/class/label": tf.train.Feature(int64_list=tf.train.Int64List(value=[row.label])),
        }
        if self._path is not None:
            file_name = os.path.basename(os.fsencode(self._path(row.number)))
            features["image/filename"] = _bytes_feature(file_name)
        example = tf.train.Example(features=tf.train.Features(feature=features))
        return example.SerializeToString(deterministic=True)

    def describe(self, number: int) -> str:
        """The row for messages, with the source's own words if it has any."""
        describe = getattr(self._source, "describe_row", None)
        return f"row {number}" if describe is None else f"row {number} ({describe(number)})"

    def survey(self) -> tuple[str, float]:
        """A SHA-256 over the names of all rows and the content of some; these rows' mean bytes.

        A name is the last two parts of a path, class folder and file, so that a folder may be
        moved between two runs.
        """
        digest = hashlib.sha256()
        if self._path is not None:
            for number in range(len(self)):
                parts = os.fsencode(self._path(number)).split(b"/")
                digest.update(b"/".join(parts[-2:]) + b"\0")
        numbers = np.unique(np.linspace(0, len(self) - 1, _SURVEY_ROWS).astype(np.int64))
        sizes = []
        for part in np.array_split(numbers, -(-len(numbers) // CHUNK_ROWS)):
            for number, image, label in zip(part, *self._read(part), strict=True):
                content = hashlib.sha256(image).hexdigest()
                digest.update(f"{number} {int(label)} {content}\n".encode())
                sizes.append(len(image))
        return digest.hexdigest(), sum(sizes) / len(sizes)

    def _read(
        self, numbers: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.object_], npt.NDArray[np.integer[Any]]]:
        try:
            images, labels = self._gather(tf.constant(numbers))
        except tf.errors.OpError as error:
            raise DataError(
                f"Rows {numbers[0]} to {numbers[-1]} cannot be read: {reason_of(error)}"
            ) from error
        return images.numpy(), labels.numpy()

    def _complaint(self, image: bytes) -> str | None:
        if self._check_images:
            try:
                decode_image(image)  # what training does with all that is not plainly JPEG
            except DataError as error:
                return str(error)
        return None


def _check_rows(source: RandomAccessSource) -> None:
    if not isinstance(source, RandomAccessSource):
        raise ConfigurationError(
            f"source must have __len__, element_spec and gather, but is {source!r}; for a folder "
            "of images make an ImageFolderSource."
        )
    spec = source.element_spec
    if not (
        isinstance(spec, tuple)
        and len(spec) == 2
        and all(isinstance(leaf, tf.TensorSpec) and leaf.shape.rank == 0 for leaf in spec)
        and spec[0].dtype == tf.string
        and spec[1].dtype.is_integer
    ):
        raise ConfigurationError(
            "The rows to pack must be (encoded image, label), a scalar string and a scalar "
            f"integer, but those of {type(source).__name__} are {spec!r}; encode images first, "
            "or let parse_fn=parse_image_examples read them."
        )
    if len(source) < 1:
        raise DataError(f"{type(source).__name__} has no rows; give at least one.")


def _bytes_feature(value: bytes) -> tf.train.Feature:
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))
