"""Packed files, read back by TensorFlow's and array_record's own readers; and interrupted runs."""

from __future__ import annotations

import functools
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from array_record.python.array_record_module import ArrayRecordReader
from PIL import Image

from tf_largebatch.core.errors import ConfigurationError, DataError
from tf_largebatch.data import ArraySource
from tf_largebatch.data._record_writers import write_array_records, write_tfrecords

ROOT = Path(__file__).parents[2]
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


def jpeg(colour: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (20, 15), (colour, 30, 200)).save(file, "JPEG")
    return file.getvalue()


def records_of(path: Path | str) -> list[bytes]:
    """By the readers of the libraries that define the formats."""
    if str(path).endswith(".tfrecord"):
        return list(tf.data.TFRecordDataset(str(path)).as_numpy_iterator())
    reader = ArrayRecordReader(str(path))
    return reader.read(list(range(reader.num_records())))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@both_formats
@pytest.mark.parametrize(("num_rows", "num_shards"), [(1, 1), (37, 5), (16, 16), (50, 1)])
def test_the_records_are_the_rows_in_order(
    tmp_path: Path, record_format: str, num_rows: int, num_shards: int
) -> None:
    images, labels = random_bytes(num_rows), [7 * i % 5 for i in range(num_rows)]
    images[0] = b""
    packed = WRITERS[record_format](
        BytesSource(images, labels),
        tmp_path / "new" / "folder",
        name="train",
        num_shards=num_shards,
        check_images=False,
    )
    files = [Path(file) for file in packed.files]
    assert [file.name for file in files] == [
        f"train-{s:05d}-of-{num_shards:05d}.{record_format}" for s in range(num_shards)
    ]
    assert set(os.listdir(files[0].parent)) == {"train.json", *(file.name for file in files)}
    assert (packed.num_rows, packed.num_kept) == (num_rows, 0)
    assert packed.size_bytes == sum(file.stat().st_size for file in files)

    shards = [records_of(file) for file in files]
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    parsed = [
        tf.io.parse_single_example(
            record,
            {
                "image/encoded": tf.io.FixedLenFeature([], tf.string),
                "image/class/label": tf.io.FixedLenFeature([], tf.int64),
            },
        )
        for shard in shards
        for record in shard
    ]
    assert [row["image/encoded"].numpy() for row in parsed] == images
    assert [row["image/class/label"].numpy() for row in parsed] == labels


@both_formats
def test_names_of_files_and_classes_are_kept(tmp_path: Path, record_format: str) -> None:
    source = NamedSource(random_bytes(3), [0, 1, 1])
    (file,) = WRITERS[record_format](source, tmp_path, check_images=False).files
    examples = [tf.train.Example.FromString(record) for record in records_of(file)]
    names = [example.features.feature["image/filename"].bytes_list.value for example in examples]
    assert [list(name) for name in names] == [[b"0.jpg"], [b"1.jpg"], [b"2.jpg"]]
    manifest = json.loads((tmp_path / "data.json").read_text())
    assert manifest["class_names"] == ["cat", "dog"]
    assert (manifest["num_rows"], manifest["num_shards"]) == (3, 1)


def test_array_records_are_read_one_by_one(tmp_path: Path) -> None:
    (file,) = write_array_records(
        BytesSource(random_bytes(3), [0] * 3), tmp_path, check_images=False
    ).files
    options = ArrayRecordReader(file).writer_options_string().split(",")
    assert {"group_size:1", "uncompressed"} <= set(options)


def test_the_number_of_shards_follows_the_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tf_largebatch.data._pack_plan.SHARD_BYTES", 10_000)
    source = BytesSource([bytes(1_000)] * 73, [0] * 73)
    assert len(write_tfrecords(source, tmp_path, check_images=False).files) == 7


