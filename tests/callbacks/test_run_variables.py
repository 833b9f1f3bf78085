"""How it is seen which variables replicas have each for themselves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tf_largebatch.callbacks._run_variables import _differing, _folded_checksum

SIZES = [1, 4095, 4096, 4097, 3 * 4096, 3 * 4096 + 5]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", ["float32", "uint8", "int64"])
def test_any_bit_counts(size: int, dtype: str) -> None:
    data = np.random.default_rng(0).integers(0, 256, size * np.dtype(dtype).itemsize, np.uint8)
    value = data.view(dtype)
    before = _folded_checksum(value)
    assert _folded_checksum(value.copy()) == before
    for byte in {0, data.size // 2, data.size - 1}:
        for bit in (1, 128):
            data[byte] ^= bit
            assert _folded_checksum(value) != before
            data[byte] ^= bit


def replicas_of(other: Any, *, total: int = 2) -> Any:
    """This worker, and another one whose checksums are those of `other`."""

    def gather(value: Any, *, purpose: str) -> Any:
        return np.stack([value, [_folded_checksum(each) for each in other]])

    return SimpleNamespace(total=total, local=1, gather=gather)


def test_which_variables_differ() -> None:
    mine = [np.arange(5.0), np.ones(9000, np.float32), np.float32([np.nan])]
    other = [np.arange(5.0), np.ones(9000, np.float32), np.float32([np.nan])]
    other[1][8999] = 2.0
    assert _differing([[each] for each in mine], replicas_of(other)) == [1]
    assert _differing([[each] for each in mine], replicas_of(mine)) == []
    alone = replicas_of(None, total=1)
    assert _differing([[each] for each in mine], alone) == []
