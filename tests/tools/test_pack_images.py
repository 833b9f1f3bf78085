"""The packing tool as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tensorflow as tf
from PIL import Image

from tests.tools.tool_runs import refusal, run_tool

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    for number in range(9):
        path = folder / ("cat", "dog", "eel")[number % 3] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (30, 20), (number * 20, 90, 30)).save(path)
    return folder


def labels_and_names(pattern: Path) -> list[tuple[int, bytes]]:
    rows = []
    for file in sorted(pattern.parent.glob(pattern.name)):
        for record in tf.data.TFRecordDataset(str(file)).as_numpy_iterator():
            feature = tf.train.Example.FromString(record).features.feature
            rows.append(
                (
                    feature["image/class/label"].int64_list.value[0],
                    feature["image/filename"].bytes_list.value[0],
                )
            )
    return rows


def test_packs_a_folder(tmp_path: Path, photos: Path) -> None:
    (tmp_path / "classes.txt").write_text("eel\n\ncat\ndog\n")
    flags = ("--input=photos", "--output=out", "--name=train", "--num_shards=2")
    flags = (*flags, "--class_names=classes.txt")
    done = run_tool("pack_images", *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith("9 images of 3 classes, ") and "in 2 files, after" in line
    assert labels_and_names(tmp_path / "out" / "train-*-of-00002.tfrecord") == [
        (label, f"{number}.jpg".encode())
        for label, numbers in enumerate([(2, 5, 8), (0, 3, 6), (1, 4, 7)])
        for number in numbers
    ]
    manifest = json.loads((tmp_path / "out" / "train.json").read_text())
    assert manifest["class_names"] == ["eel", "cat", "dog"]


def test_broken_files_are_listed(tmp_path: Path, photos: Path) -> None:
    broken = photos / "dog" / "4.jpg"
    broken.write_bytes(broken.read_bytes()[:200])
    flags = ("--input=photos", "--output=out", "--format=array_record")
    done = run_tool("pack_images", *flags, cwd=tmp_path)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "1 of the images cannot be decoded" in done.stderr
    assert "dog/4.jpg" in done.stderr.splitlines()[-1]
    assert not list((tmp_path / "out").glob("data-*"))

    unchecked = run_tool("pack_images", *flags, "--nocheck_images", cwd=tmp_path)
    assert unchecked.returncode == 0, unchecked.stderr
    assert (tmp_path / "out" / "data-00000-of-00001.array_record").exists()


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--format=zip", "zip"),
        ("--output=out", "--input"),
        ("stray", "--input"),
    ],
)
def test_wrong_flags(tmp_path: Path, flag: str, message: str) -> None:
    assert message in refusal("pack_images", flag, cwd=tmp_path)


def test_wrong_values(tmp_path: Path, photos: Path) -> None:
    for flag, message in (
        ("--num_shards=10", "num_shards must be in [1, 9], but is 10"),
        ("--class_names=none.txt", "none.txt cannot be read"),
    ):
        done = run_tool("pack_images", "--input=photos", "--output=out", flag, cwd=tmp_path)
        assert done.returncode == 2
        assert message in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.glob("out/*"))
