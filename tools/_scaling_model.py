"""The network of `benchmark_scaling.py`: little to compute, and a time that it takes nevertheless.

It is a chain of matrices, x W_1 ... W_L, whose width doubles three times, as that of ResNets does:
most gradients are those of the last layers, which backward makes first. All layers take the same
time: every product is followed by a pause, in backward as well. A third of the time is forward.

A pause sleeps, in a thread of TensorFlow's, until the moment at which an accelerator of its own
would be done. The moments of a step follow from when its first pause began, so that it takes
`compute_seconds` from there, however late a thread wakes up: as with a device to which work is
handed ahead.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

_SEED = 1
_BYTES = 4  # of a value
_STAGES = 4
_FORWARD_PART = 1 / 3
_NOISE = 0.1  # of the matrices, which are near the identity
_TARGET_SCALE = 0.5
LEARNING_RATE = 0.5
# Of how a matrix has changed, against float64; float32 is far nearer, bfloat16 on the wire is not.
# A worker's gradient that is missing or counts twice makes about 1 / sqrt(workers).
_TOLERANCE = 1e-2

Array = npt.NDArray[np.float32]


class Clock:
    """The moments of a step at which each layer is done, forward and then backward."""

    def __init__(self, num_layers: int, compute_seconds: float) -> None:
        forward = compute_seconds * _FORWARD_PART / num_layers
        backward = compute_seconds * (1 - _FORWARD_PART) / num_layers
        self._done_forward = [forward * (layer + 1) for layer in range(num_layers)]
        whole = compute_seconds
        self._done_backward = [whole - backward * layer for layer in range(num_layers)]
        self._begin = 0.0

    def pause(self, layer: int, *, is_forward: bool) -> None:
        now = time.monotonic()
        if is_forward and layer == 0:
            self._begin = now
        done = (self._done_forward if is_forward else self._done_backward)[layer]
        time.sleep(max(0.0, self._begin + done - now))


class PausedProduct(keras.layers.Layer):
    """x W, and a pause.

    Args:
        clock: of the model.
        number: of the layer, from 0.
        initial: W to begin with.
    """

    def __init__(self, clock: Clock, number: int, initial: Array) -> None:
        super().__init__()
        self._clock, self._number, self._initial = clock, number, initial

    def build(self, input_shape: Sequence[int | None]) -> None:
        self.kernel = self.add_weight(
            name="kernel",
            shape=self._initial.shape,
            initializer=lambda shape, dtype: tf.constant(self._initial, dtype),
        )

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        @tf.custom_gradient
        def after_pause(
            values: tf.Tensor,
        ) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
            return self._pause(values, True), lambda gradient: self._pause(gradient, False)

        return after_pause(tf.matmul(inputs, self.kernel))

    def _pause(self, values: tf.Tensor, is_forward: bool) -> tf.Tensor:
        def pause(unchanged: Array) -> Array:
            self._clock.pause(self._number, is_forward=is_forward)
            return unchanged

        # Without state, so that it is ordered by its data alone.
        paused = tf.numpy_function(pause, [values], values.dtype, stateful=False)
        paused.set_shape(values.shape)
        return paused


def initial_matrices(num_layers: int, gradient_bytes: float) -> list[Array]:
    """The chain's matrices, which together have about as many bytes; equal on all workers."""
    factors = [2 ** (_STAGES * layer // num_layers) for layer in range(num_layers)]
    factors.append(factors[-1])
    values = sum(before * after for before, after in itertools.pairwise(factors))
    base = max(1, round((gradient_bytes / _BYTES / values) ** 0.5))
    random = np.random.default_rng(_SEED)
    matrices = []
    for before, after in itertools.pairwise(base * factor for factor in factors):
        noise = random.standard_normal((before, after)) * _NOISE / before**0.5
        matrices.append((np.eye(before, after) + noise).astype(np.float32))
    return matrices


def make_rows(count: int, matrices: Sequence[Array]) -> tuple[Array, Array]:
    """Inputs and targets, `[row, column]`."""
    random = np.random.default_rng(_SEED + 1)
    x, y = (
        random.standard_normal((count, columns)).astype(np.float32)
        for columns in (len(matrices[0]), matrices[-1].shape[1])
    )
    return x, _TARGET_SCALE * y


def build_model(matrices: Sequence[Array], compute_seconds: float) -> keras.Model:
    """Compiled."""
    clock = Clock(len(matrices), compute_seconds)
    layers = [PausedProduct(clock, number, each) for number, each in enumerate(matrices)]
    model = keras.Sequential([keras.Input((len(matrices[0]),)), *layers])
    model.compile(keras.optimizers.SGD(LEARNING_RATE), "mse")
    return model


def trained(matrices: Sequence[Array], batches: Sequence[tuple[Array, Array]]) -> list[Array]:
    """What the matrices are after a step on each of these global batches, by NumPy in float64.

    The loss is the mean square over rows and columns, whose gradient at the output is
    2 (output - y) / (rows * columns).
    """
    weights = [matrix.astype(np.float64) for matrix in matrices]
    for x, y in batches:
        values = [x.astype(np.float64)]
        for weight in weights:
            values.append(values[-1] @ weight)
        gradient = 2.0 * (values[-1] - y) / y.size
        for layer in reversed(range(len(weights))):
            own = values[layer].T @ gradient
            gradient = gradient @ weights[layer].T
            weights[layer] = weights[layer] - LEARNING_RATE * own
    return weights


def wrong_weights(
    own: Sequence[Array], before: Sequence[Array], expected: Sequence[Array]
) -> list[str]:
    """Matrices that have not changed as they do where gradients are summed right."""
    problems = []
    for layer, (mine, old, new) in enumerate(zip(own, before, expected, strict=True)):
        difference = float(np.linalg.norm(mine - new) / np.linalg.norm(new - old))
        if not difference <= _TOLERANCE:
            problems.append(
                f"the change of matrix {layer} is off by {difference:.1e} of its size; "
                f"{_TOLERANCE:g} is allowed"
            )
    return problems
