"""Realistic JPEGs without a download, cut from the photographs that scikit-learn and scikit-image
ship: 500 x 375 pixels and about 90 kB, as the images of ImageNet are on average.
"""

from __future__ import annotations

import functools
import importlib.util
import io
from pathlib import Path

import numpy as np
from PIL import Image

WIDTH, HEIGHT = 500, 375
_SIZE_RANGE_BYTES = (68_000, 128_000)  # uniform; what is reached is 90 kB on average
_QUALITY_RANGE = (50, 100)
_SCALE_RANGE = (0.6, 1.0)  # of the largest window of this shape in a photograph
_PHOTOGRAPHS = (
    ("sklearn", "datasets/images/china.jpg"),
    ("sklearn", "datasets/images/flower.jpg"),
    ("skimage", "data/astronaut.png"),
    ("skimage", "data/chelsea.png"),
    ("skimage", "data/coffee.png"),
    ("skimage", "data/hubble_deep_field.jpg"),
    ("skimage", "data/motorcycle_left.png"),
    ("skimage", "data/motorcycle_right.png"),
    ("skimage", "data/retina.jpg"),
    ("skimage", "data/rocket.jpg"),
)


def made_image(number: int, *, seed: int) -> bytes:
    """A JPEG: a window at a random place and scale of one photograph after the other.

    Its quality is the one that brings its size nearest below a random one between 68 and
    128 kB; smooth windows stay below that at any quality. The same for the same versions of
    NumPy, Pillow and the two packages; about 30 ms each.
    """
    random = np.random.default_rng([seed, number])
    photograph = _photograph(number % len(_PHOTOGRAPHS))
    largest = min(photograph.width / WIDTH, photograph.height / HEIGHT)
    scale = largest * random.uniform(*_SCALE_RANGE)
    left = random.uniform(0.0, photograph.width - WIDTH * scale)
    top = random.uniform(0.0, photograph.height - HEIGHT * scale)
    box = (left, top, left + WIDTH * scale, top + HEIGHT * scale)
    window = photograph.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC, box=box)
    return _encoded_below(window, int(random.integers(*_SIZE_RANGE_BYTES)))


def write_image_folder(
    directory: Path, *, num_images: int, num_classes: int, seed: int = 0
) -> None:
    """Writes images as `directory/class_0003/00000017.jpg`, to the classes in turn.

    Args:
        directory: made if need be; files of these names are overwritten.
        num_images: at least `num_classes`, so that no class is empty.
        num_classes: at least 1.
        seed: other images for each.
    """
    if not 1 <= num_classes <= num_images:
        raise ValueError(
            f"num_classes must be in [1, num_images = {num_images}], but is {num_classes}."
        )
    for number in range(num_images):
        folder = directory / f"class_{number % num_classes:04d}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:08d}.jpg").write_bytes(made_image(number, seed=seed))


@functools.cache
def _photograph(place: int) -> Image.Image:
    package, file = _PHOTOGRAPHS[place]
    spec = importlib.util.find_spec(package)  # to import them takes seconds
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            f"The images are cut from photographs in {package}, which is not installed: "
            "pip install scikit-image scikit-learn"
        )
    with Image.open(Path(spec.submodule_search_locations[0]) / file) as image:
        return image.convert("RGB")


def _encoded_below(image: Image.Image, size_bytes: int) -> bytes:
    """By bisection of the quality; of the lowest quality where all are larger."""
    low, high = _QUALITY_RANGE
    best = _encoded(image, low)
    while low < high:
        middle = (low + high + 1) // 2
        encoded = _encoded(image, middle)
        if len(encoded) <= size_bytes:
            low, best = middle, encoded
        else:
            high = middle - 1
    return best


def _encoded(image: Image.Image, quality: int) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return file.getvalue()
