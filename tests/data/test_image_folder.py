from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tf_largebatch.core.errors import ConfigurationError, DataError
from tf_largebatch.data._image_folder import ImageFolderSource
from tf_largebatch.data._sources import RandomAccessSource


def make_files(root: Path, *names: str) -> Path:
    """Each file holds its own name."""
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    return root


def gathered(source: ImageFolderSource, rows: list[int]) -> tuple[list[bytes], list[int]]:
    dataset = tf.data.Dataset.from_tensors(tf.constant(rows, tf.int64)).map(source.gather)
    images, labels = next(iter(dataset))
    return images.numpy().tolist(), labels.numpy().tolist()


def test_rows_are_sorted_by_class_and_path_whatever_the_file_system_lists(tmp_path: Path) -> None:
    make_files(
        tmp_path,
        "b/2.jpg",
        "b/10.JPEG",
        "b/.hidden.jpg",
        "b/notes.txt",
        "é/x.png",
        "B/deep/er/1.bmp",
        "B/deep.jpg",
        "B/.cache/2.jpg",
        ".git/3.jpg",
        "README.md",
    )
    source = ImageFolderSource(tmp_path)
    assert isinstance(source, RandomAccessSource)
    assert source.class_names == ("B", "b", "é")  # code points: capitals first, accents last
    expected = ["B/deep.jpg", "B/deep/er/1.bmp", "b/10.JPEG", "b/2.jpg", "é/x.png"]
    assert len(source) == 5
    assert [source.path(row) for row in range(5)] == [f"{tmp_path}/{name}" for name in expected]
    assert source.describe_row(2) == f"{tmp_path}/b/10.JPEG"
    images, labels = gathered(source, [4, 0, 0, 3, 1, 2])
    assert images == [expected[row].encode() for row in (4, 0, 0, 3, 1, 2)]
    assert labels == [2, 0, 0, 1, 0, 1]
    assert [source.label(row) for row in range(5)] == [0, 0, 1, 1, 2]


def test_specs_and_an_empty_batch(tmp_path: Path) -> None:
    source = ImageFolderSource(make_files(tmp_path, "a/1.jpg"))
    assert source.element_spec == (tf.TensorSpec([], tf.string), tf.TensorSpec([], tf.int64))
    batched = tf.data.Dataset.from_tensors(tf.zeros([3], tf.int64)).map(source.gather)
    assert batched.element_spec == (tf.TensorSpec([3], tf.string), tf.TensorSpec([3], tf.int64))
    assert gathered(source, []) == ([], [])


def test_bytes_that_are_no_text_come_back_whole(tmp_path: Path) -> None:
    content = bytes(range(256)) + b"\0\0"
    make_files(tmp_path, "a/1.jpg")
    (tmp_path / "a/1.jpg").write_bytes(content)
    assert gathered(ImageFolderSource(tmp_path), [0])[0] == [content]


def test_a_validation_folder_keeps_the_labels_of_training(tmp_path: Path) -> None:
    train = ImageFolderSource(make_files(tmp_path / "train", "a/1.jpg", "b/1.jpg", "c/1.jpg"))
    make_files(tmp_path / "val", "c/1.jpg", "a/1.jpg")
    validation = ImageFolderSource(tmp_path / "val", class_names=train.class_names)
    assert validation.class_names == ("a", "b", "c")
    assert gathered(validation, [0, 1]) == ([b"a/1.jpg", b"c/1.jpg"], [0, 2])
    assert ImageFolderSource(tmp_path / "val").label(1) == 1  # what would happen without

    other_order = ImageFolderSource(tmp_path / "train", class_names=["c", "b", "a"])
    assert gathered(other_order, [0, 2]) == ([b"c/1.jpg", b"a/1.jpg"], [0, 2])


def test_own_extensions(tmp_path: Path) -> None:
    make_files(tmp_path, "a/1.jpg", "a/2.WEBP", "a/3")
    source = ImageFolderSource(tmp_path, extensions=(".webp",))
    assert [source.path(row) for row in range(len(source))] == [f"{tmp_path}/a/2.WEBP"]


def test_linked_folders_and_files_are_followed(tmp_path: Path) -> None:
    make_files(tmp_path / "elsewhere", "1.jpg")
    make_files(tmp_path / "set", "b/2.jpg")
    (tmp_path / "set/a").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "set/b/1.jpg").symlink_to(tmp_path / "elsewhere/1.jpg")
    source = ImageFolderSource(tmp_path / "set")
    assert gathered(source, [0, 1, 2]) == ([b"1.jpg", b"1.jpg", b"b/2.jpg"], [0, 1, 1])


def test_what_cannot_be_used_is_one_error(tmp_path: Path) -> None:
    make_files(tmp_path, "a/good.jpg", *[f"b/{number:02}.jpg" for number in range(11)], "d/no.txt")
    for number in range(11):
        (tmp_path / f"b/{number:02}.jpg").write_bytes(b"")
    (tmp_path / "a/broken.jpg").symlink_to(tmp_path / "nowhere")
    (tmp_path / "c").mkdir()
    with pytest.raises(DataError) as caught:
        ImageFolderSource(tmp_path)
    first, *lines = str(caught.value).splitlines()
    assert f"{tmp_path} has 14 files or folders that cannot be used" in first
    assert lines[0] == f"  {tmp_path}/a/broken.jpg: cannot be read (No such file or directory)"
    assert lines[1] == f"  {tmp_path}/b/00.jpg: is empty (0 bytes)"
    assert len(lines) == 11
    assert lines[-1] == "  and 4 more"


