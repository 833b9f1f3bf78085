"""The one door to TensorFlow's private API: the versions it opens for, and that all is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tensorflow as tf

from tf_largebatch.core.errors import UnsupportedVersionError
from tf_largebatch.distribute import _tf_internals
from tf_largebatch.distribute._tf_internals import (
    check_keras_version,
    check_tensorflow_version,
    in_xla_context,
)

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("version", ["2.18.0", "2.18.1", "2.20.0-rc0", "2.21.0", "2.21.1", "2.21"])
def test_tested_versions_pass(version: str) -> None:
    check_tensorflow_version(version)


@pytest.mark.parametrize("version", ["1.15.5", "2.9.0", "2.17.1", "2.22.0", "2.22.0-rc1", "3.0.0"])
def test_others_are_refused_with_both_sides(version: str) -> None:
    with pytest.raises(UnsupportedVersionError) as caught:
        check_tensorflow_version(version)
    assert f"TensorFlow {version} is installed" in str(caught.value)
    assert "2.18 to 2.21" in str(caught.value)
    assert isinstance(caught.value, ImportError)


def test_an_old_keras_is_refused() -> None:
    for version in ("3.10.0", "3.15.1", "4.0"):
        check_keras_version(version)
    with pytest.raises(UnsupportedVersionError, match=r"Keras 3\.9\.2 is installed"):
        check_keras_version("3.9.2")


def test_the_range_is_that_of_the_package() -> None:
    assert '"keras>=3.10"' in (ROOT / "pyproject.toml").read_text()
    (asked,) = re.findall(r'"tensorflow(>=.*)"', (ROOT / "pyproject.toml").read_text())
    oldest = ".".join(map(str, _tf_internals.OLDEST_TENSORFLOW))
    untested = ".".join(map(str, _tf_internals.FIRST_UNTESTED_TENSORFLOW))
    assert asked == f">={oldest},<{untested}"


def test_all_names_are_there() -> None:
    assert list(_tf_internals.__all__) == sorted(set(_tf_internals.__all__))
    assert all(getattr(_tf_internals, name) is not None for name in _tf_internals.__all__)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_in_xla_context(jit_compile: bool) -> None:
    seen: list[bool] = []

    @tf.function(jit_compile=jit_compile)
    def outer(x: tf.Tensor) -> tf.Tensor:
        @tf.function
        def inner(y: tf.Tensor) -> tf.Tensor:
            seen.append(in_xla_context())
            return y + 1.0

        return tf.cond(x > 0.0, lambda: inner(x), lambda: x)

    outer.get_concrete_function(tf.TensorSpec(()))
    assert seen == [jit_compile]
    assert not in_xla_context()
