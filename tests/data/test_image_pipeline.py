from __future__ import annotations

import keras
import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf

from tests.data._images import encoded, jpeg, photograph
from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.data._image_pipeline import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    NormalizeImages,
    RandomResizedCrop,
    ResizeAndCenterCrop,
)


def seed_of(row: int, stream: int = 7) -> tf.Tensor:
    return tf.constant([stream, row], tf.int64)


def windows(crop: RandomResizedCrop, shape: list[int], count: int) -> npt.NDArray[np.float64]:
    seeds = tf.stack([tf.fill([count], tf.constant(7, tf.int64)), tf.range(count, dtype=tf.int64)])

    @tf.function
    def all_windows():
        return tf.map_fn(
            lambda seed: crop.window(seed, shape),
            tf.transpose(seeds),
            fn_output_signature=tf.TensorSpec([4], tf.int32),
        )

    return all_windows().numpy().astype(float)  # [row, (y, x, height, width)]


def distance_to(cdf: npt.NDArray[np.float64]) -> float:
    """Kolmogorov's, of a sample whose values are already mapped by the expected distribution."""
    ordered = np.sort(cdf)
    steps = np.arange(len(cdf) + 1) / len(cdf)
    return float(np.max(np.maximum(steps[1:] - ordered, ordered - steps[:-1])))


def bilinear(image: npt.NDArray[np.uint8], height: int, width: int) -> npt.NDArray[np.float64]:
    """Half-pixel centres: output i samples the input at (i + 0.5) * scale - 0.5, edges repeated."""
    result = image.astype(float)
    for axis, size in enumerate((height, width)):
        length = result.shape[axis]
        place = np.clip((np.arange(size) + 0.5) * length / size - 0.5, 0, length - 1)
        low = np.floor(place).astype(int)
        share = np.expand_dims(place - low, [other for other in range(3) if other != axis])
        high = np.minimum(low + 1, length - 1)
        result = result.take(low, axis) * (1 - share) + result.take(high, axis) * share
    return result


# Four standard deviations of a fraction; Kolmogorov's distance at a probability of 0.001.
SAMPLE = 4000
KOLMOGOROV = 1.95 / np.sqrt(SAMPLE)


def test_windows_are_distributed_as_stated() -> None:
    """In a square, a ratio r and an area a fit together where a <= min(r, 1 / r)."""
    side, smallest, widest = 100_000, 0.08, np.log(4 / 3)
    y, x, height, width = windows(RandomResizedCrop(), [side, side, 3], SAMPLE).T
    areas, logs = height * width / side**2, np.log(width / height)
    assert np.all(areas >= smallest - 1e-4) and np.all(np.abs(logs) <= widest + 1e-4)

    # Uniform over the region: below 3 / 4 all ratios fit, above it those with |log r| <= -log a.
    def area_measure(a):
        below = np.minimum(a, 0.75) - smallest
        above = np.maximum(a, 0.75)
        return (
            2 * widest * below
            + 2 * (above - above * np.log(above))
            - 2 * (0.75 - 0.75 * np.log(0.75))
        )

    assert distance_to(area_measure(areas) / area_measure(1.0)) < KOLMOGOROV

    def log_measure(t):  # the integral of exp(-|t|) - smallest
        return np.sign(t) * (1 - np.exp(-np.abs(t)) - smallest * np.abs(t))

    total = 2 * log_measure(widest)
    assert distance_to(0.5 + log_measure(logs) / total) < KOLMOGOROV

    free = side + 1 - np.stack([height, width])
    for places in (np.stack([y, x]) + 0.5) / free:
        assert distance_to(places) < KOLMOGOROV
    assert abs(np.corrcoef(y / free[0], x / free[1])[0, 1]) < 4 / np.sqrt(SAMPLE)


def test_windows_lie_inside_images_of_any_shape() -> None:
    crop = RandomResizedCrop()
    for shape in ([1, 1], [1, 7], [9, 2], [375, 500], [3, 1000]):
        y, x, height, width = windows(crop, shape, 200).T
        assert np.all((y >= 0) & (x >= 0) & (height >= 1) & (width >= 1))
        assert np.all((y + height <= shape[0]) & (x + width <= shape[1]))


def test_where_no_drawn_window_fits_it_is_the_largest_of_a_permitted_ratio() -> None:
    # 8 % of 10 x 1000 pixels are 800, but 10 x 13 is all that a ratio of 4 / 3 allows.
    wide = windows(RandomResizedCrop(), [10, 1000, 3], 300)
    assert {tuple(size) for size in wide[:, 2:]} == {(10, 13)}
    assert wide[:, 1].min() < 100 and wide[:, 1].max() > 887
    tall = windows(RandomResizedCrop(), [1000, 10, 3], 50)
    assert {tuple(size) for size in tall[:, 2:]} == {(13, 10)}
    # The whole image, where its own ratio is permitted.
    whole = windows(RandomResizedCrop(area_range=(1.0, 1.0)), [50, 60, 3], 50)
    assert whole.max(axis=0).tolist() == [0, 0, 50, 60]


