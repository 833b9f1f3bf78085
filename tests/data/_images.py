"""Encoded images for tests, made by Pillow."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image


def photograph(height: int, width: int, *, seed: int = 0) -> Image.Image:
    """Smooth waves of random colours and a little noise, which JPEG keeps well."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width][..., None]
    waves = np.sin(
        y * random.uniform(0.02, 0.1, 3) + x * random.uniform(0.02, 0.1, 3) + random.uniform(0, 6)
    )
    pixels = 128 + 100 * waves + random.normal(0, 4, (height, width, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def encoded(image: Image.Image, file_format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


def jpeg(height: int = 60, width: int = 80, *, seed: int = 0) -> bytes:
    return encoded(photograph(height, width, seed=seed), "JPEG", quality=95)
