from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
from PIL import Image

from tests.processes import run_python
from tf_largebatch.core.errors import ConfigurationError, DataError
from tf_largebatch.data import RandomAccessSource
from tf_largebatch.data._tfds_source import TfdsSource

TRAIN_ROWS, TEST_ROWS, SHARDS = 23, 5, 3
FORMATS = ("tfrecord", "array_record")
IMAGE_AND_LABEL = (tf.TensorSpec([], tf.string), tf.TensorSpec([], tf.int64))


def encoded(row: int) -> bytes:
    """A photo-like gradient, of another size in each row; PNG and JPEG in turn."""
    pixels = np.linspace(0, 255, (8 + row) * 9 * 3).reshape(8 + row, 9, 3).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG" if row % 2 else "PNG")
    return file.getvalue()


class SmallPhotos(tfds.core.GeneratorBasedBuilder):
    """Made here; with `supervised_keys`, a nested feature and an image of a fixed size."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = tfds.features.FeaturesDict(
            {
                "image": tfds.features.Image(),
                "label": tfds.features.ClassLabel(num_classes=7),
                "more": {
                    "thumbnail": tfds.features.Image(shape=(2, 3, 3)),
                    "name": tfds.features.Text(),
                },
                "box": tfds.features.BBoxFeature(),
            }
        )
        return tfds.core.DatasetInfo(
            builder=self, features=features, supervised_keys=("image", "label")
        )

    def _split_generators(self, dl_manager):
        return {
            "train": self._generate_examples(0, TRAIN_ROWS),
            "test": self._generate_examples(TRAIN_ROWS, TEST_ROWS),
        }

    def _generate_examples(self, first, count):
        for row in range(first, first + count):
            yield (
                row,
                {
                    "image": io.BytesIO(encoded(row)),
                    "label": row % 7,
                    "more": {
                        "thumbnail": np.full((2, 3, 3), row, np.uint8),
                        "name": f"photo {row}",
                    },
                    "box": tfds.features.BBox(0.0, 0.25, 0.5, 1.0),
                },
            )


class Ragged(tfds.core.GeneratorBasedBuilder):
    """Without `supervised_keys`, and with a feature that has another length in each row."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        number = tfds.features.Scalar(np.int64)
        features = {"objects": {"numbers": tfds.features.Sequence(number)}, "id": number}
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        for row in range(4):
            yield row, {"objects": {"numbers": list(range(row))}, "id": 10 * row}


def prepared(builder_class, folder: Path, file_format: str):
    builder = builder_class(data_dir=folder / file_format, file_format=file_format)
    config = tfds.download.DownloadConfig(num_shards=SHARDS, try_download_gcs=False)
    builder.download_and_prepare(download_config=config)
    return builder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tfds")


@pytest.fixture(scope="module")
def builders(folder: Path):
    return {name: prepared(SmallPhotos, folder, name) for name in FORMATS}


@pytest.fixture(params=FORMATS)
def builder(request: pytest.FixtureRequest, builders):
    return builders[request.param]


def stored(builder, split: str) -> list[dict]:
    """The rows by TFDS itself: with image bytes as they are, by its two own ways of reading."""
    leave = {"image": tfds.decode.SkipDecoding(), "more": {"thumbnail": tfds.decode.SkipDecoding()}}
    if builder.info.file_format == tfds.core.FileFormat.TFRECORD:
        config = tfds.ReadConfig(interleave_cycle_length=1, try_autocache=False)
        dataset = builder.as_dataset(split=split, decoders=leave, read_config=config)
        return list(tfds.as_numpy(dataset))
    return list(builder.as_data_source(split, decoders=leave))


def pairs(source: TfdsSource, rows) -> list[tuple[bytes, int]]:
    images, labels = source.gather(tf.constant(rows, tf.int64))
    return list(zip(images.numpy().tolist(), labels.numpy().tolist(), strict=True))


def expected_pairs(builder, split: str) -> list[tuple[bytes, int]]:
    return [(bytes(row["image"]), int(row["label"])) for row in stored(builder, split)]


def test_all_rows_in_order(builder) -> None:
    source = TfdsSource(builder, split="train")
    assert isinstance(source, RandomAccessSource)
    assert len(source) == TRAIN_ROWS
    assert source.element_spec == IMAGE_AND_LABEL
    rows = pairs(source, range(TRAIN_ROWS))
    assert rows == expected_pairs(builder, "train")
    # TFDS shuffles when it prepares, but these are the rows that were made.
    assert sorted(rows) == sorted((encoded(row), row % 7) for row in range(TRAIN_ROWS))
    assert pairs(source, []) == []


@pytest.mark.parametrize(
    "split",
    [
        "train[:80%]",
        "train[9:21]",
        "train[20:]+test[1:3]+train[:2]",
        tfds.core.ReadInstruction("train", from_=-30, to=100, unit="%"),
    ],
)
def test_parts_of_splits(builder, split) -> None:
    source = TfdsSource(builder, split=split)
    expected = expected_pairs(builder, split)
    assert 0 < len(expected) < TRAIN_ROWS
    assert pairs(source, range(len(source))) == expected


