"""The ImageNet pipeline: crops of encoded images, one row at a time, uint8 until the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import tensorflow as tf

from tf_largebatch.core.epoch_order import checked_integer
from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.data._image_decoding import decode_window

IMAGENET_MEAN = (123.675, 116.28, 103.53)
"""Mean of ImageNet's training pixels, red, green, blue, in units of 0 to 255."""

IMAGENET_STD = (58.395, 57.12, 57.375)
"""Standard deviation of ImageNet's training pixels, in units of 0 to 255."""

FloatDtype = Literal["float32", "float16", "bfloat16"]

_ATTEMPTS = 10
_LARGEST_ASPECT_RATIO = 50  # of images for validation


class RandomResizedCrop:
    """Row function for training: a random window of the image, resized, perhaps mirrored.

    The window's area is uniform in `area_range`, as a fraction of the image's, and the logarithm
    of its aspect ratio (width / height) is uniform in that of `aspect_ratio_range`; up to ten are
    drawn until one fits into the image, and its place is uniform (Szegedy et al. 2015, "Going
    deeper with convolutions", used by Goyal et al. 2017; the logarithm treats wide and tall
    alike). Where none of the ten fits, it is the largest window of a permitted ratio.
    `tf.image.sample_distorted_bounding_box`, which many pipelines use, is another distribution:
    it draws the height uniformly, so small windows are more frequent there.

    Only the window is decoded (`tf.io.decode_and_crop_jpeg`), resized bilinearly (half-pixel
    centres, no antialiasing), rounded to uint8 and mirrored. Against crop, resize and mirror in
    float32 a pixel differs by at most 0.5, the rounding, before normalisation.

    All randomness comes from the `seed` argument, so a row's pixels in an epoch do not depend on
    threads, on workers or on where training was resumed. The window is computed in float64, so
    it does not depend on the processor's float32 vector code either.

    JPEG (colour, greyscale, CMYK), PNG, GIF and BMP are told apart by their bytes. A file that
    cannot be decoded ends training with an error that names the row; only a JPEG file that begins
    and ends well and is rotten in between is reported by TensorFlow without it, and
    `find_unreadable_rows` finds it. EXIF orientation is not applied.

    Args:
        image_size: height and width of the result, at least 1.
        area_range: smallest and largest fraction of the image's area, in (0, 1].
        aspect_ratio_range: smallest and largest width / height, above 0.
        flip: mirror left and right with probability 1/2.

    Raises:
        ConfigurationError: an argument is of the wrong kind or out of range.
    """

    def __init__(
        self,
        image_size: int = 224,
        *,
        area_range: tuple[float, float] = (0.08, 1.0),
        aspect_ratio_range: tuple[float, float] = (3 / 4, 4 / 3),
        flip: bool = True,
    ) -> None:
        self._image_size = checked_integer(image_size, "image_size", minimum=1)
        self._area_range = _checked_range(area_range, "area_range", maximum=1.0)
        self._aspect_ratio_range = _checked_range(aspect_ratio_range, "aspect_ratio_range")
        self._flip = bool(flip)

    def __call__(self, seed: tf.Tensor, image: tf.Tensor, *rest: Any) -> Any:
        """Pixels of one row, uint8 `[image_size, image_size, 3]`, and what came behind the image.

        Args:
            seed: int64 `[2]`; the second number is the row's, for errors.
            image: the encoded image, string `[]`.
            *rest: handed on, as the label.

        Returns:
            `(pixels, *rest)`, or `pixels` where there is no rest.
        """
        numbers = self._numbers(seed)
        window = decode_window(
            image, seed=seed, choose_window=lambda shape: self._window(numbers, shape)
        )
        pixels = _resized(window, [self._image_size] * 2)
        if self._flip:
            # Of [height, width, 3]: TensorFlow mirrors a batch of images many times slower.
            pixels = tf.cond(numbers[-1] < 0.5, lambda: tf.reverse(pixels, [1]), lambda: pixels)
        return _row(pixels, self._image_size, rest)

    def window(self, seed: tf.Tensor, image_shape: tf.Tensor) -> tf.Tensor:
        """The window that this seed cuts out of an image of this shape.

        Args:
            seed: int64 `[2]`, as for a call.
            image_shape: int32 `[2]` or more: height and width first.

        Returns:
            int32 `[4]`: y, x, height and width, as `tf.io.decode_and_crop_jpeg` takes them.
        """
        return self._window(self._numbers(seed), tf.convert_to_tensor(image_shape))

    @staticmethod
    def _numbers(seed: tf.Tensor) -> tf.Tensor:
        """All that a row needs: an area and a ratio for each attempt, the place, the flip."""
        return tf.random.stateless_uniform([2 * _ATTEMPTS + 3], seed, dtype=tf.float64)

    def _window(self, numbers: tf.Tensor, image_shape: tf.Tensor) -> tf.Tensor:
        # A row pays a microsecond or two for each op here, however small.
        areas, ratios, place, _ = tf.split(numbers, [_ATTEMPTS, _ATTEMPTS, 2, 1])
        limits = tf.cast(image_shape[:2], tf.float64)  # height, width
        roots = tf.sqrt(_between(areas, self._area_range) * tf.reduce_prod(limits))
        half_logs = 0.5 * np.log(self._aspect_ratio_range)
        stretches = tf.exp(_between(ratios, half_logs))  # the square root of width / height
        drawn = tf.stack([roots / stretches, roots * stretches], axis=1)
        narrowest, widest = self._aspect_ratio_range
        largest = tf.minimum(limits, limits[::-1] * [[1 / narrowest, widest]])
        # [attempt and, at the end, the largest; height, width]
        sizes = tf.maximum(tf.round(tf.concat([drawn, largest], axis=0)), 1.0)
        fits = tf.reduce_all(sizes <= limits, axis=1)
        size = tf.gather(sizes, tf.argmax(tf.cast(fits, tf.int32)))  # the first that fits
        start = tf.floor(place * (limits - size + 1.0))
        return tf.cast(tf.concat([start, size], axis=0), tf.int32)


