"""A scan of a source for rows that a row function cannot decode."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import tensorflow as tf

from tf_largebatch.data._image_decoding import reason_of
from tf_largebatch.data._image_pipeline import ResizeAndCenterCrop
from tf_largebatch.data._pipeline import as_arguments
from tf_largebatch.data._sources import RandomAccessSource

_ROWS_BETWEEN_REPORTS = 512


class UnreadableRow(NamedTuple):
    """A row that cannot be read or decoded."""

    row: int
    description: str
    """Its file and place, from the source's `describe_row`; "row N" where it has none."""
    reason: str


def find_unreadable_rows(
    source: RandomAccessSource,
    row_fn: Callable[..., Any] | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> list[UnreadableRow]:
    """Reads and decodes every row once, and lists those that fail, in order.

    To be run once for a new data set. Training would end at the first of these rows, and where a
    JPEG file begins and ends well and is rotten in between, without its number.

    Args:
        source: rows by number, as an `ImageFolderSource`.
        row_fn: `row_fn(seed, *row)`, made of TensorFlow ops. The default, `ResizeAndCenterCrop()`,
            decodes all of each image; `RandomResizedCrop` reads a JPEG file only down to the end
            of its window, and so misses what is rotten below.
        progress: called with the rows done and the rows in all, every 512 rows and at the end.

    Returns:
        The rows that failed; empty where all can be used. Threads: one for each processor.
    """
    row_fn = row_fn or ResizeAndCenterCrop()
    read_row = tf.function(
        lambda row: _apply(source, row_fn, row),
        input_signature=[tf.TensorSpec([], tf.int64)],
        autograph=False,
    ).get_concrete_function()

    def reason(row: int) -> str | None:
        try:
            read_row(tf.constant(row, tf.int64))
        except tf.errors.OpError as error:
            return reason_of(error)
        return None

    describe = getattr(source, "describe_row", lambda row: f"row {row}")
    found: list[UnreadableRow] = []
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for start in range(0, len(source), _ROWS_BETWEEN_REPORTS):
            rows = range(start, min(start + _ROWS_BETWEEN_REPORTS, len(source)))
            for row, failure in zip(rows, pool.map(reason, rows), strict=True):
                if failure is not None:
                    found.append(UnreadableRow(row, describe(row), failure))
            if progress is not None:
                progress(rows.stop, len(source))
    return found


def _apply(source: RandomAccessSource, row_fn: Callable[..., Any], row: tf.Tensor) -> Any:
    elements = tf.nest.map_structure(lambda leaf: leaf[0], source.gather(row[None]))
    seed = tf.stack([tf.zeros([], tf.int64), row])
    return row_fn(seed, *as_arguments(elements))