def test_windows_are_the_same_on_every_machine() -> None:
    """Stored once: other values mean that training elsewhere, or resumed, sees other pixels."""
    assert windows(RandomResizedCrop(), [375, 500, 3], 4).astype(int).tolist() == [
        [67, 179, 308, 308],
        [46, 181, 288, 245],
        [45, 69, 310, 413],
        [24, 185, 337, 272],
    ]


def usual_pipeline(image: bytes, window: tf.Tensor, *, size: int, flip: bool) -> tf.Tensor:
    pixels = tf.image.decode_and_crop_jpeg(image, window, channels=3)
    pixels = tf.image.resize(pixels, [size, size])
    return tf.image.flip_left_right(pixels) if flip else pixels


def test_pixels_are_those_of_the_usual_float_pipeline_to_the_rounding_of_uint8() -> None:
    crop = RandomResizedCrop(48)
    flips = 0
    for row in range(12):
        image = jpeg(90 + row, 150 - 9 * row, seed=row)
        pixels, label = crop(seed_of(row), tf.constant(image), 5)
        assert (pixels.shape, pixels.dtype, label) == ((48, 48, 3), tf.uint8, 5)
        window = crop.window(seed_of(row), tf.io.extract_jpeg_shape(image))
        distances = [
            np.abs(usual_pipeline(image, window, size=48, flip=flip) - tf.cast(pixels, tf.float32))
            for flip in (False, True)
        ]
        flips += bool(distances[1].max() < distances[0].max())
        assert min(distance.max() for distance in distances) <= 0.5 + 1e-4
        assert max(distance.max() for distance in distances) > 2.0
    assert 0 < flips < 12


def test_half_of_the_images_are_mirrored_and_none_without_flip() -> None:
    ramp = np.broadcast_to(np.arange(64, dtype=np.uint8)[None, :, None] * 3, (64, 64, 3))
    image = tf.io.encode_jpeg(np.ascontiguousarray(ramp), quality=100)
    count = 1000

    def mirrored(crop: RandomResizedCrop) -> int:
        rows = tf.data.Dataset.range(count).map(
            lambda row: crop(tf.stack([tf.constant(3, tf.int64), row]), image)
        )
        batch = next(iter(rows.batch(count))).numpy().astype(int)
        return int(np.sum(batch[:, 4, 0, 0] > batch[:, 4, -1, 0]))

    assert abs(mirrored(RandomResizedCrop(8)) - count / 2) < 4 * np.sqrt(count) / 2
    assert mirrored(RandomResizedCrop(8, flip=False)) == 0


