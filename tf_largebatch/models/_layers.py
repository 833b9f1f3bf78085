"""The layers of a residual network, set up once: initialisers, decay, batch norm, seeds."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import keras

from tf_largebatch.models import _checks


@dataclass(frozen=True)
class LayerFactory:
    """Makes each layer from its name; nothing depends on the order in which layers are made.

    All are plain Keras layers, initialisers and regularisers, so that a saved model loads in a
    process which has imported Keras alone.
    """

    zero_init_residual: bool
    weight_decay: float
    batch_norm_momentum: float
    batch_norm_epsilon: float
    seed: int | None

    def __post_init__(self) -> None:
        _checks.require_channels_last()
        if self.seed is not None:
            _checks.whole_number(self.seed, "seed")
        checked = {
            "weight_decay": _checks.number_in_range(
                self.weight_decay,
                "weight_decay",
                0.0,
                float("inf"),
                low_is_allowed=True,
                hint="use 0.0 for none, 1e-4 for the paper's",
            ),
            "batch_norm_momentum": _checks.number_in_range(
                self.batch_norm_momentum,
                "batch_norm_momentum",
                0.0,
                1.0,
                low_is_allowed=True,
                hint="it is the share of the old moving average that stays; the paper's is 0.9",
            ),
            "batch_norm_epsilon": _checks.number_in_range(
                self.batch_norm_epsilon,
                "batch_norm_epsilon",
                0.0,
                float("inf"),
                low_is_allowed=False,
                hint="it keeps the division finite; 1e-5 is usual",
            ),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def conv(self, x: Any, filters: int, kernel: int, stride: int, *, name: str) -> Any:
        """A convolution without bias; where it has a stride, padded alike on both sides.

        Keras' own "same" pads a strided convolution on an even image at the bottom and the right
        only. The networks whose results are published pad `kernel // 2` on every side.
        """
        if stride > 1 and kernel > 1:
            x = keras.layers.ZeroPadding2D(kernel // 2, name=f"{name}_pad")(x)
        return keras.layers.Conv2D(
            filters,
            kernel,
            strides=stride,
            padding="same" if stride == 1 else "valid",
            use_bias=False,
            kernel_initializer=keras.initializers.VarianceScaling(
                scale=2.0,
                mode="fan_out",
                distribution="untruncated_normal",
                seed=self._seed_of(name),
            ),
            kernel_regularizer=self._regularizer(),
            name=name,
        )(x)

    def norm(self, x: Any, *, name: str, last_of_branch: bool = False) -> Any:
        """A batch norm; the last of a residual branch may start as zero. Never decayed."""
        starts_at_zero = last_of_branch and self.zero_init_residual
        return keras.layers.BatchNormalization(
            momentum=self.batch_norm_momentum,
            epsilon=self.batch_norm_epsilon,
            gamma_initializer="zeros" if starts_at_zero else "ones",
            name=name,
        )(x)

    def relu(self, x: Any, *, name: str) -> Any:
        """A rectifier with a name of its own, so that its output can be looked up."""
        return keras.layers.ReLU(name=name)(x)

    def classifier(self, x: Any, num_classes: int, activation: Any) -> Any:
        """Global average and a dense layer: weights normal with deviation 0.01, biases zero."""
        policy = keras.config.dtype_policy()
        is_mixed = policy.compute_dtype != policy.variable_dtype
        x = keras.layers.GlobalAveragePooling2D(name="global_pool")(x)
        return keras.layers.Dense(
            num_classes,
            activation=activation,
            kernel_initializer=keras.initializers.RandomNormal(
                stddev=0.01, seed=self._seed_of("classifier")
            ),
            kernel_regularizer=self._regularizer(),
            # Near 10 a float16 moves in steps of 1/128, a bfloat16 of 1/16: too coarse for logits.
            dtype=policy.variable_dtype if is_mixed else None,
            name="classifier",
        )(x)

    def _seed_of(self, layer_name: str) -> int | None:
        """This layer's own seed, or None to leave it to Keras' global one."""
        if self.seed is None:
            return None
        digest = hashlib.sha256(f"{int(self.seed)}/{layer_name}/kernel".encode()).digest()
        return int.from_bytes(digest[:4], "big") >> 1  # 31 bits, as signed 32-bit seeds need

    def _regularizer(self) -> keras.regularizers.Regularizer | None:
        """Keras' L2 factor is that of the sum of squares, so its gradient is twice the factor."""
        return keras.regularizers.L2(self.weight_decay / 2) if self.weight_decay else None