def test_progress_ends_with_all_rows_and_can_stop_the_run(tmp_path: Path) -> None:
    source = BytesSource(random_bytes(64), [0] * 64, seconds=0.1)
    seen: list[tuple[int, int]] = []

    def interrupt(done: int, total: int) -> None:
        seen.append((done, total))
        if list(tmp_path.glob("data-*")):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_tfrecords(source, tmp_path, num_shards=4, check_images=False, progress=interrupt)
    assert not [path for path in os.listdir(tmp_path) if path.startswith(".")]
    assert 1 <= len(list(tmp_path.glob("data-*"))) < 4

    packed = write_tfrecords(
        source, tmp_path, check_images=False, progress=lambda *counts: seen.append(counts)
    )
    assert 1 <= packed.num_kept < 4
    assert {total for _, total in seen} == {64}
    assert seen[-1] == (64, 64)


@both_formats
def test_broken_images_are_all_named_and_other_shards_are_finished(
    tmp_path: Path, record_format: str
) -> None:
    images = [jpeg(colour) for colour in range(40)]
    good = {row: images[row] for row in (3, 21, 25)}
    images[3], images[21], images[25] = b"no image", images[21][:300], b""
    write = WRITERS[record_format]
    with pytest.raises(DataError) as caught:
        write(NamedSource(images, [0] * 40), tmp_path, num_shards=4)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("3 of the images cannot be decoded")
    assert [line.split(": ")[0] for line in lines[1:]] == [
        f"  row {row} (/photos/cat/{row}.jpg)" for row in (3, 21, 25)
    ]
    assert all(len(line.split(": ", 1)[1]) > 10 for line in lines[1:])
    finished = {path.name for path in tmp_path.glob("data-*")}
    assert finished == {f"data-{s:05d}-of-00004.{record_format}" for s in (1, 3)}
    assert not list(tmp_path.glob(".*"))

    # With so few rows all are compared, so that the whole images make another source.
    for row, image in good.items():
        images[row] = image
    write(NamedSource(images, [0] * 40), tmp_path / "good", num_shards=4)
    for name in finished:
        assert (tmp_path / name).read_bytes() == (tmp_path / "good" / name).read_bytes()


def test_a_repaired_image_is_packed_by_the_same_call(tmp_path: Path) -> None:
    images = [jpeg(row % 200) for row in range(200)]
    images[1] = b"no image"  # of 200 rows, 64 spread evenly are compared: 0, 3, 6, ...
    with pytest.raises(DataError, match=r"row 1: .+"):
        write_tfrecords(BytesSource(images, [0] * 200), tmp_path, num_shards=10)
    images[1] = jpeg(1)
    packed = write_tfrecords(BytesSource(images, [0] * 200), tmp_path, num_shards=10)
    assert packed.num_kept == 9
    assert sum(len(records_of(file)) for file in packed.files) == 200


def _other_label(source: BytesSource) -> None:
    source._labels[0] = 1


def _other_bytes(source: BytesSource) -> None:
    source._images[-1] += b"!"


def _fewer_rows(source: BytesSource) -> None:
    source._images, source._labels = source._images[1:], source._labels[1:]


def _other_classes(source: BytesSource) -> None:
    source.class_names = ("cat", "cow")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        (_other_label, {}, "fingerprint: '[0-9a-f]{64}' there, '[0-9a-f]{64}' now"),
        (_other_bytes, {}, "fingerprint"),
        (_fewer_rows, {}, "num_rows: 30 there, 29 now"),
        (_other_classes, {}, r"class_names: 2 names 'cat', 'dog', .* there, 2 names 'cat', 'cow'"),
        (None, {"num_shards": 3}, "num_shards: 2 there, 3 now"),
        (None, {"record_format": "array_record"}, "'tfrecord' there, 'array_record' now"),
    ],
)
def test_shards_of_something_else_are_refused(
    tmp_path: Path,
    change: Callable[[BytesSource], None] | None,
    arguments: dict[str, Any],
    message: str,
) -> None:
    source = NamedSource(random_bytes(30), [0] * 30)
    write_tfrecords(source, tmp_path, num_shards=2, check_images=False)
    before = contents(tmp_path)
    if change:
        change(source)
    write = WRITERS[arguments.pop("record_format", "tfrecord")]
    with pytest.raises(DataError, match=message):
        write(source, tmp_path, check_images=False, **arguments)
    assert contents(tmp_path) == before
    # Under another name there is room for it.
    write(source, tmp_path, name="other", check_images=False, **arguments)
    assert before.items() <= contents(tmp_path).items()


