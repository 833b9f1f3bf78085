"""Rows from ArrayRecord files, read by array_record's own reader."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
from absl import logging

from tf_largebatch.core.errors import ConfigurationError, DataError
from tf_largebatch.data._record_files import (
    FILES_ALLOWED_FOR_EACH_OPEN,
    OpenFiles,
    expand_files,
    files_fingerprint,
    most_open_files,
)
from tf_largebatch.data._records import ParseFn, RecordSource

# No read-ahead: a random row costs one read of its own bytes. The library's own random-access
# source has the same two settings. A buffer of 1 MiB made a row of 80 kB read 508 kB.
_READER_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"
_READER_BUFFER_BYTES = 32_768

_OPENING_THREADS = 16


class ArrayRecordSource(RecordSource):
    """Records of ArrayRecord files: rows in the order of the files, then of their records.

    Each file holds the places of its records, so nothing has to be indexed; the constructor opens
    each file once, to count. Readers are shared by all threads and release the GIL while they
    read: they are thread-compatible, and reading by number changes nothing in them. Readers stay
    open, up to a quarter of the files that the process may have open (`ulimit -n`). Opening one
    costs about three times the reading of a row, so with more files than that a warning says to
    which limit to raise it.

    Rows are read one a call. A call with several hands them to the library's pool of threads,
    and takes nearly twice the CPU time: 115 against 66 microseconds for each row of 80 kB.

    Files must be written with `group_size:1` to be read at random, since the whole group is read
    and decompressed for each row: 5 ms a row with groups of 16 such rows. Other sizes are taken,
    with a warning. Rows of one file that follow one another, as in an evaluation, are then read
    in one call, which reads a group once: 0.4 ms a row.

    Args:
        files: paths and patterns, see `expand_files`. Local files, and what the installed
            array_record reads besides (`gs://` from 0.8.6 on, not tested here).
        parse_fn: from a batch of records, string `[batch]`, to the structure of a batch, by
            TensorFlow ops, as `parse_image_examples`; `None` leaves the records as they are.

    Raises:
        ConfigurationError: array_record is not installed, or `files` or `parse_fn` is of the
            wrong kind.
        DataError: a file cannot be opened, is no ArrayRecord file or is cut short (named, with
            the reason), or there is no record at all. While reading, as the text of a
            `tf.errors.OpError`: a corrupt record, with its file and number.
    """

    def __init__(
        self,
        files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        parse_fn: ParseFn | None = None,
    ) -> None:
        reader_class = _reader_class()
        self._paths = expand_files(files)
        self._readers = OpenFiles(_ReaderOpener(reader_class, self._paths), limit=most_open_files())
        with ThreadPoolExecutor(_OPENING_THREADS) as pool:
            counts_and_group_sizes = list(
                pool.map(self._count_and_group_size, range(len(self._paths)))
            )
        counts, self._group_sizes = zip(*counts_and_group_sizes, strict=True)
        self._first_rows = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self._warn_of_groups()
        self._warn_of_closing()
        super().__init__(int(self._first_rows[-1]), parse_fn)

    def describe_row(self, row: int) -> str:
        """The file and the number of the record in it, from 0."""
        files, numbers = self._places(np.asarray([row], np.int64))
        return f"record {numbers[0]} of {self._paths[files[0]]!r}"

    @property
    def fingerprint(self) -> str:
        """A hash of the names of the files and the numbers of their records."""
        return files_fingerprint(self._paths, np.diff(self._first_rows))

    def read_records(self, rows: npt.NDArray[np.int64]) -> Sequence[bytes]:
        """See `RecordSource.read_records`; rows out of range raise DataError."""
        records: list[bytes] = []
        for file, run in groupby(zip(*self._places(rows), strict=True), key=lambda place: place[0]):
            records += self._read_run(file, [number for _, number in run])
        return records

    def _places(self, rows: npt.NDArray[np.int64]) -> tuple[list[int], list[int]]:
        """The file of each row and its number there."""
        # The reader itself returns an empty record for a number that it does not have, if the
        # file has none at all.
        self.check_rows(rows)
        files = np.searchsorted(self._first_rows, rows, side="right") - 1
        return files.tolist(), (rows - self._first_rows[files]).tolist()

    def _read_run(self, file: int, numbers: list[int]) -> list[bytes]:
        one_call = self._group_sizes[file] > 1
        reader = self._readers[file]
        records: list[bytes] = []
        for part in [numbers] if one_call else [[number] for number in numbers]:
            try:
                records += reader.read(part)
            except RuntimeError as error:
                which = f"Record {part[0]}" if len(part) == 1 else f"One of the records {part}"
                raise DataError(
                    f"{which} of {self._paths[file]!r} cannot be read: {error}"
                ) from error
        return records

    def _count_and_group_size(self, file: int) -> tuple[int, int]:
        """The number of records of a file, and the size of the groups they are stored in."""
        reader = self._readers[file]
        # Files from before October 2022 do not say how they were written.
        written_with = re.search(r"\bgroup_size:(\d+)", reader.writer_options_string() or "")
        return reader.num_records(), int(written_with[1]) if written_with else 1

    def _warn_of_closing(self) -> None:
        if len(self._paths) > self._readers.limit:
            logging.warning(
                "Only %d of %d ArrayRecord files stay open, and opening one again costs more than "
                "reading a row. Let the process have %d files open (ulimit -n).",
                self._readers.limit,
                len(self._paths),
                len(self._paths) * FILES_ALLOWED_FOR_EACH_OPEN,
            )

    def _warn_of_groups(self) -> None:
        grouped = [file for file, size in enumerate(self._group_sizes) if size > 1]
        if grouped:
            logging.warning(
                "%d of %d ArrayRecord files are slow to read at random, as %r, which was written "
                "with group_size:%d: each row reads its whole group. Write them with group_size:1.",
                len(grouped),
                len(self._paths),
                self._paths[grouped[0]],
                self._group_sizes[grouped[0]],
            )


class _ReaderOpener:
    """Opens the readers of files by number, each time with as many records as at first.

    A reader closes its file when nothing refers to it any more, thus never under a thread that
    still reads.
    """

    def __init__(self, reader_class: Any, paths: Sequence[str]) -> None:
        self._reader_class = reader_class
        self._paths = paths
        self._counts: dict[int, int] = {}

    def __call__(self, file: int) -> Any:
        path = self._paths[file]
        try:
            reader = self._reader_class(
                path, options=_READER_OPTIONS, file_reader_buffer_size=_READER_BUFFER_BYTES
            )
            if not reader.ok():
                reader.close()  # raises with the reason
                raise RuntimeError("the library gives no reason")
        except RuntimeError as error:
            raise DataError(_not_opened(path, str(error))) from error
        count = reader.num_records()
        if count != self._counts.setdefault(file, count):
            raise DataError(
                f"{path!r} has changed: it has {count} records, and had {self._counts[file]} when "
                "it was first opened."
            )
        return reader


def _not_opened(path: str, reason: str) -> str:
    # The library takes a scheme that it does not know for a folder of this machine.
    if "://" in path and "open() failed" in reason:
        return (
            f"The installed array_record does not read remote files as {path!r}; copy them to a "
            f"local folder, or write TFRecord files, which are read from anywhere. ({reason})"
        )
    return f"{path!r} cannot be read as an ArrayRecord file, or is cut short: {reason}"


def _reader_class() -> Any:
    try:
        from array_record.python.array_record_module import ArrayRecordReader
    except ImportError as error:
        raise ConfigurationError(
            "ArrayRecordSource needs the library array_record, which cannot be imported "
            f"({error}): pip install 'tf_largebatch[records]'"
        ) from error
    return ArrayRecordReader
