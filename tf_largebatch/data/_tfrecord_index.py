"""Where the records of TFRecord files lie: found once, stored beside them."""

from __future__ import annotations

import hashlib
import json
import os
import random
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from absl import logging

from tf_largebatch.core.errors import ConfigurationError, DataError
from tf_largebatch.data._record_files import (
    FILE_ERRORS,
    INDEX_SUFFIX,
    FileState,
    file_state,
    is_local,
    open_file,
)
from tf_largebatch.data._tfrecord_frames import FRAME_BYTES, record_lengths

# Changes with anything in the layout of an index, so that each version reads its own only.
_MAGIC = b"tf_largebatch TFRecord index, version 1\n"
_DIGEST_BYTES = 16
_LONGEST_DESCRIPTION_BYTES = 512

_THREADS = 16  # they wait for disks and networks; the walk itself holds the GIL
_SECONDS_BETWEEN_REPORTS = 10.0
_SHOWN_FAILURES = 5


@dataclass(frozen=True)
class RecordIndex:
    """Of one record file: its state when it was indexed, and the length of each record's data."""

    state: FileState
    lengths: npt.NDArray[np.unsignedinteger[Any]]


def load_indexes(
    paths: Sequence[str], *, index_dir: str | os.PathLike[str] | None = None
) -> list[RecordIndex]:
    """The index of each file, read where a valid one is stored, else built and stored.

    A stored index is used only if its checksum is right and the record file still has the size
    and the time of modification that it names. Files are taken by several threads, in an order
    that differs from process to process: processes that start together take over what another
    has just stored, and each index appears whole or not at all, as it is renamed into its place.
    `absl.logging.info` reports every 10 seconds how far it is.

    Args:
        paths: record files, as `expand_files` gives them.
        index_dir: a folder for the indexes, made if it is missing. `None` stores each as
            `<file>.tlb_index` beside its file. Where an index cannot be stored, it is kept in
            memory for this time only, and one warning is logged.

    Raises:
        ConfigurationError: `index_dir` is no path, or is a file.
        DataError: files that cannot be read, are compressed, truncated or corrupt: each by name,
            with the byte offset.
    """
    folder = _checked_index_dir(index_dir)
    indexes: dict[int, RecordIndex] = {}
    unusable: dict[int, DataError] = {}
    unstored: dict[int, str] = {}

    def load(number: int) -> None:
        target = _index_path(paths[number], folder)
        try:
            indexes[number], not_stored = _load_or_build(paths[number], target)
        except DataError as error:
            unusable[number] = error
        else:
            if not_stored:
                unstored[number] = f"{target}: {not_stored}"

    with ThreadPoolExecutor(_THREADS) as pool:
        # An own generator, seeded by the system: the program's random state stays as it is.
        order = random.Random().sample(range(len(paths)), len(paths))
        tasks = [pool.submit(load, number) for number in order]
        try:
            _wait_and_report(tasks)
        finally:
            pool.shutdown(cancel_futures=True)
    if unusable:
        raise _summary([unusable[number] for number in sorted(unusable)], len(paths))
    if unstored:
        logging.warning(
            "%d of %d indexes of record files could not be stored, so the next start builds them "
            "again; give an index_dir that can be written. The first is %s",
            len(unstored),
            len(paths),
            unstored[min(unstored)],
        )
    return [indexes[number] for number in range(len(paths))]


def _checked_index_dir(index_dir: str | os.PathLike[str] | None) -> str | None:
    if index_dir is None:
        return None
    folder = os.fspath(index_dir) if isinstance(index_dir, str | os.PathLike) else None
    if not isinstance(folder, str) or not folder:
        raise ConfigurationError(
            f"index_dir must be a folder's path or None, but is {index_dir!r}."
        )
    if is_local(folder) and os.path.exists(folder) and not os.path.isdir(folder):
        raise ConfigurationError(f"index_dir must be a folder, but {folder!r} is a file.")
    return folder


def _index_path(path: str, folder: str | None) -> str:
    if folder is None:
        return path + INDEX_SUFFIX
    # Files of one name in different folders need different indexes.
    digest = hashlib.sha256(path.encode("utf-8", "surrogateescape")).hexdigest()[:32]
    return os.path.join(folder, f"{os.path.basename(path)[:100]}.{digest}{INDEX_SUFFIX}")


