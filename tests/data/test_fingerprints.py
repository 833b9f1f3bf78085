"""By which a saved position of another data set is refused."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.data import (
    ArrayRecordSource,
    GlobalShuffleSharder,
    ImageFolderSource,
    TFRecordSource,
)


def tfrecords(folder: Path, sizes: tuple[int, ...]) -> Any:
    for number, size in enumerate(sizes):
        with tf.io.TFRecordWriter(str(folder / f"{number}.tfrecord")) as writer:
            for row in range(size):
                writer.write(b"x" * row)
    return TFRecordSource(str(folder / "*.tfrecord"))


def array_records(folder: Path, sizes: tuple[int, ...]) -> Any:
    module = pytest.importorskip("array_record.python.array_record_module")
    for number, size in enumerate(sizes):
        writer = module.ArrayRecordWriter(str(folder / f"{number}.array_record"), "group_size:1")
        for row in range(size):
            writer.write(b"x" * (row + 1))
        writer.close()
    return ArrayRecordSource(str(folder / "*.array_record"))


def image_folder(folder: Path, sizes: tuple[int, ...]) -> Any:
    for number, size in enumerate(sizes):
        for row in range(size):
            place = folder / f"class{number}" / f"{row}.jpg"
            place.parent.mkdir(exist_ok=True)
            place.write_bytes(b"any")
    return ImageFolderSource(folder)


@pytest.mark.parametrize("make", [tfrecords, array_records, image_folder])
def test_the_same_files_elsewhere_are_the_same_source_and_others_are_not(
    make: Any, tmp_path: Path
) -> None:
    for name in ("one", "other", "renamed"):
        (tmp_path / name).mkdir()
    source = make(tmp_path / "one", (3, 5))
    shutil.copytree(tmp_path / "one", tmp_path / "moved")
    moved = make(tmp_path / "moved", ())
    other = make(tmp_path / "other", (4, 4))  # as many rows
    make(tmp_path / "renamed", (3, 5))
    first = sorted(os.listdir(tmp_path / "renamed"))[0]
    os.rename(tmp_path / "renamed" / first, tmp_path / "renamed" / f"0{first}")
    renamed = make(tmp_path / "renamed", ())
    assert len({source.fingerprint, other.fingerprint, renamed.fingerprint}) == 3
    assert moved.fingerprint == source.fingerprint

    def sharder(of: Any) -> GlobalShuffleSharder:
        return GlobalShuffleSharder(of, global_batch_size=4, seed=0)

    state = sharder(source).state(epoch=0, step=1)
    sharder(moved).rest_of_epoch(state)
    with pytest.raises(ConfigurationError, match="source_fingerprint: '"):
        sharder(other).rest_of_epoch(state)
