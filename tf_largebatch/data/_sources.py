"""Sources of rows that can be read by number, in any order."""

from __future__ import annotations

import hashlib
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tf_largebatch.core.errors import ConfigurationError


@runtime_checkable
class RandomAccessSource(Protocol):
    """What the sharder and the evaluation need of a data set: its length, and rows by number.

    Implement these three for your own kind of storage. Only `gather` runs while training, inside
    a parallel `tf.data` map. A source of variable or large rows should be read by the sharder's
    `row_fn` one by one, and leave decoding to it.

    Two more are used where a source has them: `fingerprint`, a text that differs between data
    sets, by which a saved position of another data set is refused; and `describe_row(row)`, a text
    that says where a row lies, for messages.
    """

    def __len__(self) -> int:
        """The number of rows, the same on all workers."""
        ...

    @property
    def element_spec(self) -> Any:
        """The structure of one row: a nest of `tf.TypeSpec` without the batch dimension."""
        ...

    def gather(self, rows: tf.Tensor) -> Any:
        """The batch of these rows, in this order.

        Called once, while the function of a `tf.data` map is traced.

        Args:
            rows: int64 `[batch]`, each in `[0, len(self))`. The batch size may be unknown while
                tracing, may be 0, and rows may repeat.

        Returns:
            The structure of `element_spec`, each leaf with a leading batch dimension (static
            where that of `rows` is).
        """
        ...


class ArraySource:
    """Arrays in memory: row `i` is the structure of `array[i]`.

    The arrays are neither copied nor put into a graph. Each batch is gathered by one
    `numpy.take` a leaf, called from the map through `tf.numpy_function`. A captured TensorFlow
    tensor would be the other way; but `tf.constant` held twice the bytes of the array on top of
    the array (1,172 MiB for 586 MiB) and gathered no faster. Milliseconds a batch of rows of
    3 kB, on two busy cores: 64 rows about 0.45 either way, 1,024 rows 1.7 to 2.0 by
    `numpy.take` and 5.9 to 7.1 by `tf.gather`. DLPack, which does share memory,
    aborts the process for arrays not aligned to 64 bytes, as NumPy's seldom are. No TensorFlow
    op runs in the constructor, so a source may be made before the strategy. `numpy.memmap` works
    as well, and is read row by row.

    Args:
        arrays: a nested structure of tuples and dicts, as `(x, y)` or `({"a": ..., "b": ...}, y,
            sample_weight)`, of arrays or what `numpy.asarray` takes (a list is data, not
            structure). All with the same first dimension, the number of rows, at least 1. Dtypes
            are kept. Changing an array afterwards changes the data.

    Raises:
        ConfigurationError: names the leaf that has no rows, another number of rows than the
            first leaf, or a dtype that holds no numbers (text, bytes, objects, dates).
    """

    def __init__(self, arrays: Any) -> None:
        self._arrays = _as_arrays(arrays, "arrays")
        self._leaves: list[npt.NDArray[Any]] = tf.nest.flatten(self._arrays)
        if not self._leaves:
            raise ConfigurationError(f"arrays must hold at least one array, but is {arrays!r}.")
        _check_equal_lengths(self._arrays)

    def __len__(self) -> int:
        return len(self._leaves[0])

    @property
    def element_spec(self) -> Any:
        """The nest of `tf.TensorSpec` of one row."""
        return tf.nest.map_structure(
            lambda array: tf.TensorSpec(array.shape[1:], array.dtype), self._arrays
        )

    @property
    def fingerprint(self) -> str:
        """A hash of the dtypes, the shapes and up to 64 rows, evenly spaced."""
        rows = np.linspace(0, len(self) - 1, num=min(len(self), 64)).astype(np.int64)
        digest = hashlib.sha256()
        for leaf in self._leaves:
            digest.update(f"{leaf.dtype}{leaf.shape}".encode())
            digest.update(np.ascontiguousarray(leaf[rows]).tobytes())
        return digest.hexdigest()

    def gather(self, rows: tf.Tensor) -> Any:
        """See `RandomAccessSource.gather`."""
        batch = tf.numpy_function(
            lambda numbers: [np.take(leaf, numbers, axis=0) for leaf in self._leaves],
            [rows],
            [leaf.dtype for leaf in self._leaves],
        )
        for tensor, leaf in zip(batch, self._leaves, strict=True):
            tensor.set_shape([rows.shape[0], *leaf.shape[1:]])
        return tf.nest.pack_sequence_as(self._arrays, batch)


def _as_arrays(structure: Any, path: str) -> Any:
    """The structure with every leaf as a NumPy array of numbers, checked by itself."""
    if isinstance(structure, dict):
        return {key: _as_arrays(value, f"{path}[{key!r}]") for key, value in structure.items()}
    if isinstance(structure, tuple):
        parts = [_as_arrays(part, f"{path}[{i}]") for i, part in enumerate(structure)]
        return type(structure)(*parts) if hasattr(structure, "_fields") else tuple(parts)
    if isinstance(structure, list) and any(hasattr(part, "__array__") for part in structure):
        raise ConfigurationError(
            f"{path} is a list of arrays, which could mean one array or several; give several as "
            f"a tuple, ({', '.join(['...'] * len(structure))},), and one as np.stack(...)."
        )
    try:
        array = np.asarray(structure)
    except ValueError as error:  # ragged nested lists
        raise ConfigurationError(f"{path} cannot be made an array: {error}") from error
    _check_leaf(array, path)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _check_leaf(array: npt.NDArray[Any], path: str) -> None:
    if not _is_numeric(array.dtype):
        raise ConfigurationError(
            f"{path} has dtype {array.dtype}, which holds no numbers; ArraySource takes bool, "
            "integer, float and complex arrays. Encode texts, dates and objects as numbers first."
        )
    if array.ndim == 0:
        raise ConfigurationError(
            f"{path} is the scalar {array!r}, which has no rows; the first dimension of every "
            "array must be the number of rows."
        )
    if len(array) == 0:
        raise ConfigurationError(f"{path} has shape {array.shape}, no rows; give at least one.")


def _is_numeric(dtype: np.dtype[Any]) -> bool:
    # Texts and bytes are TensorFlow dtypes too, but NumPy strips trailing zero bytes from them.
    if dtype.kind in "OSUMm" or dtype.fields is not None:
        return False
    try:
        tf.as_dtype(dtype)  # also knows bfloat16 and the like, which NumPy calls void
    except TypeError:
        return False
    return True


def _check_equal_lengths(arrays: Any) -> None:
    (first_path, first), *others = _leaves_with_paths(arrays, "arrays")
    for path, array in others:
        if len(array) != len(first):
            raise ConfigurationError(
                f"{path} has {len(array)} rows, but {first_path} has {len(first)}; all arrays "
                "must have the same first dimension."
            )


def _leaves_with_paths(structure: Any, path: str) -> list[tuple[str, npt.NDArray[Any]]]:
    if isinstance(structure, dict):
        pairs = [(f"{path}[{key!r}]", value) for key, value in structure.items()]
    elif isinstance(structure, tuple):
        pairs = [(f"{path}[{i}]", value) for i, value in enumerate(structure)]
    else:
        return [(path, structure)]
    return [leaf for sub_path, value in pairs for leaf in _leaves_with_paths(value, sub_path)]
