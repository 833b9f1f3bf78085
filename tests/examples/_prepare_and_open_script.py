"""Makes one small data set in all four kinds of files, and opens each; prints a line of JSON."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import numpy as np
import tensorflow_datasets as tfds
from _config import TrainConfig
from _image_datasets import load_image_dataset
from _made_images import made_image, write_image_folder

import tf_largebatch as tlb

folder = Path(sys.argv[1])
for name, count in (("train", 12), ("val", 6)):
    write_image_folder(folder / "image_folder" / name, num_images=count, num_classes=3, seed=count)
    source = tlb.data.ImageFolderSource(folder / "image_folder" / name)
    tlb.data.write_tfrecords(source, folder / "tfrecord", name=name)
    tlb.data.write_array_records(source, folder / "array_record", name=name)


class Made(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")
    pkg_dir_path = folder  # TFDS would look for that of a module, and this is a script

    def _info(self):
        return self.dataset_info_from_configs(
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(shape=(None, None, 3), encoding_format="jpeg"),
                    "label": tfds.features.ClassLabel(num_classes=3),
                }
            ),
            supervised_keys=("image", "label"),
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(12), "test": self._generate_examples(6)}

    def _generate_examples(self, count):
        for number in range(count):
            yield (
                number,
                {"image": io.BytesIO(made_image(number // 3, seed=count)), "label": number % 3},
            )


builder = Made(data_dir=str(folder / "tfds"), file_format="array_record")
builder.download_and_prepare(download_config=tfds.download.DownloadConfig(try_download_gcs=False))
places = {
    **{name: folder / name for name in ("image_folder", "tfrecord", "array_record")},
    "tfds": Path(builder.data_dir),
}
opened = {}
for name, place in places.items():
    config = TrainConfig(run_dir="r", dataset=name, data_dir=str(place), image_size=32)
    dataset = load_image_dataset(config)
    sharder = tlb.data.GlobalShuffleSharder(
        dataset.train, global_batch_size=12, seed=0, row_fn=dataset.train_row_fn
    )
    images, labels = next(iter(sharder.train_dataset()))
    validation = tlb.data.evaluation_dataset(
        dataset.validation, batch_size=4, row_fn=dataset.validation_row_fn
    )
    opened[name] = {
        "rows": [len(dataset.train), len(dataset.validation)],
        "classes": dataset.num_classes,
        "shape": [*images.shape, images.dtype.name],
        "labels": np.bincount(labels).tolist(),
        "validation_labels": np.concatenate([each for _, each in validation]).tolist(),
        "place": str(place),
    }
refused = []
# Validation of its own classes, and a lost file.
tlb.data.write_tfrecords(
    tlb.data.ImageFolderSource(folder / "image_folder" / "train" / ".."),
    folder / "other_classes",
    name="val",
)
for part in (folder / "tfrecord").glob("train*"):
    (folder / "other_classes" / part.name).write_bytes(part.read_bytes())
tlb.data.write_tfrecords(
    tlb.data.ImageFolderSource(folder / "image_folder" / "train"),
    folder / "lost",
    name="train",
    num_shards=3,
)
(folder / "lost" / "train-00001-of-00003.tfrecord").unlink()
for part in (folder / "tfrecord").glob("val*"):
    (folder / "lost" / part.name).write_bytes(part.read_bytes())
(folder / "image_folder" / "val").rename(folder / "image_folder" / "other")
(folder / "array_record" / "train.json").unlink()
for name, place, changes in (
    ("tfrecord", "", {}),
    ("tfrecord", folder / "none", {}),
    ("image_folder", folder / "image_folder", {}),
    ("array_record", folder / "tfrecord", {}),
    ("array_record", folder / "array_record", {}),
    ("tfrecord", folder / "tfrecord", {"num_classes": 2}),
    ("tfrecord", folder / "other_classes", {}),
    ("tfrecord", folder / "lost", {}),
):
    try:
        load_image_dataset(TrainConfig(run_dir="r", dataset=name, data_dir=str(place), **changes))
    except (tlb.ConfigurationError, tlb.DataError) as error:
        refused.append(str(error))
print(json.dumps({"opened": opened, "refused": refused}))
