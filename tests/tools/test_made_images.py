"""The JPEGs that benchmarks and tests read."""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.tools.tool_runs import ROOT, load

made_images = load("_made_images")


def test_size_and_variety() -> None:
    images = [made_images.made_image(number, seed=0) for number in range(60)]
    decoded = [Image.open(io.BytesIO(image)) for image in images]
    assert {(image.format, image.mode, image.size) for image in decoded} == {
        ("JPEG", "RGB", (500, 375))
    }
    sizes = [len(image) for image in images]
    assert 85_000 < np.mean(sizes) < 95_000
    assert min(sizes) > 30_000 and max(sizes) < 130_000
    # Photographs have contrast; no two windows are the same.
    assert min(np.asarray(image).std() for image in decoded) > 10
    assert len({hashlib.sha256(image).digest() for image in images}) == 60


def test_a_folder_is_the_same_every_time(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        made_images.write_image_folder(tmp_path / name, num_images=7, num_classes=3, seed=seed)
    a, b, c = (
        {
            path.relative_to(tmp_path / name).as_posix(): path.read_bytes()
            for path in (tmp_path / name).rglob("*.jpg")
        }
        for name in "abc"
    )
    assert sorted(a) == [
        *(f"class_0000/0000000{number}.jpg" for number in (0, 3, 6)),
        *(f"class_0001/0000000{number}.jpg" for number in (1, 4)),
        *(f"class_0002/0000000{number}.jpg" for number in (2, 5)),
    ]
    assert a == b
    assert a.keys() == c.keys() and all(a[name] != c[name] for name in a)


def test_every_class_needs_an_image(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_classes must be in"):
        made_images.write_image_folder(tmp_path, num_images=2, num_classes=3)


def test_the_packages_of_the_photographs_are_not_imported() -> None:
    script = """
import sys
import _made_images
_made_images.made_image(0, seed=0)
_made_images.made_image(9, seed=0)
assert not {"sklearn", "skimage", "scipy"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], cwd=ROOT / "tools", check=True, timeout=60)
