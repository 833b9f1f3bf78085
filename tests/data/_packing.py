"""Sources in memory, the two writers, and what they leave."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tf_largebatch.data._record_writers import write_array_records, write_tfrecords

WRITERS = {"tfrecord": write_tfrecords, "array_record": write_array_records}
both_formats = pytest.mark.parametrize("record_format", WRITERS)


class BytesSource:
    """Rows from a list, in memory."""

    def __init__(self, images: list[bytes], labels: list[int], *, seconds: float = 0.0) -> None:
        self._images = np.array(images, dtype=object)
        self._labels = np.array(labels, dtype=np.int64)
        self._seconds = seconds  # for each call of gather

    def __len__(self) -> int:
        return len(self._images)

    @property
    def element_spec(self) -> Any:
        return tf.TensorSpec([], tf.string), tf.TensorSpec([], tf.int64)

    def gather(self, rows: tf.Tensor) -> Any:
        return tf.numpy_function(self.take, [rows], [tf.string, tf.int64])

    def take(self, rows: np.ndarray) -> Any:
        time.sleep(self._seconds)
        return self._images[rows], self._labels[rows]


class NamedSource(BytesSource):
    class_names = ("cat", "dog")

    def path(self, row: int) -> str:
        return f"/photos/{self.class_names[self._labels[row]]}/{row}.jpg"

    def describe_row(self, row: int) -> str:
        return self.path(row)


def random_bytes(num_rows: int, *, size: int = 900) -> list[bytes]:
    random = np.random.default_rng(5)
    return [random.bytes(int(random.integers(size // 2, size))) for _ in range(num_rows)]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