def test_shards_without_a_manifest_and_foreign_manifests_are_refused(tmp_path: Path) -> None:
    source = BytesSource(random_bytes(3), [0] * 3)
    (tmp_path / "data-00000-of-00009.array_record").touch()
    with pytest.raises(DataError, match=r"data-00000-of-00009.array_record is there, but not"):
        write_tfrecords(source, tmp_path, check_images=False)
    for text in ("", "[]", '{"format_version": 1}', '{"format_version": 2, "num_rows": 3}'):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(DataError, match=r"is not the manifest|has format version 2"):
            write_tfrecords(source, tmp_path, name="other", check_images=False)


@pytest.mark.parametrize(
    ("source", "arguments", "message"),
    [
        (ArraySource(np.zeros(3)), {}, r"those of ArraySource are TensorSpec\(shape=\(\)"),
        (ArraySource((np.zeros((3, 2)), np.zeros(3))), {}, r"must be \(encoded image, label\)"),
        ("folder", {}, "source must have __len__, element_spec and gather, but is 'folder'"),
        (None, {"num_shards": 4}, r"num_shards must be in \[1, 3\], but is 4"),
        (None, {"num_shards": 0}, "num_shards must be in"),
        (None, {"name": "a/b"}, "name must be letters"),
        (None, {"name": "*"}, "name must be letters"),
        (None, {"directory": "gs://bucket/x"}, "directory must be local"),
    ],
)
def test_wrong_arguments(
    tmp_path: Path, source: Any, arguments: dict[str, Any], message: str
) -> None:
    source = BytesSource(random_bytes(3), [0] * 3) if source is None else source
    directory = arguments.pop("directory", tmp_path)
    with pytest.raises(ConfigurationError, match=message):
        write_tfrecords(source, directory, **arguments)
    assert not os.listdir(tmp_path)


def test_no_array_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "array_record.python.array_record_module", None)
    source = BytesSource(random_bytes(3), [0] * 3)
    with pytest.raises(ConfigurationError, match=r"pip install 'tf_largebatch\[records\]'"):
        write_array_records(source, tmp_path)


def test_a_row_that_cannot_be_read_and_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    class Unreadable(BytesSource):
        def take(self, rows: np.ndarray) -> Any:
            if 17 in rows:
                raise DataError("row 17: the file is gone.")
            return super().take(rows)

    source = Unreadable(random_bytes(1000), [0] * 1000)
    with pytest.raises(
        DataError, match=r"^Rows 16 to 31 cannot be read: row 17: the file is gone\.$"
    ):
        write_tfrecords(source, tmp_path, check_images=False)
    assert os.listdir(tmp_path) == ["data.json"]
    (tmp_path / ".data.lock").mkdir()
    with pytest.raises(DataError, match=r"cannot be written to: .*Is a directory"):
        write_tfrecords(source, tmp_path, check_images=False)
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"The folder .*/file/x cannot be made: Not a directory"):
        write_tfrecords(source, tmp_path / "file" / "x", check_images=False)


def test_two_runs_at_once(tmp_path: Path) -> None:
    source = BytesSource(random_bytes(48), [0] * 48, seconds=0.1)
    started = threading.Event()
    first = threading.Thread(
        target=write_tfrecords,
        args=(source, tmp_path),
        kwargs={"check_images": False, "progress": lambda *_: started.set()},
    )
    first.start()
    assert started.wait(10)
    with pytest.raises(DataError, match="Another process packs into"):
        write_tfrecords(source, tmp_path, check_images=False)
    first.join()
    assert write_tfrecords(source, tmp_path, check_images=False).num_kept == 1
    assert sorted(os.listdir(tmp_path)) == ["data-00000-of-00001.tfrecord", "data.json"]


# What follows needs processes of their own: to be killed, or to have a limit. One process imports
# TensorFlow; before it runs any op, it forks one for each.

IN_FORKS = """
import sys
from pathlib import Path
from tests.data.test_record_writers import kill_while_packing, pack_on_full_disks
kill_while_packing(Path(sys.argv[1]) / "killed")
pack_on_full_disks(Path(sys.argv[1]) / "full")
"""
KILL_AT_BYTES = (1, 400_000, 2_500_000)
LIMITS_BYTES = (100, 1_000, 400_000)  # below the manifest, in a first record, in a shard