@pytest.mark.parametrize(("height", "width"), [(90, 120), (120, 90), (64, 64), (40, 230)])
def test_validation_is_a_resize_and_a_centre_cut(height: int, width: int) -> None:
    image = photograph(height, width)
    rows = (64, 64 * width // height) if height <= width else (64 * height // width, 64)
    resized = bilinear(np.asarray(image), *rows)
    top, left = (rows[0] - 56) // 2, (rows[1] - 56) // 2
    expected = resized[top : top + 56, left : left + 56]
    crop = ResizeAndCenterCrop(56, resize_size=64)
    pixels = crop(seed_of(0), tf.constant(encoded(image, "PNG")))
    assert (pixels.shape, pixels.dtype) == ((56, 56, 3), tf.uint8)
    assert np.abs(pixels.numpy() - expected).max() <= 0.5 + 1e-3
    # A JPEG file takes the other way, to the pixels that the whole file decodes to.
    lossy = encoded(image, "JPEG", quality=90)
    decoded = tf.io.decode_jpeg(lossy, channels=3).numpy()
    expected = bilinear(decoded, *rows)[top : top + 56, left : left + 56]
    assert np.abs(crop(seed_of(0), tf.constant(lossy)).numpy() - expected).max() <= 0.5 + 1e-3


def test_upscaling_a_tiny_image() -> None:
    image = photograph(5, 4)
    pixels = ResizeAndCenterCrop(16, resize_size=16)(seed_of(0), encoded(image, "PNG"))
    expected = bilinear(np.asarray(image), 20, 16)[2:18]
    assert np.abs(pixels.numpy() - expected).max() <= 0.5 + 1e-3


def test_a_row_does_not_depend_on_threads_order_or_neighbours() -> None:
    images = [
        jpeg(seed=row) if row % 4 else encoded(photograph(50, 70, seed=row), "PNG")
        for row in range(24)
    ]
    crop = RandomResizedCrop(32)

    def by_row(order: npt.NDArray[np.int64], num_parallel_calls: int) -> dict[int, bytes]:
        rows = tf.data.Dataset.from_tensor_slices((order, [images[row] for row in order]))
        read = rows.map(
            lambda row, image: crop(tf.stack([tf.constant(9, tf.int64), row]), image, row),
            num_parallel_calls=num_parallel_calls,
            deterministic=False,
        )
        return {int(row): pixels.numpy().tobytes() for pixels, row in read}

    order = np.arange(24)
    one = by_row(order, 1)
    assert by_row(np.random.default_rng(0).permutation(order), 4) == one
    assert by_row(order[::-1][:5], 2) == {row: one[row] for row in order[-5:]}  # as after a resume
    assert len(set(one.values())) == 24


def test_other_streams_and_rows_get_other_windows() -> None:
    crop = RandomResizedCrop()
    seen = {
        tuple(crop.window(seed_of(row, stream), [375, 500]).numpy())
        for stream in (0, 1, 2**62)
        for row in (0, 1, 2)
    }
    assert len(seen) == 9


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 1e-6), ("float16", 2**-11), ("bfloat16", 2**-8)]
)
def test_normalisation(dtype: str, tolerance: float) -> None:
    images = np.random.default_rng(0).integers(0, 256, (6, 5, 4, 3), dtype=np.uint8)
    expected = (images - np.array([123.675, 116.28, 103.53])) / np.array([58.395, 57.12, 57.375])
    rows = tf.data.Dataset.from_tensor_slices((images, np.arange(6)))
    batches = rows.batch(4).map(NormalizeImages(dtype=dtype), num_parallel_calls=2)
    assert batches.element_spec[0] == tf.TensorSpec([None, 5, 4, 3], dtype)
    (first, labels), (last, _) = batches
    assert labels.numpy().tolist() == [0, 1, 2, 3]
    seen = tf.cast(tf.concat([first, last], 0), tf.float64).numpy()
    # Rounded once: half a unit in the last place of the dtype.
    np.testing.assert_allclose(seen, expected, rtol=tolerance, atol=1e-6)


def test_normalisation_of_images_alone_and_of_none() -> None:
    normalize = NormalizeImages(mean=(10.0,), std=(2.0,))
    assert normalize(tf.constant([[[14], [10]]], tf.uint8)).numpy().ravel().tolist() == [2.0, 0.0]
    images, labels = normalize(tf.zeros([0, 2, 2, 1], tf.uint8), tf.zeros([0], tf.int64))
    assert images.shape == (0, 2, 2, 1) and labels.shape == (0,)


def test_normalisation_as_the_models_first_layer() -> None:
    images = np.random.default_rng(0).integers(0, 256, (2, 3, 3, 3), dtype=np.uint8)
    layer = keras.layers.Normalization(mean=IMAGENET_MEAN, variance=np.square(IMAGENET_STD))
    np.testing.assert_allclose(layer(images), NormalizeImages()(images), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RandomResizedCrop(0), "image_size must be at least 1"),
        (lambda: RandomResizedCrop(224.0), "image_size must be an integer"),
        (lambda: RandomResizedCrop(area_range=(0.0, 1.0)), r"area_range must be \(smallest"),
        (lambda: RandomResizedCrop(area_range=(0.5, 1.1)), "above 0 and at most 1, but is"),
        (lambda: RandomResizedCrop(area_range=(0.5, 0.4)), r"but is \(0.5, 0.4\)"),
        (lambda: RandomResizedCrop(aspect_ratio_range=(1, float("inf"))), "aspect_ratio_range"),
        (lambda: ResizeAndCenterCrop(224, resize_size=200), "resize_size must be at least 224"),
        (lambda: NormalizeImages(dtype="uint8"), "for uint8, leave NormalizeImages out"),
        (lambda: NormalizeImages(mean=(1, 2), std=(1,)), "one number a channel"),
        (lambda: NormalizeImages(std=(1, 1, 0)), "std above 0"),
        (lambda: NormalizeImages()(tf.zeros([1, 2, 2, 1])), "must have 3 channels last"),
    ],
)
def test_refused(make, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_an_image_that_is_a_line_is_refused_with_its_row() -> None:
    line = tf.io.encode_png(tf.zeros([2, 101, 3], tf.uint8))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"(?s)row.*17"):
        ResizeAndCenterCrop(8, resize_size=8)(tf.constant([0, 17], tf.int64), line)
    short = tf.io.encode_png(tf.zeros([2, 100, 3], tf.uint8))
    assert ResizeAndCenterCrop(8, resize_size=8)(tf.constant([0, 17], tf.int64), short).shape == (
        [8, 8, 3]
    )