def test_random_rows_with_repeats_from_several_threads(builder) -> None:
    source = TfdsSource(builder, split="train[3:]+test")
    expected = expected_pairs(builder, "train[3:]+test")
    rows = np.random.default_rng(0).integers(0, len(expected), [40, 8])
    dataset = tf.data.Dataset.from_tensor_slices(rows).map(source.gather, num_parallel_calls=4)
    assert dataset.element_spec == (tf.TensorSpec([8], tf.string), tf.TensorSpec([8], tf.int64))
    for numbers, (images, labels) in zip(rows, dataset.as_numpy_iterator(), strict=True):
        batch = list(zip(images.tolist(), labels.tolist(), strict=True))
        assert batch == [expected[number] for number in numbers]


def test_rows_as_dicts(builder) -> None:
    source = TfdsSource(builder, split="train", supervised=False)
    assert source.element_spec == {
        "image": tf.TensorSpec([], tf.string),
        "label": tf.TensorSpec([], tf.int64),
        "more": {"thumbnail": tf.TensorSpec([], tf.string), "name": tf.TensorSpec([], tf.string)},
        "box": tf.TensorSpec([4], tf.float32),
    }
    batch = source.gather(tf.constant([11, 2], tf.int64))
    assert tf.nest.map_structure(lambda leaf: leaf.dtype, batch) == tf.nest.map_structure(
        lambda spec: spec.dtype, source.element_spec
    )
    expected = stored(builder, "train")
    for index, row in enumerate((11, 2)):
        tf.nest.map_structure(
            lambda leaf, value, i=index: np.testing.assert_array_equal(leaf[i].numpy(), value),
            batch,
            expected[row],
        )


def test_decoders_and_features_left_out(builder) -> None:
    """`None` is TFDS's own decoding: an image of fixed size as pixels."""
    decoders = tfds.decode.PartialDecoding(
        {"label": True, "more": {"thumbnail"}}, decoders={"more": {"thumbnail": None}}
    )
    source = TfdsSource(builder, split="test", decoders=decoders, supervised=False)
    assert source.element_spec == {
        "label": tf.TensorSpec([], tf.int64),
        "more": {"thumbnail": tf.TensorSpec([2, 3, 3], tf.uint8)},
    }
    batch = source.gather(tf.range(5, dtype=tf.int64))
    thumbnails = batch["more"]["thumbnail"].numpy()
    assert sorted(thumbnails[:, 0, 0, 0]) == list(range(TRAIN_ROWS, TRAIN_ROWS + TEST_ROWS))
    assert (thumbnails == thumbnails[:, :1, :1, :1]).all()
    assert (thumbnails[:, 0, 0, 0] % 7 == batch["label"].numpy()).all()


@tfds.decode.make_decoder(output_dtype=tf.int64)
def length(image, feature):
    del feature
    return tf.cast(tf.strings.length(image), tf.int64)


def test_a_decoder_of_ones_own_under_supervised_keys(builder) -> None:
    source = TfdsSource(builder, split="test", decoders={"image": length()})
    lengths, _ = source.gather(tf.range(5, dtype=tf.int64))
    assert lengths.numpy().tolist() == [len(image) for image, _ in expected_pairs(builder, "test")]


def test_a_builder_from_a_directory(builder) -> None:
    read_only = tfds.builder_from_directory(builder.data_dir)
    source = TfdsSource(read_only, split="test")
    assert pairs(source, range(TEST_ROWS)) == expected_pairs(builder, "test")


def test_a_data_source(builders) -> None:
    builder = builders["array_record"]
    source = TfdsSource(builder.as_data_source("train[4:9]"))
    assert pairs(source, range(5)) == expected_pairs(builder, "train[4:9]")
    with_decoders = builder.as_data_source("test", decoders={"image": length()})
    assert TfdsSource(with_decoders).element_spec[0] == tf.TensorSpec([], tf.int64)
    with pytest.raises(ConfigurationError, match="has the split 'test'; leave it out"):
        TfdsSource(with_decoders, split="train")
    with pytest.raises(ConfigurationError, match=r"returns for one split, but is \{"):
        TfdsSource(builder.as_data_source())


BEFORE_THE_RUNTIME = """
import sys
import tensorflow as tf
import tensorflow_datasets as tfds
from tf_largebatch.data._tfds_source import TfdsSource
for directory in sys.argv[1:]:
    TfdsSource(tfds.builder_from_directory(directory), split="test")
cpu = tf.config.list_physical_devices("CPU")[0]
devices = [tf.config.LogicalDeviceConfiguration()] * 2
tf.config.set_logical_device_configuration(cpu, devices)  # refused once the runtime has started
assert len(tf.config.list_logical_devices("CPU")) == 2
"""


