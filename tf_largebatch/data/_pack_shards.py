"""Shards written in parallel, each under a hidden name until it is whole."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import closing
from pathlib import Path
from typing import Protocol

import tensorflow as tf

from tf_largebatch.core.errors import DataError
from tf_largebatch.data._pack_plan import Shard, publish
from tf_largebatch.data._pack_rows import Row, RowReader

_REPORT_SECONDS = 0.2
_MOST_LISTED = 100  # broken images in a message


class ShardWriter(Protocol):
    def write(self, record: bytes) -> None: ...

    def close(self) -> None: ...


OpenWriter = Callable[[Path], ShardWriter]


class ShardPacker:
    """Fills shards from a source, as many at once as there are CPU cores.

    Args:
        reader: where the rows come from.
        open_writer: opens a file of records.
    """

    def __init__(self, reader: RowReader, open_writer: OpenWriter) -> None:
        self._reader = reader
        self._open_writer = open_writer
        self._stop = threading.Event()
        self._rows_done: dict[Shard, int] = {}
        self._broken: list[Row] = []

    def pack(self, shards: Sequence[Shard], report: Callable[[int], None]) -> None:
        """Writes all of them.

        Args:
            shards: what is missing.
            report: called with the number of rows done, in this thread.

        Raises:
            DataError: a row cannot be read, images are broken, or a file cannot be written.
        """
        with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "pack") as pool:
            futures = [pool.submit(self._write_shard, shard) for shard in shards]
            try:
                self._wait(futures, report)
            finally:
                self._stop.set()  # the pool waits for its threads, whatever ended this one
        if self._broken:
            raise DataError(self._describe_broken())

    def _wait(self, futures: Sequence[Future[None]], report: Callable[[int], None]) -> None:
        pending = set(futures)
        while pending:
            done, pending = wait(pending, _REPORT_SECONDS, FIRST_EXCEPTION)
            for future in done:
                future.result()
            report(sum(list(self._rows_done.values())))

    def _write_shard(self, shard: Shard) -> None:
        if self._stop.is_set():
            return
        try:
            if self._fill(shard):
                publish(shard.partial_path, shard.path)
        # array_record tells of a full disk by a RuntimeError.
        except (OSError, RuntimeError, tf.errors.OpError) as error:
            raise DataError(
                f"{shard.path} cannot be written: {error}. Shards that are whole stay, and the "
                "same call writes the others."
            ) from error
        finally:
            shard.partial_path.unlink(missing_ok=True)

    def _fill(self, shard: Shard) -> bool:
        """Whether the shard is whole: not stopped, and no image in it is broken."""
        whole = True
        with closing(self._open_writer(shard.partial_path)) as writer:
            for rows in self._reader.chunks(shard.begin, shard.end):
                if self._stop.is_set():
                    return False
                broken = [row._replace(image=b"") for row in rows if row.complaint is not None]
                self._broken.extend(broken)
                whole = whole and not broken
                if whole:
                    for row in rows:
                        writer.write(self._reader.example(row))
                self._rows_done[shard] = rows[-1].number + 1 - shard.begin
        return whole

    def _describe_broken(self) -> str:
        rows = sorted(self._broken)
        listed = [f"  {self._reader.describe(row.number)}: {row.complaint}" for row in rows]
        rest = len(listed) - _MOST_LISTED
        return "\n".join(
            [
                f"{len(rows)} of the images cannot be decoded. Repair them, and the same call "
                "writes the shards that are missing (where it finds another fingerprint, as in "
                "small sets, remove the manifest and the shards first); or leave them out, and "
                "pack all rows under another name.",
                *listed[:_MOST_LISTED],
                *([f"  and {rest} more"] if rest > 0 else []),
            ]
        )
