"""What the pages take as the reader's own: tiny data, a tiny model, files; what dots mean."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tf_largebatch as tlb

_ROWS, _SIDE, _CLASSES = 64, 4, 3
Names = dict[str, Any]


def for_page(page: str) -> Names:
    """The names that a page begins with."""
    random = np.random.default_rng(0)
    names: Names = {}

    def rows(count: int) -> tuple[Any, Any]:
        images = random.normal(size=(count, _SIDE, _SIDE, 1)).astype("float32")
        return images, random.integers(_CLASSES, size=count)

    def build_model() -> keras.Model:
        with names["strategy"].scope() if "strategy" in names else contextlib.nullcontext():
            return _residual_network()

    names["x"], names["y"] = rows(_ROWS)
    names["x_val"], names["y_val"] = rows(20)
    names |= {
        "build_model": build_model,
        "meanwhile": lambda: None,
        "elsewhere": {},
        "__name__": page,
    }
    return names


def _residual_network() -> keras.Model:
    """Small, and with a batch norm that ends a residual branch."""
    inputs = keras.Input((_SIDE, _SIDE, 1))
    first = keras.layers.Dense(6)(keras.layers.Flatten()(inputs))
    branch = keras.layers.Dense(6, use_bias=False)(keras.ops.relu(first))
    branch = keras.layers.BatchNormalization()(branch)
    outputs = keras.layers.Dense(_CLASSES, dtype="float32")(first + branch)
    return keras.Model(inputs, outputs)


def _write_files(names: Names) -> None:
    """In this folder: imagenet/train and imagenet/val of class folders, packed/ of records."""
    random = np.random.default_rng(1)
    for part in ("train", "val"):
        for name in ("cat", "dog"):
            folder = Path("imagenet", part, name)
            folder.mkdir(parents=True)
            for number in range(2):
                pixels = random.integers(256, size=(20, 24, 3)).astype("uint8")
                encoded = tf.io.encode_jpeg(pixels).numpy()
                (folder / f"{number}.jpg").write_bytes(encoded)
        tlb.data.write_tfrecords(
            tlb.data.ImageFolderSource(f"imagenet/{part}"), "packed", name=part
        )


def _write_many_records(names: Names) -> None:
    """More, for the global batches of a page."""
    _write_files(names)
    record = next(iter(tf.data.TFRecordDataset(tf.io.gfile.glob("packed/train-*.tfrecord"))))
    with tf.io.TFRecordWriter("packed/train-more.tfrecord") as writer:
        for _ in range(1_000):
            writer.write(record.numpy())


def _accumulation_of_readme(names: Names) -> None:
    names["source"] = tlb.data.ArraySource((names["x"], names["y"]))
    names["elsewhere"]["tlb.Recipe"] = {
        "num_examples": 1_000,
        "per_replica_batch_size": 1,
        "num_replicas": 2,
        "base_learning_rate": 0.1,
        "epochs": 90,
    }


def _optimizers_of_readme(names: Names) -> None:
    with names["strategy"].scope():
        words = keras.Input((3,), dtype="int32")
        hidden = keras.layers.Flatten()(keras.layers.Embedding(5, 2)(words))
        names["model"] = keras.Model(words, keras.layers.Dense(2)(hidden))
    names["elsewhere"]["model.compile"] = {"loss": "mse"}
    names["meanwhile"] = lambda: names["model"].fit(
        np.zeros((4, 3), "int32"), np.zeros((4, 2)), batch_size=4, verbose=0
    )


_BEFORE: dict[tuple[str, str], Callable[[Names], None]] = {
    ("README.md", "Put it into your script"): lambda names: names["elsewhere"].update(
        {"model.fit": {"epochs": 31, "verbose": 0}}
    ),
    ("README.md", "Equal to one process"): _accumulation_of_readme,
    ("README.md", "Feed it from files"): _write_many_records,
    ("README.md", "Optimizers"): _optimizers_of_readme,
    ("docs/guide.md", "Data in files"): _write_many_records,
}


def before(page: str, heading: str, names: Names) -> None:
    """Changes `names` for the blocks below a heading, where a page goes on from another state."""
    _BEFORE.get((page, heading), lambda _: None)(names)


def prepared_headings(page: str) -> set[str]:
    """The headings of a page that `before` knows."""
    return {heading for each, heading in _BEFORE if each == page}
