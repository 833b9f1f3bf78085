"""The patches of photographs: who may see which pixel, shares, scale, and that nothing moves."""

from __future__ import annotations

import hashlib
import itertools
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.examples.test_train_config import EXAMPLES


@pytest.fixture(scope="module")
def module() -> ModuleType:
    sys.path.append(str(EXAMPLES))
    try:
        import _photo_patches
    finally:
        sys.path.remove(str(EXAMPLES))
    return _photo_patches


@pytest.fixture(scope="module")
def pictures(module: ModuleType) -> list[np.ndarray]:
    return [module.grey_picture(*picture) for picture in module.PICTURES]


@pytest.fixture(scope="module")
def parts(module: ModuleType) -> dict[str, Any]:
    return module.photo_patches()


@pytest.mark.parametrize("split", [0, 1])
def test_no_pixel_of_one_part_is_in_another(
    module: ModuleType, pictures: list[np.ndarray], split: int
) -> None:
    shapes = [picture.shape for picture in pictures]
    seen = {}
    for name, places in module.patch_places(shapes, split=split).items():
        masks = [np.zeros(shape, bool) for shape in shapes]
        for label, top, left in zip(places.labels, places.tops, places.lefts, strict=True):
            patch = masks[label][top : top + 16, left : left + 16]
            assert patch.shape == (16, 16)  # inside of the picture
            patch[:] = True
        seen[name] = masks
    for one, other in itertools.combinations(seen.values(), 2):
        assert not any(np.any(a & b) for a, b in zip(one, other, strict=True))


def test_patches_lie_inside_blocks_that_are_dealt_60_15_25(
    module: ModuleType, pictures: list[np.ndarray]
) -> None:
    blocks: dict[str, set[tuple[int, int, int]]] = {}
    shapes = [picture.shape for picture in pictures]
    for name, places in module.patch_places(shapes, split=0).items():
        tops, lefts = places.tops, places.lefts
        np.testing.assert_array_equal(tops // 32, (tops + 15) // 32)
        np.testing.assert_array_equal(lefts // 32, (lefts + 15) // 32)
        triples = zip(places.labels, tops // 32, lefts // 32, strict=True)
        blocks[name] = {tuple(map(int, triple)) for triple in triples}
    assert not set.intersection(*blocks.values())
    total = sum((height // 32) * (width // 32) for height, width in shapes)
    # By chance some blocks of the larger pictures have no patch.
    for name, share in {"train": 0.60, "validation": 0.15, "test": 0.25}.items():
        assert share - 0.05 < len(blocks[name]) / total < share + 0.005


def test_sizes_shares_means_and_scale(parts: dict[str, Any]) -> None:
    for name, count in {"train": 8192, "validation": 3000, "test": 6000}.items():
        pixels, labels = parts[name]
        assert (pixels.shape, pixels.dtype) == ((count, 16, 16, 1), np.float32)
        assert (labels.shape, labels.dtype) == ((count,), np.int32)
        assert set(np.bincount(labels)) <= {count // 17, count // 17 + 1}
        assert np.abs(pixels.mean(axis=(1, 2, 3))).max() < 1e-5
        assert 0.9 < pixels.std() < 1.1
    assert parts["train"][0].std() == pytest.approx(1.0, abs=1e-5)


def test_pixels_are_those_of_the_pictures(
    module: ModuleType, pictures: list[np.ndarray], parts: dict[str, Any]
) -> None:
    places = module.patch_places([picture.shape for picture in pictures], split=0)["test"]
    assert 0.45 < places.mirrored.mean() < 0.55
    ratios = []
    for i in range(0, 6000, 97):
        top, left = places.tops[i], places.lefts[i]
        window = pictures[places.labels[i]][top : top + 16, left : left + 16].astype(float)
        expected = np.fliplr(window) if places.mirrored[i] else window
        expected = expected - expected.mean()
        patch = parts["test"][0][i, :, :, 0]
        ratio = np.sum(patch * expected) / np.sum(expected**2)
        np.testing.assert_allclose(patch, expected * ratio, atol=1e-4)
        ratios.append(ratio)
    assert np.std(ratios) < 1e-5 * np.mean(ratios)  # one scale for all


def test_the_same_for_ever(module: ModuleType, pictures: list[np.ndarray]) -> None:
    """Of whole numbers alone: places by Philox, and pictures whose format loses nothing."""
    places = module.patch_places([picture.shape for picture in pictures], split=0)
    digest = hashlib.sha256()
    for part in places.values():
        for values in (part.labels, part.tops, part.lefts, part.mirrored):
            digest.update(values.astype(np.int64).tobytes())
    for (_, file, _), picture in zip(module.PICTURES, pictures, strict=True):
        if file.endswith(".png"):
            digest.update(picture.tobytes())
    assert digest.hexdigest() == "f63bb5390a27d3e7773f2bf307d3232b5135256f865989a5ed14d62230417b8d"

    other = module.patch_places([picture.shape for picture in pictures], split=1)
    assert np.mean(other["test"].tops == places["test"].tops) < 0.1


def test_halved_pictures_are_means_of_four(module: ModuleType) -> None:
    whole = module.grey_picture("skimage", "data/retina.jpg", 1).astype(float)
    half = module.grey_picture("skimage", "data/retina.jpg", 2)
    expected = (
        whole[:-1:2, :-1:2] + whole[1::2, :-1:2] + whole[:-1:2, 1::2] + whole[1::2, 1::2]
    ) / 4
    np.testing.assert_allclose(half, expected[: half.shape[0], : half.shape[1]], atol=0.5)


def test_mirroring_takes_half_of_the_rows_and_differs_between_epochs(module: ModuleType) -> None:
    import tensorflow as tf

    pixels = tf.reshape(tf.range(4.0), (2, 2, 1))

    def is_mirrored(epoch: int, row: int) -> bool:
        seed = tf.constant([epoch, row], tf.int64)
        mirrored, label = module.mirror_at_random(seed, pixels, 7)
        assert label == 7
        flat = mirrored.numpy().ravel().tolist()
        assert flat in ([0, 1, 2, 3], [1, 0, 3, 2])
        return flat == [1, 0, 3, 2]

    epochs = np.array([[is_mirrored(epoch, row) for row in range(100)] for epoch in (5, 6)])
    assert np.all((epochs.sum(axis=1) > 35) & (epochs.sum(axis=1) < 65))
    assert 30 < np.sum(epochs[0] != epochs[1]) < 70


def test_a_missing_package_is_named(module: ModuleType) -> None:
    with pytest.raises(ModuleNotFoundError, match="pip install scikit-image scikit-learn"):
        module.grey_picture("no_such_package", "data/camera.png", 1)