def _wait_and_report(tasks: list[Future[None]]) -> None:
    next_report = time.monotonic() + _SECONDS_BETWEEN_REPORTS
    for done, task in enumerate(as_completed(tasks), start=1):
        task.result()
        if time.monotonic() >= next_report:
            logging.info("Indexed %d of %d record files.", done, len(tasks))
            next_report += _SECONDS_BETWEEN_REPORTS


def _summary(errors: list[DataError], num_files: int) -> DataError:
    if len(errors) == 1:
        return errors[0]
    shown = "\n".join(f"  {error}" for error in errors[:_SHOWN_FAILURES])
    more = "\n  ..." if len(errors) > _SHOWN_FAILURES else ""
    return DataError(f"{len(errors)} of {num_files} record files cannot be used:\n{shown}{more}")


def _load_or_build(path: str, target: str) -> tuple[RecordIndex, str | None]:
    """The index, and the reason for which it could not be stored, if so."""
    try:
        state = file_state(path)
        stored = read_index(target, state)
        if stored is not None:
            return stored, None
        lengths = record_lengths(open_file(path), path=path, file_bytes=state.file_bytes)
        index = RecordIndex(state, lengths.astype(_dtype_for(lengths)))
        if file_state(path) != state:
            raise DataError(f"{path!r} changed while it was indexed; is it still being written?")
    except FILE_ERRORS as error:
        raise DataError(f"{path!r} cannot be read: {error}") from error
    return index, _store(target, index)


def _dtype_for(lengths: npt.NDArray[np.unsignedinteger[Any]]) -> str:
    return "<u4" if lengths.size == 0 or lengths.max() < 2**32 else "<u8"


def read_index(target: str, state: FileState) -> RecordIndex | None:
    """The stored index of a record file in this state; `None` where there is no such thing."""
    try:
        with tf.io.gfile.GFile(target, "rb") as file:
            content = file.read()
    except FILE_ERRORS:
        return None
    return decode_index(content, state)


def encode_index(index: RecordIndex) -> bytes:
    """Magic line, description (one line of JSON), lengths, BLAKE2b of all before it."""
    description = {
        "file_bytes": index.state.file_bytes,
        "modified_ns": index.state.modified_ns,
        "records": len(index.lengths),
        "dtype": index.lengths.dtype.str,
    }
    body = _MAGIC + json.dumps(description).encode() + b"\n" + index.lengths.tobytes()
    return body + _digest(body)


def decode_index(content: bytes, state: FileState) -> RecordIndex | None:
    """What `encode_index` made for a file in this state; `None` for anything else."""
    body, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    if not body.startswith(_MAGIC) or digest != _digest(body):
        return None
    line, newline, raw = body[len(_MAGIC) :].partition(b"\n")
    if not newline or len(line) > _LONGEST_DESCRIPTION_BYTES:
        return None
    try:
        description = json.loads(line)
        described = FileState(description["file_bytes"], description["modified_ns"])
        lengths = np.frombuffer(raw, {"<u4": "<u4", "<u8": "<u8"}[description["dtype"]])
        records = description["records"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    # Each by itself first: a sum of more than 64 bits starts again at 0.
    if len(lengths) and lengths.max() > state.file_bytes:
        return None
    total = int(lengths.sum(dtype=np.uint64)) + FRAME_BYTES * len(lengths)
    if described != state or len(lengths) != records or total != state.file_bytes:
        return None
    return RecordIndex(state, lengths)


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()


def _store(target: str, index: RecordIndex) -> str | None:
    """Stores the index, whole or not at all; returns the reason where it cannot."""
    temporary = f"{target}.{uuid.uuid4().hex}{INDEX_SUFFIX}"
    try:
        tf.io.gfile.makedirs(os.path.dirname(target) or ".")
        try:
            with tf.io.gfile.GFile(temporary, "wb") as file:
                file.write(encode_index(index))
            tf.io.gfile.rename(temporary, target, overwrite=True)
        except FILE_ERRORS:
            if tf.io.gfile.exists(temporary):
                tf.io.gfile.remove(temporary)
            raise
    except FILE_ERRORS as error:
        return str(error)
    return None
