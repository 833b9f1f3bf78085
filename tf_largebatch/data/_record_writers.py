"""Packs a source of encoded images into files of records, in parallel, atomically, resumable."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf

from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.data._pack_plan import (
    Manifest,
    checked_num_shards,
    checked_target,
    choose_num_shards,
    locked,
    plan_shards,
    remove_partial_files,
    store_manifest,
)
from tf_largebatch.data._pack_rows import RowReader
from tf_largebatch.data._pack_shards import OpenWriter, ShardPacker
from tf_largebatch.data._sources import RandomAccessSource

ProgressFn = Callable[[int, int], None]


@dataclass(frozen=True)
class PackedFiles:
    """What `write_tfrecords` and `write_array_records` leave behind.

    Attributes:
        files: the paths of all shards, in the order of the rows.
        num_rows: rows in them.
        size_bytes: of all of them together.
        num_kept: how many were whole already, from an earlier run.
    """

    files: tuple[str, ...]
    num_rows: int
    size_bytes: int
    num_kept: int


def write_tfrecords(
    source: RandomAccessSource,
    directory: str | os.PathLike[str],
    *,
    name: str = "data",
    num_shards: int | None = None,
    check_images: bool = True,
    progress: ProgressFn | None = None,
) -> PackedFiles:
    """Packs images and labels into TFRecord files that `TFRecordSource` reads by row.

    Each row becomes a `tf.train.Example` with `image/encoded` (the bytes, as they are),
    `image/class/label` (the label, as it is) and, where the source has files
    (`source.path(row)`), `image/filename` (the last part of that path);
    `parse_image_examples` reads them. The rows stay in the order of the source, so classes stay
    together: shuffling is the sharder's work, at no cost to it, and needs no shuffled files.

    Files are `NAME-00003-of-00064.tfrecord`: shard `s` of `k` holds rows `s * n // k` up to
    `(s + 1) * n // k`. `NAME.json` beside them tells what they were made of, with the class
    names. A shard is written under a hidden name, flushed to the disk, and renamed, so after
    any interruption, SIGKILL and a full disk included, there are whole shards only; the same call
    again keeps these, removes what is unfinished, and writes the rest, with the same bytes as
    one undisturbed run. The source counts as the same when the number of rows, the class names,
    the names of all files (with that of their folders) and the bytes and labels of 64 rows, spread
    evenly, are equal; a file replaced in between may go unnoticed. One process at a time.

    As many shards are written at once as there are CPU cores. CPU time for a row of 90 kB is about
    0.6 ms, and 2.5 to 3 ms more with `check_images`: that of two epochs of training crops.

    Args:
        source: whose rows are `(encoded image, label)`, as `ImageFolderSource`: string `[]` and
            an integer `[]`.
        directory: a local folder, made if need be.
        name: start of the file names: letters, digits, `_`, `.` and `-`.
        num_shards: how many files, from 1 to the number of rows, at most 99,999; `None` is as many
            as make a shard about 128 MiB, or as an interrupted run has begun with. More files
            than cores are needed for all cores to work.
        check_images: decode every image, so that broken ones are found now and not in training.
            All of them are reported at the end; shards without them are finished all the same.
            Shards kept from an earlier run are not checked again.
        progress: called with (rows done, rows in all) from the calling thread a few times a second.
            What it raises stops the packing.

    Raises:
        ConfigurationError: an argument is out of range, the folder is remote, or the rows of the
            source are something else.
        DataError: a row cannot be read or decoded; a file cannot be written (the disk is full);
            the folder holds shards of something else under this name; another process is at work
            there. Finished shards stay.
    """
    return _write(source, directory, "tfrecord", name, num_shards, check_images, progress)


def write_array_records(
    source: RandomAccessSource,
    directory: str | os.PathLike[str],
    *,
    name: str = "data",
    num_shards: int | None = None,
    check_images: bool = True,
    progress: ProgressFn | None = None,
) -> PackedFiles:
    """Packs images and labels into ArrayRecord files that `ArrayRecordSource` reads by row.

    As `write_tfrecords`, with files `NAME-00003-of-00064.array_record`. They are written with
    `group_size:1`, so that to read a row is to read no other, and `uncompressed`, as images are
    compressed already: the default, Zstandard, made files of the same size at 2.5 to 4 times the
    CPU time.

    Args:
        source: see `write_tfrecords`; so are the others.

    Raises:
        ConfigurationError: also if array_record is not installed.
        DataError: see `write_tfrecords`.
    """
    return _write(source, directory, "array_record", name, num_shards, check_images, progress)


def _write(
    source: RandomAccessSource,
    directory: str | os.PathLike[str],
    record_format: str,
    name: str,
    num_shards: int | None,
    check_images: bool,
    progress: ProgressFn | None,
) -> PackedFiles:
    open_writer = _WRITERS[record_format]()
    reader = RowReader(source, check_images=check_images)
    if num_shards is not None:
        num_shards = checked_num_shards(num_shards, len(reader))
    folder = checked_target(directory, name)
    with locked(folder, name):
        remove_partial_files(folder, name)
        manifest = _agreed_manifest(reader, folder / f"{name}.json", record_format, num_shards)
        shards = plan_shards(folder, name, manifest)
        # No shard is without rows: one of 0 bytes was cut off by something else.
        missing = [s for s in shards if not s.path.exists() or s.path.stat().st_size == 0]
        num_kept_rows = len(reader) - sum(shard.end - shard.begin for shard in missing)
        packer = ShardPacker(reader, open_writer)
        packer.pack(missing, lambda done: _report(progress, num_kept_rows + done, len(reader)))
    return PackedFiles(
        files=tuple(str(shard.path) for shard in shards),
        num_rows=len(reader),
        size_bytes=sum(shard.path.stat().st_size for shard in shards),
        num_kept=len(shards) - len(missing),
    )


def _report(progress: ProgressFn | None, done: int, total: int) -> None:
    if progress is not None:
        progress(done, total)


def _agreed_manifest(
    reader: RowReader, path: Path, record_format: str, num_shards: int | None
) -> Manifest:
    """That of this call, stored; refused where another one is stored."""
    stored = Manifest.read(path)
    fingerprint, mean_bytes = reader.survey()
    if num_shards is None:
        num_shards = stored.num_shards if stored else choose_num_shards(len(reader), mean_bytes)
    manifest = Manifest(record_format, len(reader), num_shards, reader.class_names, fingerprint)
    if stored is None:
        store_manifest(manifest, path)
    else:
        manifest.check_same(stored, path)
        checked_num_shards(num_shards, len(reader))
    return manifest


def _tfrecord_writer() -> OpenWriter:
    return lambda path: tf.io.TFRecordWriter(str(path))


def _array_record_writer() -> OpenWriter:
    try:
        from array_record.python.array_record_module import ArrayRecordWriter
    except ImportError as error:
        raise ConfigurationError(
            f"write_array_records needs array_record, which cannot be imported ({error}); "
            "pip install 'tf_largebatch[records]'."
        ) from error

    def open_writer(path: Path) -> Any:
        return ArrayRecordWriter(str(path), "group_size:1,uncompressed")

    return open_writer


_WRITERS: dict[str, Callable[[], OpenWriter]] = {
    "tfrecord": _tfrecord_writer,
    "array_record": _array_record_writer,
}
