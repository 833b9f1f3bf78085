"""Rows by number to batches: a global shuffle for training, exact cuts for evaluation."""

from tf_largebatch.data._array_record_source import ArrayRecordSource
from tf_largebatch.data._evaluation import evaluation_dataset
from tf_largebatch.data._image_checks import find_unreadable_rows
from tf_largebatch.data._image_folder import ImageFolderSource
from tf_largebatch.data._image_pipeline import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    NormalizeImages,
    RandomResizedCrop,
    ResizeAndCenterCrop,
)
from tf_largebatch.data._record_writers import write_array_records, write_tfrecords
from tf_largebatch.data._records import parse_image_examples
from tf_largebatch.data._sharder import GlobalShuffleSharder
from tf_largebatch.data._sources import ArraySource, RandomAccessSource
from tf_largebatch.data._tfds_source import TfdsSource
from tf_largebatch.data._tfrecord_source import TFRecordSource

__all__ = [
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "ArrayRecordSource",
    "ArraySource",
    "GlobalShuffleSharder",
    "ImageFolderSource",
    "NormalizeImages",
    "RandomAccessSource",
    "RandomResizedCrop",
    "ResizeAndCenterCrop",
    "TFRecordSource",
    "TfdsSource",
    "evaluation_dataset",
    "find_unreadable_rows",
    "parse_image_examples",
    "write_array_records",
    "write_tfrecords",
]
