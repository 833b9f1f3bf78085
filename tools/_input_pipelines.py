"""The input pipelines that `benchmark_input.py` compares, and the check of what they deliver."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import tf_largebatch as tlb

IMAGE_SIZE = 224
_WORKERS = 2
_FEATURES = {
    "image/encoded": tf.io.FixedLenFeature([], tf.string),
    "image/class/label": tf.io.FixedLenFeature([], tf.int64),
}


class OneWorkerOfTwo:
    """Stands in for a strategy: its data sets hold the part of one worker of two."""

    num_replicas_in_sync = _WORKERS

    def __init__(self, index: int) -> None:
        self._context = tf.distribute.InputContext(_WORKERS, index, _WORKERS)

    def distribute_datasets_from_function(self, dataset_fn: Callable[..., Any]) -> Any:
        return dataset_fn(self._context)


class Pipelines:
    """All pipelines over the same images, each in a class of its own, so that labels name them.

    A pass of ours is one worker's half of the images; those of the others are as long.

    Args:
        folder: an image folder below `images/`, and the same packed below `packed/`.
        batch_size: images of a batch.
        seed: of windows and shuffle.
    """

    def __init__(self, folder: Path, *, batch_size: int, seed: int) -> None:
        self._batch_size = batch_size
        self._seed = seed
        self._crop = tlb.data.RandomResizedCrop(IMAGE_SIZE)
        parse = {"parse_fn": tlb.data.parse_image_examples}
        self._tfrecords = str(folder / "packed" / "*.tfrecord")
        self.sources = {
            "image_folder": tlb.data.ImageFolderSource(folder / "images"),
            "tfrecord": tlb.data.TFRecordSource(self._tfrecords, **parse),
            "array_record": tlb.data.ArrayRecordSource(
                str(folder / "packed" / "*.array_record"), **parse
            ),
        }
        folder_source = self.sources["image_folder"]
        self.num_images = len(folder_source)
        self._encoded = [
            Path(folder_source.path(row)).read_bytes() for row in range(self.num_images // _WORKERS)
        ]
        self._windows = self._drawn_windows()

    def decode_alone(self) -> tf.data.Dataset:
        """(a) The crop decoded, from bytes in memory, and nothing else."""
        images = tf.data.Dataset.from_tensor_slices((self._encoded, self._windows))
        crops = images.map(_decode_crop, num_parallel_calls=tf.data.AUTOTUNE)
        # Of each crop its size alone leaves the pipeline; batches would be copies.
        return crops.map(tf.shape).batch(self._batch_size).prefetch(tf.data.AUTOTUNE)

    def usual(self) -> tf.data.Dataset:
        """(b) As most do: crop, resize, flip and normalise in float32, image by image, in order.

        The windows are given, so that all pipelines decode alike; drawing them would be on top.
        """

        def prepare(record: tf.Tensor, window: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            features = tf.io.parse_single_example(record, _FEATURES)
            crop = _decode_crop(features["image/encoded"], window)
            image = tf.image.resize(crop, [IMAGE_SIZE] * 2)
            image = tf.image.random_flip_left_right(image)
            image = (image - tlb.data.IMAGENET_MEAN) / tlb.data.IMAGENET_STD
            return image, features["image/class/label"]

        files = sorted(tf.io.gfile.glob(self._tfrecords))
        records = tf.data.TFRecordDataset(files)
        windows = tf.data.Dataset.from_tensor_slices(self._windows)
        return (
            tf.data.Dataset.zip((records, windows))
            .map(prepare, num_parallel_calls=tf.data.AUTOTUNE)
            .batch(self._batch_size, drop_remainder=True)
            .prefetch(tf.data.AUTOTUNE)
        )

    def ours(self, source: str, *, worker: int = 0, row_fn: Any = None) -> tf.data.Dataset:
        """(c) One worker of two: shuffled over all images, read by number, uint8."""
        sharder = tlb.data.GlobalShuffleSharder(
            self.sources[source],
            global_batch_size=self._batch_size * _WORKERS,
            seed=self._seed,
            row_fn=row_fn or self._crop,
        )
        return sharder.train_dataset(OneWorkerOfTwo(worker))

    def problems(self, source: str) -> list[str]:
        """What is wrong with the rows and pixels of our pipeline over both workers' epochs."""

        def with_seed(seed: tf.Tensor, image: tf.Tensor, label: tf.Tensor) -> tuple[Any, ...]:
            return (*self._crop(seed, image, label), seed)

        seen: list[int] = []
        largest = 0.0
        for worker in range(_WORKERS):
            for pixels, labels, seeds in self.ours(source, worker=worker, row_fn=with_seed):
                seen += labels.numpy().tolist()
                largest = max(largest, self._rounding(pixels[0], int(labels[0]), seeds[0]))
        counts = np.bincount(seen, minlength=self.num_images)
        left_out = self.num_images % (self._batch_size * _WORKERS)
        problems = []
        if counts.max() > 1 or (counts == 0).sum() != left_out:
            problems.append(f"{source}: not each image once an epoch, but {left_out} left out")
        if seen == sorted(seen):
            problems.append(f"{source}: not shuffled")
        if largest > 0.5 + 1e-3:  # of float32
            problems.append(f"{source}: pixels differ by {largest} from those in float32")
        return problems

    def _rounding(self, pixels: tf.Tensor, label: int, seed: tf.Tensor) -> float:
        """By how much uint8 pixels differ at most from the float32 pipeline's, before its mean."""
        encoded = Path(self.sources["image_folder"].path(label)).read_bytes()
        window = self._crop.window(seed, tf.io.extract_jpeg_shape(encoded))
        exact = tf.image.resize(_decode_crop(encoded, window), [IMAGE_SIZE] * 2)
        pixels = tf.cast(pixels, tf.float32)
        return min(float(tf.reduce_max(tf.abs(pixels - each))) for each in (exact, exact[:, ::-1]))

    def _drawn_windows(self) -> np.ndarray:
        draw = tf.function(self._crop.window, autograph=False)
        return np.stack(
            [
                draw(tf.constant([self._seed, row], tf.int64), tf.io.extract_jpeg_shape(encoded))
                for row, encoded in enumerate(self._encoded)
            ]
        )


def _decode_crop(encoded: tf.Tensor, window: tf.Tensor) -> tf.Tensor:
    return tf.io.decode_and_crop_jpeg(encoded, window, channels=3)