def test_a_source_may_be_made_before_the_strategy(builders) -> None:
    """No multi-worker strategy can be made once TensorFlow's runtime has started."""
    directories = [builder.data_dir for builder in builders.values()]
    run_python("-c", BEFORE_THE_RUNTIME, *map(str, directories))


def test_a_decoder_that_uses_a_tensor_from_outside(builders) -> None:
    one = tf.constant(1, tf.int64)

    @tfds.decode.make_decoder(output_dtype=tf.int64)
    def add_one(label, feature):
        del feature
        return tf.cast(label, tf.int64) + one

    builder = builders["tfrecord"]
    source = TfdsSource(builder, split="test", decoders={"label": add_one()})
    labels = [label for _, label in pairs(source, range(TEST_ROWS))]
    assert labels == [label + 1 for _, label in expected_pairs(builder, "test")]


def test_describe_row(builder) -> None:
    source = TfdsSource(builder, split="train[10:]")  # shards of 8, 7 and 8 rows
    suffix = builder.info.file_format.value
    assert f"record 2 of '{builder.data_dir}" in source.describe_row(0)
    assert f"-train.{suffix}-00001-of-00003'" in source.describe_row(0)
    assert "record 0 of" in source.describe_row(5)
    assert "-00002-of-00003'" in source.describe_row(5)
    with pytest.raises(DataError, match="no row 13 in a source of 13 rows"):
        source.describe_row(13)
    with pytest.raises(DataError, match="no row -1 in a source of 13 rows"):
        source.read_records(np.asarray([-1]))


def test_the_index_folder(builders, tmp_path: Path) -> None:
    TfdsSource(builders["tfrecord"], split="test", index_dir=tmp_path)
    assert len(list(tmp_path.iterdir())) == SHARDS


def test_features_that_differ_from_row_to_row(builder, folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"'image' of small_photos.*shape \(None, None, 3"):
        TfdsSource(builder, split="train", decoders={"image": None})
    ragged = prepared(Ragged, folder, builder.info.file_format.value)
    with pytest.raises(ConfigurationError, match=r"'objects/numbers' of ragged.*shape \(None,\)"):
        TfdsSource(ragged, split="train")
    with pytest.raises(ConfigurationError, match=r"ragged/1\.0\.0 has no supervised_keys"):
        TfdsSource(ragged, split="train", supervised=True)
    source = TfdsSource(ragged, split="train", decoders=tfds.decode.PartialDecoding({"id": True}))
    numbers = source.gather(tf.range(4, dtype=tf.int64))["id"].numpy().tolist()
    assert sorted(numbers) == [0, 10, 20, 30]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "Give split, one of 'test', 'train'|Give split, one of 'train', 'test'"),
        ({"split": "val"}, "split='val' is no part of small_photos/1.0.0, which has .*'train'"),
        ({"split": "train[:"}, r"split='train\[:' is no part of"),
        ({"split": "test", "decoders": {"imgae": None}}, r"no features \['imgae'\], only"),
        (
            {"split": "test", "decoders": tfds.decode.PartialDecoding({"imgae": True})},
            "does not fit the features of small_photos.*imgae",
        ),
        (
            {"split": "test", "decoders": tfds.decode.PartialDecoding({"label": True})},
            "does not fit the features of small_photos.*image",
        ),
    ],
)
def test_arguments_refused(builder, arguments, message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"(?s){message}"):
        TfdsSource(builder, **arguments)


def test_no_rows(builder) -> None:
    with pytest.raises(DataError, match=r"split='train\[3:3\]' of small_photos/1.0.0 has no rows"):
        TfdsSource(builder, split="train[3:3]")


def test_neither_builder_nor_data_source(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"builder must be tfds.builder\(name, data_dir"):
        TfdsSource("mnist", split="train")
    with pytest.raises(ConfigurationError, match=r"call builder.download_and_prepare\(\) once"):
        TfdsSource(SmallPhotos(data_dir=tmp_path), split="train")
    assert not list(tmp_path.iterdir())


def test_another_file_format(tmp_path: Path) -> None:
    builder = prepared(Ragged, tmp_path, "parquet")
    partial = tfds.decode.PartialDecoding({"id": True})
    with pytest.raises(ConfigurationError, match="stored as 'parquet'; rows are read by number"):
        TfdsSource(builder, split="train", decoders=partial)


def test_files_that_are_not_those_of_the_data_set(tmp_path: Path) -> None:
    builder = prepared(SmallPhotos, tmp_path, "tfrecord")
    shard = Path(builder.info.splits["test"].file_instructions[0].filename)
    with tf.io.TFRecordWriter(os.fspath(shard)) as writer:
        for _ in range(9):
            writer.write(b"")
    with pytest.raises(DataError, match="hold 12 records, but TFDS has noted 5; prepare it again"):
        TfdsSource(builder, split="test")


def test_without_the_library(monkeypatch: pytest.MonkeyPatch, builders) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'tf_largebatch\[records\]'"):
        TfdsSource(builders["tfrecord"], split="train")
