"""Patches of real photographs, 17 classes, from files that scikit-image and scikit-learn ship.

A small classification task on which the rules of large minibatches can be told apart in minutes.
Each class is one picture, in grey, cut into blocks of 32 x 32. The blocks of a class are dealt to
training (60 %), validation (15 %) and test (25 %), and a patch of 16 x 16 lies wholly inside one
block, so no pixel of a validation or test patch was seen in training.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

BLOCK, PATCH = 32, 16
PARTS = {"train": 8192, "validation": 3000, "test": 6000}  # patches
_SHARES = (0.60, 0.15)  # of the blocks: training, validation; the rest is for the test
_DEALING = len(PARTS)  # the stream of random numbers behind those of the parts
# (package, file, by how much it is made smaller); the class is the place in this list.
PICTURES = (
    ("skimage", "data/astronaut.png", 1),
    ("skimage", "data/coffee.png", 1),
    ("skimage", "data/chelsea.png", 1),
    ("skimage", "data/rocket.jpg", 1),
    ("skimage", "data/motorcycle_left.png", 1),
    ("skimage", "data/ihc.png", 1),
    ("skimage", "data/hubble_deep_field.jpg", 2),
    ("skimage", "data/retina.jpg", 2),
    ("skimage", "data/brick.png", 1),
    ("skimage", "data/grass.png", 1),
    ("skimage", "data/gravel.png", 1),
    ("skimage", "data/camera.png", 1),
    ("skimage", "data/moon.png", 1),
    ("skimage", "data/coins.png", 1),
    ("skimage", "data/cell.png", 1),
    ("sklearn", "datasets/images/china.jpg", 1),
    ("sklearn", "datasets/images/flower.jpg", 1),
)
NUM_CLASSES = len(PICTURES)
Pixels = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class Places:
    """Where the patches of a part lie, in pixels of their pictures.

    Args:
        labels: the picture of each patch, int32 `[patch]`.
        tops, lefts: its corner, int64 `[patch]`.
        mirrored: whether it is turned left to right, bool `[patch]`.
    """

    labels: npt.NDArray[np.int32]
    tops: npt.NDArray[np.int64]
    lefts: npt.NDArray[np.int64]
    mirrored: npt.NDArray[np.bool_]


def photo_patches(*, split: int = 0) -> dict[str, tuple[Pixels, npt.NDArray[np.int32]]]:
    """The three parts: `{"train": (pixels, labels), "validation": ..., "test": ...}`.

    Each patch's own mean is removed, then all are divided by the standard deviation of the
    training patches. The classes of a part have equal shares, to one patch.

    Args:
        split: another number deals the blocks in another way. The random numbers are raw output
            of Philox, so places and labels are the same with all versions of NumPy; pixels are
            too, as far as the JPEG decoder agrees.

    Returns:
        Pixels float32 `[patch, 16, 16, 1]`, labels int32 `[patch]`.

    Raises:
        ModuleNotFoundError: scikit-image or scikit-learn is not installed.
    """
    pictures = [grey_picture(*picture) for picture in PICTURES]
    places = patch_places([picture.shape for picture in pictures], split=split)
    centred = {name: _centred(cut_patches(pictures, places[name])) for name in PARTS}
    deviation = np.std(centred["train"], dtype=np.float64)
    return {
        name: ((pixels / deviation).astype(np.float32), places[name].labels)
        for name, pixels in centred.items()
    }


def mirror_at_random(seed: Any, pixels: Any, label: Any) -> tuple[Any, Any]:
    """The `row_fn` of training: half of the patches are turned left to right, others each epoch."""
    import tensorflow as tf

    return tf.image.stateless_random_flip_left_right(pixels, seed), label


def patch_places(shapes: list[tuple[int, ...]], *, split: int) -> dict[str, Places]:
    """Where the patches of all parts lie; `shapes` are `(height, width)` of the pictures.

    Patch `i` of a part is of class `i mod 17`, in a random block of that class and part, at a
    random place inside the block.
    """
    dealt = [_dealt_blocks(shape, label, split) for label, shape in enumerate(shapes)]
    return {
        name: _places_of_part(count, [blocks[name] for blocks in dealt], part, split)
        for part, (name, count) in enumerate(PARTS.items())
    }


def _dealt_blocks(
    shape: tuple[int, ...], label: int, split: int
) -> dict[str, npt.NDArray[np.int64]]:
    """The corners `[block, (top, left)]` of a picture's blocks, by part."""
    rows, columns = shape[0] // BLOCK, shape[1] // BLOCK
    numbers = np.argsort(_raw(rows * columns, split, _DEALING + label), kind="stable")
    ends = [round(len(numbers) * share) for share in np.cumsum(_SHARES)]
    corners = np.stack(np.divmod(numbers, columns), axis=-1) * BLOCK
    return dict(zip(PARTS, np.split(corners, ends), strict=True))


def _places_of_part(
    count: int, blocks: list[npt.NDArray[np.int64]], part: int, split: int
) -> Places:
    labels = np.arange(count) % len(blocks)
    draws = _raw(count * 4, split, part).reshape(count, 4)  # [patch, (block, top, left, mirror)]
    blocks_of_class = np.array([len(corners) for corners in blocks])
    chosen = (draws[:, 0] % blocks_of_class[labels].astype(np.uint64)).astype(np.int64)
    corners = np.array([blocks[label][block] for label, block in zip(labels, chosen, strict=True)])
    inside = (draws[:, 1:3] % np.uint64(BLOCK - PATCH + 1)).astype(np.int64)
    tops, lefts = (corners + inside).T
    return Places(labels.astype(np.int32), tops, lefts, draws[:, 3] % np.uint64(2) == 1)


def _raw(count: int, split: int, stream: int) -> npt.NDArray[np.uint64]:
    # Raw output of the bit generator: other streams of NumPy may change between versions.
    return np.random.Philox(key=np.array([split, stream], dtype=np.uint64)).random_raw(count)


def cut_patches(pictures: list[npt.NDArray[np.uint8]], places: Places) -> npt.NDArray[np.uint8]:
    """uint8 `[patch, 16, 16]`."""
    patches = np.empty((len(places.labels), PATCH, PATCH), np.uint8)
    for i, (label, top, left) in enumerate(
        zip(places.labels, places.tops, places.lefts, strict=True)
    ):
        patches[i] = pictures[label][top : top + PATCH, left : left + PATCH]
    patches[places.mirrored] = patches[places.mirrored, :, ::-1]
    return patches


def grey_picture(package: str, file: str, shrink: int) -> npt.NDArray[np.uint8]:
    """A shipped picture in grey, `[y, x]`, each pixel the mean of `shrink` x `shrink` others."""
    spec = importlib.util.find_spec(package)  # to import them takes seconds
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            f"photo_patches is cut from pictures in {package}, which is not installed: "
            "pip install scikit-image scikit-learn"
        )
    with Image.open(Path(spec.submodule_search_locations[0]) / file) as image:
        grey: npt.NDArray[Any] = np.asarray(image.convert("L"))
    if shrink == 1:
        return grey
    height, width = (side // shrink for side in grey.shape)
    cells = grey[: height * shrink, : width * shrink].reshape(height, shrink, width, shrink)
    return np.round(cells.mean(axis=(1, 3))).astype(np.uint8)


def _centred(patches: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
    pixels = patches[..., np.newaxis].astype(np.float64)  # [patch, y, x, channel]
    return pixels - pixels.mean(axis=(1, 2, 3), keepdims=True)