def test_folders_without_images_are_named(tmp_path: Path) -> None:
    make_files(tmp_path, "a/1.jpg", "d/no.txt")
    (tmp_path / "c").mkdir()
    with pytest.raises(DataError, match="has 2 files or folders") as caught:
        ImageFolderSource(tmp_path)
    assert f"{tmp_path}/c: holds no images" in str(caught.value)
    assert f"{tmp_path}/d: holds no images" in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_forbidden_files_and_folders_are_named(tmp_path: Path) -> None:
    make_files(tmp_path, "a/1.jpg", "b/1.jpg")
    (tmp_path / "a/1.jpg").chmod(0)
    (tmp_path / "b").chmod(0)
    try:
        with pytest.raises(DataError, match=r"has 2 files .*(\n.*){2}Permission denied"):
            ImageFolderSource(tmp_path)
    finally:
        (tmp_path / "b").chmod(0o700)


def test_a_file_that_vanishes_is_named_with_its_row(tmp_path: Path) -> None:
    source = ImageFolderSource(make_files(tmp_path, "a/1.jpg", "a/2.jpg"))
    (tmp_path / "a/2.jpg").unlink()
    with pytest.raises(tf.errors.OpError, match=f"row 1: {tmp_path}/a/2.jpg cannot be read"):
        gathered(source, [0, 1])


@pytest.mark.parametrize(
    ("files", "arguments", "error", "message"),
    [
        (["1.jpg"], {}, ConfigurationError, "has no class folders; images must lie in"),
        (["a/1.jpg", "2.jpg"], {}, ConfigurationError, "has 1 images outside of its class folders"),
        (["a/1.jpg"], {"extensions": ".jpg"}, ConfigurationError, "extensions must be texts"),
        (["a/1.jpg"], {"extensions": ["jpg"]}, ConfigurationError, "extensions must be texts"),
        (["a/1.jpg"], {"class_names": "a"}, ConfigurationError, "a sequence of different names"),
        (["a/1.jpg"], {"class_names": ["a", "a"]}, ConfigurationError, "of different names"),
        (
            ["a/1.jpg", "b/1.jpg", "c/1.jpg"],
            {"class_names": ["b"]},
            ConfigurationError,
            "has 2 class folders that class_names lacks: a, c",
        ),
    ],
)
def test_refused(tmp_path: Path, files, arguments, error, message: str) -> None:
    with pytest.raises(error, match=message):
        ImageFolderSource(make_files(tmp_path, *files), **arguments)


def test_a_directory_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere cannot be listed: .*No such file"):
        ImageFolderSource(tmp_path / "nowhere")


def test_rows_that_do_not_exist(tmp_path: Path) -> None:
    source = ImageFolderSource(make_files(tmp_path, "a/1.jpg"))
    for row in (-1, 1):
        with pytest.raises(ConfigurationError, match=r"row must be in \[0, 0\]"):
            source.path(row)


def test_remote_folders_through_gfile() -> None:
    """TensorFlow's file system in memory stands for a store behind the network."""
    root = "ram://image_folder_test"
    for name in ("b/2.jpg", "b/1.jpg", "a/deep/1.png", "a/.hidden/2.jpg", "a/note.txt"):
        tf.io.gfile.makedirs(os.path.dirname(f"{root}/{name}"))
        with tf.io.gfile.GFile(f"{root}/{name}", "wb") as file:
            file.write(name.encode())
    source = ImageFolderSource(root)
    assert source.class_names == ("a", "b")
    assert [source.path(row) for row in range(3)] == [
        f"{root}/a/deep/1.png",
        f"{root}/b/1.jpg",
        f"{root}/b/2.jpg",
    ]
    assert gathered(source, [2, 0, 1]) == ([b"b/2.jpg", b"a/deep/1.png", b"b/1.jpg"], [1, 0, 1])
    tf.io.gfile.remove(f"{root}/b/1.jpg")
    with pytest.raises(tf.errors.OpError, match=r"row 1: ram://.*cannot be read"):
        gathered(source, [1])
    with pytest.raises(DataError, match="cannot be listed"):
        ImageFolderSource("ram://no_such_folder")


def test_memory_of_a_row_is_its_path_below_the_class_and_eight_bytes(tmp_path: Path) -> None:
    make_files(tmp_path, *[f"n01440764/n01440764_{number:05}.JPEG" for number in range(50)])
    source = ImageFolderSource(tmp_path)
    held = [value for value in vars(source).values() if isinstance(value, bytes | np.ndarray)]
    sizes = sum(len(value) if isinstance(value, bytes) else value.nbytes for value in held)
    # One offset more than rows, and one number for the class.
    assert sizes == 50 * (len("n01440764_00000.JPEG") + 8) + 8 + 8


def test_a_class_folder_that_links_to_nothing_is_named(tmp_path: Path) -> None:
    for name in ("a", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.jpg").write_bytes(b"any")
    (tmp_path / "b").symlink_to(tmp_path / "a disk that is not mounted")
    (tmp_path / "c" / "more").symlink_to(tmp_path / "nor that one")
    with pytest.raises(DataError, match=r"/b/: cannot be listed(.|\n)*/c/more/: cannot be listed"):
        ImageFolderSource(tmp_path)
