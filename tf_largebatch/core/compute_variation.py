"""How unevenly replicas compute: what the slowest of them is expected to take, and draws of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.core.scaling import require_count, require_number

_LARGEST_VARIATION = 0.3  # deviations; a normal draw below 1 - 3.3 * 0.3 = 0 is one in 2,000
_SMALLEST_FACTOR = 0.01


def checked_variation(variation: Any) -> float:
    """`variation` as a float.

    Raises:
        ConfigurationError: it is no number from 0 to 0.3. Times beyond that are nowhere near
            normal, and some would be negative.
    """
    number = require_number("variation", variation, may_equal_minimum=True)
    if number > _LARGEST_VARIATION:
        raise ConfigurationError(
            f"variation={variation!r}: must be at most {_LARGEST_VARIATION}, a deviation relative "
            "to the mean."
        )
    return number


def slowest_factor(count: int, *, variation: float) -> float:
    """What the slowest of `count` replicas takes on average, where one alone takes 1.

    Each takes `1 + variation * z` with a standard normal z of its own, each step anew:
    `1 + variation * expected_maximum(count)`.

    Raises:
        ConfigurationError: `count` is no count, or `variation` none (see `checked_variation`).
    """
    return 1.0 + checked_variation(variation) * expected_maximum(count)


def expected_maximum(count: int) -> float:
    """The mean of the largest of `count` standard normal numbers: 0, 0.564, 0.846, 1.029, ...

    `E = integral of z d(F(z)^count)`, F their distribution; to about 1e-6 for counts to a million.

    Raises:
        ConfigurationError: `count` is no integer or below 1.
    """
    count = require_count("count", count)
    z = np.linspace(-9.0, 9.0, 36_001)
    density = np.exp(-0.5 * z * z)
    below = np.concatenate([[0.0], np.cumsum(0.5 * (density[1:] + density[:-1]))])
    of_largest = (below / below[-1]) ** count
    # By parts: z F^n at the upper end, less the integral of F^n.
    inner = 0.5 * (of_largest[1:] + of_largest[:-1])
    return float(z[-1] - np.sum(inner) * (z[1] - z[0]))


def compute_factors(
    hosts: int, *, replicas_per_host: int, variation: float, seed: int, step: int
) -> npt.NDArray[np.float64]:
    """What each host's slowest replica takes in `step`, where the mean of a replica is 1.

    A replica's number is drawn from `Philox(key=[seed, step])` at the replica's own place, so it
    depends on (seed, step, host, replica) alone, not on how many hosts there are.

    Returns:
        float64 `[host]`, of which none is below 0.01.

    Raises:
        ConfigurationError: an argument is no integer or out of range.
    """
    hosts = require_count("hosts", hosts)
    replicas = hosts * require_count("replicas_per_host", replicas_per_host)
    key = [require_count(name, each, minimum=0) for name, each in (("seed", seed), ("step", step))]
    draws = np.random.Philox(key=np.array(key, dtype=np.uint64)).random_raw(2 * replicas)
    # Raw output does not change between NumPy versions. 53 bits, in (0, 1].
    uniform = ((draws >> np.uint64(11)).astype(np.float64) + 1.0) * 2.0**-53
    radius, angle = uniform.reshape(replicas, 2).T  # Box and Muller 1958
    normal = np.sqrt(-2.0 * np.log(radius)) * np.cos(2.0 * np.pi * angle)
    slowest = normal.reshape(hosts, replicas_per_host).max(axis=1)  # [host]
    factors: npt.NDArray[np.float64] = np.maximum(
        1.0 + checked_variation(variation) * slowest, _SMALLEST_FACTOR
    )
    return factors
