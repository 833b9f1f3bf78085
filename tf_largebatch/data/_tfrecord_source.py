"""TFRecord files read by record number."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tf_largebatch.core.errors import DataError
from tf_largebatch.data._record_files import (
    FILE_ERRORS,
    LocalFile,
    OpenFiles,
    RemoteFile,
    expand_files,
    files_fingerprint,
    is_local,
    most_open_files,
    open_file,
)
from tf_largebatch.data._records import ParseFn, RecordSource
from tf_largebatch.data._tfrecord_frames import FOOTER, FRAME_BYTES, HEADER, masked_crc32c
from tf_largebatch.data._tfrecord_index import RecordIndex, load_indexes

# Remote files hold a buffer of 512 KiB each while they are open.
_OPEN_REMOTE_FILES = 64


class TFRecordSource(RecordSource):
    """The records of TFRecord files: rows in the order of the files, then of their records.

    Each record is read by itself (`os.pread`), from where an index says that it lies, and the
    checksum of its data is compared at every read. The index is built when the source is made for
    the first time, in one pass over the files that checks all lengths and reads a page a record
    (about 3 microseconds each, where the files are in memory), and is stored beside them. In
    memory a row takes 8 bytes.

    Remote files (`gs://...`) are read through `tf.io.gfile`, in pieces of 512 KiB whatever the
    size of a record, by one thread a file: well enough to evaluate, but copy them to a local disk
    to train from them at speed.

    Args:
        files: a path, a pattern, or a list of them, as `expand_files` takes. Files without
            records are skipped. Compressed files are refused.
        parse_fn: a function of TensorFlow ops from a batch of records, string `[batch]`, to the
            structure of a batch, as `parse_image_examples`; `None` leaves the records as they are.
        index_dir: a folder for the indexes, where they are not to lie beside the files
            (`<file>.tlb_index`). An index is built again when the size or the time of modification
            of its file has changed. Where it cannot be stored, it is built at every start, and a
            warning is logged.

    Raises:
        ConfigurationError: an argument is of the wrong kind, or a file is named twice.
        DataError: no such files or no records, or a file that cannot be read, is compressed,
            truncated or corrupt (each by name, with the byte offset). While reading, also a
            record that is damaged, or whose file has changed since the source was made.
    """

    def __init__(
        self,
        files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        parse_fn: ParseFn | None = None,
        index_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        self._paths = expand_files(files)
        indexes = load_indexes(self._paths, index_dir=index_dir)
        self._file_bytes = [index.state.file_bytes for index in indexes]
        # Offsets as if the files lay one behind the other, one more than there are records.
        self._offsets = _joined_offsets(indexes)
        # [file]: its first row, and where it begins among all.
        self._first_rows = _starts([len(index.lengths) for index in indexes])
        self._first_bytes = _starts(self._file_bytes)
        all_local = all(map(is_local, self._paths))
        self._open_files = OpenFiles(
            self._open, limit=most_open_files() if all_local else _OPEN_REMOTE_FILES
        )
        super().__init__(len(self._offsets) - 1, parse_fn)

    def read_records(self, rows: npt.NDArray[np.int64]) -> list[bytes]:
        """See `RecordSource.read_records`."""
        self.check_rows(rows)
        files = self._file_of(rows)
        offsets = self._offsets[rows]
        lengths = self._offsets[rows + 1] - offsets - FRAME_BYTES
        in_file = offsets - self._first_bytes[files]
        records = rows - self._first_rows[files]
        # [row, (file, offset, length, record)]
        places = np.stack([files, in_file, lengths, records], axis=1).tolist()
        opened = [self._open_to_read(*place) for place in places]
        return [self._read_one(file, *place) for file, place in zip(opened, places, strict=True)]

    def describe_row(self, row: int) -> str:
        """See `RecordSource.describe_row`."""
        self.check_rows(np.asarray([row]))
        file = int(self._file_of(np.int64(row)))
        offset = int(self._offsets[row] - self._first_bytes[file])
        return self._describe(file, offset, int(row - self._first_rows[file]))

    def _file_of(self, rows: npt.NDArray[np.int64] | np.int64) -> npt.NDArray[np.int64]:
        # Of files with the same first row all but the last are empty.
        return np.searchsorted(self._first_rows, rows, side="right") - 1

    def _describe(self, file: int, offset: int, record: int) -> str:
        return f"record {record} of {self._paths[file]!r}, at byte {offset}"

    @property
    def fingerprint(self) -> str:
        """A hash of the names and sizes of the files."""
        return files_fingerprint(self._paths, self._file_bytes)

    def _open(self, number: int) -> LocalFile | RemoteFile:
        file = open_file(self._paths[number])
        if file.file_bytes != self._file_bytes[number]:
            raise DataError(
                f"{self._paths[number]!r} has {file.file_bytes} bytes, but had "
                f"{self._file_bytes[number]} when it was indexed; start again, and it is indexed "
                "anew."
            )
        return file

    def _open_to_read(
        self, file: int, offset: int, length: int, record: int
    ) -> LocalFile | RemoteFile:
        try:
            opened = self._open_files[file]
            opened.will_read(offset, FRAME_BYTES + length)
        except FILE_ERRORS as error:
            raise self._unreadable(file, offset, record, error) from error
        return opened

    def _unreadable(self, file: int, offset: int, record: int, error: Exception) -> DataError:
        return DataError(f"Cannot read {self._describe(file, offset, record)}: {error}")

    def _read_one(
        self, opened: LocalFile | RemoteFile, file: int, offset: int, length: int, record: int
    ) -> bytes:
        try:
            # Two reads: one of the whole frame would have to be copied to cut the data out, which
            # takes longer. The header was checked when it was indexed.
            data = opened.read_at(offset + HEADER.size, length)
            footer = opened.read_at(offset + HEADER.size + length, FOOTER.size)
        except FILE_ERRORS as error:
            raise self._unreadable(file, offset, record, error) from error
        if len(data) + len(footer) != length + FOOTER.size:
            wrong = "the file now ends before the end of it"
        elif FOOTER.unpack(footer)[0] != masked_crc32c(data):
            wrong = f"its {length} bytes do not have the checksum that follows them"
        else:
            return data
        raise DataError(
            f"Cannot use {self._describe(file, offset, record)}: {wrong}. Copy the file again; if "
            "it was replaced while it was read, start again."
        )


def _joined_offsets(indexes: list[RecordIndex]) -> npt.NDArray[np.int64]:
    offsets = np.zeros(1 + sum(len(index.lengths) for index in indexes), np.int64)
    if len(offsets) > 1:
        np.concatenate([index.lengths for index in indexes], out=offsets[1:], casting="unsafe")
        offsets[1:] += FRAME_BYTES
        np.cumsum(offsets, out=offsets)
    return offsets


def _starts(sizes: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.cumsum([0, *sizes[:-1]], dtype=np.int64)