def forked(action: Callable[[], None], *, num_cores: int) -> int:
    child = os.fork()
    if child == 0:
        # As many shards are written at once, whatever the machine has.
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:num_cores])
        try:
            action()
        finally:
            os._exit(0)
    return child


def interrupted_source() -> NamedSource:
    return NamedSource(random_bytes(200, size=30_000), [i % 2 for i in range(200)], seconds=0.01)


def pack_interrupted_source(folder: Path, record_format: str) -> Any:
    return WRITERS[record_format](interrupted_source(), folder, num_shards=9, check_images=False)


def size_bytes(folder: Path) -> int:
    total = 0
    for entry in os.scandir(folder) if folder.exists() else ():
        try:
            total += entry.stat().st_size
        except FileNotFoundError:  # renamed meanwhile
            continue
    return total


def kill_while_packing(folder: Path) -> None:
    """Kills a packer at each point, counted in bytes; each goes on where the last was killed."""
    for record_format in WRITERS:
        target = folder / record_format
        for point, at_bytes in enumerate(KILL_AT_BYTES):
            child = forked(
                functools.partial(pack_interrupted_source, target, record_format), num_cores=2
            )
            deadline = time.monotonic() + 20
            while size_bytes(target) < at_bytes and time.monotonic() < deadline:
                time.sleep(0.001)
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            assert os.WIFSIGNALED(status), "the packer had ended before it was killed"
            shutil.copytree(target, f"{target}_{point}")


def pack_on_full_disks(folder: Path) -> None:
    for record_format in WRITERS:
        for limit_bytes in LIMITS_BYTES:
            target = folder / f"{record_format}_{limit_bytes}"
            pack = functools.partial(pack_with_limit, target, record_format, limit_bytes)
            os.waitpid(forked(pack, num_cores=1), 0)


def pack_with_limit(target: Path, record_format: str, limit_bytes: int) -> None:
    """No file can grow beyond the limit, which fails as a full disk does."""
    source = interrupted_source()
    source._images[:100] = b"small"  # the first four shards are below the larger limit
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    try:
        WRITERS[record_format](source, target, num_shards=8, check_images=False)
    except DataError as error:
        print(f"{target.name}: {error}", flush=True)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder that all that leaves behind, and what was printed."""
    folder = tmp_path_factory.mktemp("interrupted")
    done = subprocess.run(
        [sys.executable, "-c", IN_FORKS, str(folder)],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder, done.stdout.splitlines()


@both_formats
def test_after_sigkill_the_same_call_goes_on(
    tmp_path: Path, interrupted: tuple[Path, list[str]], record_format: str
) -> None:
    pack_interrupted_source(tmp_path, record_format)
    expected = contents(tmp_path)
    num_partial, kept = 0, []
    for point in range(len(KILL_AT_BYTES)):
        folder = interrupted[0] / "killed" / f"{record_format}_{point}"
        found = contents(folder)
        whole = {name: data for name, data in found.items() if not name.startswith(".")}
        assert whole.items() <= expected.items()
        num_partial += len([name for name in found if name.endswith(".partial")])
        kept.append(len([name for name in whole if name != "data.json"]))
        assert pack_interrupted_source(folder, record_format).num_kept == kept[-1]
        assert contents(folder) == expected
    assert num_partial > 0 and kept == sorted(kept) and 0 < kept[-1] < 9  # kills in the middle


@both_formats
def test_a_full_disk(
    tmp_path: Path, interrupted: tuple[Path, list[str]], record_format: str
) -> None:
    folder, printed = interrupted
    for limit_bytes, num_whole in zip(LIMITS_BYTES, (0, None, 4), strict=True):
        target = folder / "full" / f"{record_format}_{limit_bytes}"
        (line,) = [line for line in printed if line.startswith(f"{target.name}: ")]
        assert " cannot be written: " in line and "File too large" in line
        names = {name for name in os.listdir(target) if name != "data.json"}
        assert (limit_bytes == 100) == ("data.json cannot be written" in line)
        if num_whole is not None:
            assert names == {f"data-{s:05d}-of-00008.{record_format}" for s in range(num_whole)}