class ResizeAndCenterCrop:
    """Row function for validation: the shorter side to `resize_size`, then the centre.

    The longer side becomes `resize_size * longer // shorter`; bilinear, half-pixel centres, no
    antialiasing; rounded to uint8. Cutting first and resizing the cut would shift the sampling
    grid, and sampling the cut alone (`tf.image.crop_and_resize`) takes longer than resizing the
    whole. An image more than 50 times as long as wide is refused, with its row. What is said of
    files and errors in `RandomResizedCrop` holds here too.

    Args:
        image_size: height and width of the result, at least 1.
        resize_size: shorter side before the cut, at least `image_size`.

    Raises:
        ConfigurationError: an argument is no integer or out of range.
    """

    def __init__(self, image_size: int = 224, *, resize_size: int = 256) -> None:
        self._image_size = checked_integer(image_size, "image_size", minimum=1)
        self._resize_size = checked_integer(resize_size, "resize_size", minimum=self._image_size)

    def __call__(self, seed: tf.Tensor, image: tf.Tensor, *rest: Any) -> Any:
        """As `RandomResizedCrop.__call__`; of `seed`, only the row's number is used."""
        whole = decode_window(
            image, seed=seed, choose_window=lambda shape: tf.concat([[0, 0], shape[:2]], axis=0)
        )
        sides = tf.shape(whole)[:2]
        # The whole is resized, in float32: a line of one pixel would take gigabytes.
        fits = tf.debugging.Assert(
            tf.reduce_max(sides) <= _LARGEST_ASPECT_RATIO * tf.reduce_min(sides),
            ["row", seed[1], "is too long an image for its width; height and width:", sides],
        )
        with tf.control_dependencies([] if fits is None else [fits]):
            sides = tf.identity(sides)
        sides = self._resize_size * sides // tf.reduce_min(sides)
        top, left = tf.unstack((sides - self._image_size) // 2)
        resized = _resized(whole, sides)
        centre = resized[top : top + self._image_size, left : left + self._image_size]
        return _row(centre, self._image_size, rest)


class NormalizeImages:
    """Function for batches (`map_fn`): uint8 images to `(pixel - mean) / std`, in one pass.

    `pixel * (1 / std) + (-mean / std)` is computed in float32, whatever the dtype, and rounded to
    it once. Mean and std are repeated over the width first: against a last dimension of three
    TensorFlow takes four times as long (1.6 ms of processor time for an image of 224 x 224).

    The cheapest normalisation is none in the input pipeline at all: hand uint8 to the model, a
    quarter of the bytes, and let its first layer do it on the device:

        images = keras.Input([224, 224, 3], dtype="uint8")
        x = keras.layers.Normalization(
            mean=IMAGENET_MEAN, variance=numpy.square(IMAGENET_STD))(images)

    Args:
        mean: of each channel, in units of 0 to 255.
        std: of each channel, in units of 0 to 255, above 0.
        dtype: "float32", "float16" or "bfloat16".

    Raises:
        ConfigurationError: an argument is of the wrong kind or out of range.
    """

    def __init__(
        self,
        *,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        dtype: FloatDtype = "float32",
    ) -> None:
        if dtype not in get_args(FloatDtype):
            raise ConfigurationError(
                f"dtype must be 'float32', 'float16' or 'bfloat16', but is {dtype!r}; for uint8, "
                "leave NormalizeImages out and normalise in the model's first layer."
            )
        means, stds = np.asarray(mean, np.float64), np.asarray(std, np.float64)
        if means.ndim != 1 or means.shape != stds.shape or not np.all(stds > 0.0):
            raise ConfigurationError(
                "mean and std must hold one number a channel, std above 0, but are "
                f"{mean!r} and {std!r}."
            )
        self._scale = (1.0 / stds).astype(np.float32)
        self._offset = (-means / stds).astype(np.float32)
        self._dtype = tf.as_dtype(dtype)

    def __call__(self, images: tf.Tensor, *rest: Any) -> Any:
        """Normalises images `[..., channel]`; returns `(images, *rest)`, or `images` alone."""
        images = tf.convert_to_tensor(images)
        if images.shape[-1] != len(self._scale):
            raise ConfigurationError(
                f"images must have {len(self._scale)} channels last, as many as mean and std, but "
                f"have shape {images.shape}."
            )
        repeats = (images.shape[-2] if images.shape.rank > 1 else None) or 1
        shape = tf.shape(images)
        lines = tf.reshape(images, [-1, repeats * len(self._scale)])  # [line, pixel * channel]
        lines = tf.cast(lines, tf.float32) * np.tile(self._scale, repeats)
        normalized = tf.cast(lines + np.tile(self._offset, repeats), self._dtype)
        normalized = tf.ensure_shape(tf.reshape(normalized, shape), images.shape)
        return (normalized, *rest) if rest else normalized


def _between(uniform: tf.Tensor, ends: Sequence[float]) -> tf.Tensor:
    return ends[0] + (ends[1] - ends[0]) * uniform


def _resized(image: tf.Tensor, sides: Any) -> tf.Tensor:
    """`tf.image.resize`, bilinear, rounded to uint8; its checks alone would cost 5 % of a row."""
    pixels = tf.raw_ops.ResizeBilinear(images=image[None], size=sides, half_pixel_centers=True)[0]
    # The values lie between those of the image, so a half more, cut off, is rounding.
    return tf.cast(pixels + 0.5, tf.uint8)


def _row(pixels: tf.Tensor, image_size: int, rest: tuple[Any, ...]) -> Any:
    pixels = tf.ensure_shape(pixels, [image_size, image_size, 3])
    return (pixels, *rest) if rest else pixels


def _checked_range(
    ends: Sequence[float], name: str, *, maximum: float = float("inf")
) -> tuple[float, float]:
    if len(ends) != 2 or not 0.0 < ends[0] <= ends[1] <= maximum or np.isinf(ends[1]):
        limit = "" if np.isinf(maximum) else f" and at most {maximum:g}"
        raise ConfigurationError(
            f"{name} must be (smallest, largest), both above 0{limit}, but is {ends!r}."
        )
    return float(ends[0]), float(ends[1])
