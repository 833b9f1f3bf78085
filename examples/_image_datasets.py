"""Encoded images on disk as the data sets of the examples: four kinds of files, one pipeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from _config import TrainConfig
from _datasets import Dataset

import tf_largebatch as tlb

_VALIDATION_NAMES = ("val", "validation", "test")


def load_image_dataset(config: TrainConfig) -> Dataset:
    """The data set in --data_dir: image_folder, tfrecord, array_record or tfds.

    Images leave the input pipeline as uint8; the model's first layer normalises them.
    """
    directory = Path(config.data_dir)
    if not config.data_dir or not directory.is_dir():
        raise tlb.ConfigurationError(
            f"--dataset={config.dataset} needs --data_dir, the folder of its files, but that is "
            f"{config.data_dir!r}."
        )
    open_sources = {
        "image_folder": _image_folders,
        "tfrecord": _packed_records,
        "array_record": _packed_records,
        "tfds": _tfds,
    }[config.dataset]
    train, validation, num_classes = open_sources(directory, config)
    return Dataset(
        train=train,
        validation=validation,
        num_classes=_agreed_num_classes(num_classes, config),
        image_shape=(config.image_size, config.image_size, 3),
        train_row_fn=tlb.data.RandomResizedCrop(config.image_size),
        validation_row_fn=tlb.data.ResizeAndCenterCrop(
            config.image_size, resize_size=config.image_size * 256 // 224
        ),
        pixel_mean=tlb.data.IMAGENET_MEAN,
        pixel_std=tlb.data.IMAGENET_STD,
    )


def _image_folders(directory: Path, _: TrainConfig) -> tuple[Any, Any, int]:
    """DIR/train/CLASS/*.jpg and DIR/val/CLASS/*.jpg."""
    train = tlb.data.ImageFolderSource(directory / "train")
    folders = [directory / name for name in _VALIDATION_NAMES if (directory / name).is_dir()]
    if not folders:
        raise tlb.ConfigurationError(
            f"{directory} needs a folder for validation: {' or '.join(_VALIDATION_NAMES)}."
        )
    names = train.class_names
    validation = tlb.data.ImageFolderSource(folders[0], class_names=names)
    return train, validation, len(names)


def _packed_records(directory: Path, config: TrainConfig) -> tuple[Any, Any, int | None]:
    """DIR/train-*.tfrecord and DIR/val-*.tfrecord, as tools/pack_images.py writes them."""
    kind = {"tfrecord": tlb.data.TFRecordSource, "array_record": tlb.data.ArrayRecordSource}
    found = [
        name for name in _VALIDATION_NAMES if any(directory.glob(f"{name}-*.{config.dataset}"))
    ]
    if not found:
        raise tlb.ConfigurationError(
            f"{directory} needs files for validation, as val-00000-of-00001.{config.dataset}."
        )
    train, validation = (
        kind[config.dataset](
            str(directory / f"{name}-*.{config.dataset}"),
            parse_fn=tlb.data.parse_image_examples,
        )
        for name in ("train", found[0])
    )
    class_names = _packed_class_names(directory, "train", train)
    validation_names = _packed_class_names(directory, found[0], validation)
    if class_names and validation_names and class_names != validation_names:
        raise tlb.DataError(
            f"{directory} was packed with other classes for validation than for training, so that "
            "labels differ; pack both with the same --class_names."
        )
    return train, validation, class_names and len(class_names)


def _packed_class_names(directory: Path, name: str, source: Any) -> list[str] | None:
    """Those in NAME.json, if there is one, which must tell of as many rows as there are."""
    path = directory / f"{name}.json"
    if not path.exists():
        return None
    try:
        manifest = json.loads(path.read_text())
        num_rows, class_names = manifest["num_rows"], manifest["class_names"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise tlb.DataError(f"{path} is not what tools/pack_images.py writes: {error!r}") from error
    if num_rows != len(source):
        raise tlb.DataError(
            f"{path} tells of {num_rows} images, but {name}-* hold {len(source)}: a file is "
            "missing, or files of another name match."
        )
    return class_names


def _tfds(directory: Path, _: TrainConfig) -> tuple[Any, Any, int]:
    """DIR is the folder of a prepared builder, NAME/CONFIG/VERSION."""
    import tensorflow_datasets as tfds

    builder = tfds.builder_from_directory(directory)
    found = [name for name in _VALIDATION_NAMES if name in builder.info.splits]
    if not found:
        raise tlb.ConfigurationError(
            f"{directory} has the splits {', '.join(builder.info.splits)}, none for validation."
        )
    label = builder.info.supervised_keys[1]
    train, validation = (tlb.data.TfdsSource(builder, split=split) for split in ("train", found[0]))
    return train, validation, builder.info.features[label].num_classes


def _agreed_num_classes(found: int | None, config: TrainConfig) -> int:
    if config.num_classes is None and found is None:
        raise tlb.ConfigurationError(
            f"{config.data_dir} has no train.json with the class names; give --num_classes."
        )
    if config.num_classes is None:
        return found
    if found is not None and config.num_classes < found:
        raise tlb.ConfigurationError(
            f"--num_classes={config.num_classes} is less than the {found} classes in "
            f"{config.data_dir}."
        )
    return config.num_classes
