"""Makes the variables of all workers equal when they start, without one broadcast for each.

TensorFlow broadcasts every variable from the chief as it is made: hundreds of collectives, one
after the other, for a network with its optimizer. Here each worker makes its own values. At the
end of the scope, and before anything runs, workers compare one checksum of all variables made
since; where they are equal, as they are from equal seeds (Yamazaki et al. 2019, section III-B),
nothing more is sent. Otherwise they compare the variables one by one, and those that differ come
from the chief, packed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tf_largebatch.core.buckets import assign_buckets
from tf_largebatch.core.errors import MismatchError
from tf_largebatch.core.topology import ClusterTopology
from tf_largebatch.distribute._comparison import gather_texts

_PACK_BYTES = 64 * 2**20
_CHECKSUM_BYTES = 8


class Workers(Protocol):
    """What the synchroniser asks of the cluster; every worker must ask it alike."""

    def gather(
        self, value: npt.NDArray[np.int64], *, purpose: str, detail: str = ""
    ) -> npt.NDArray[np.int64]:
        """`[n]` of every worker as `[workers, n]`; `purpose` must be the same on all."""
        ...

    def broadcast(self, value: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """The chief's `[n]`."""
        ...


class VariableSynchroniser:
    """Holds the variables made since all workers last agreed on theirs.

    Args:
        topology: the workers.
        workers: how to reach them.
        must_be_equal: raise an error instead of sending what differs.
    """

    def __init__(self, topology: ClusterTopology, workers: Workers, *, must_be_equal: bool) -> None:
        self._topology = topology
        self._workers = workers
        self._must_be_equal = must_be_equal
        self._pending: list[Any] = []
        self._then: list[Callable[[], None]] = []

    def add(self, variable: Any) -> None:
        """From now on `variable` has to be made equal on all workers."""
        if variable.dtype != tf.string:  # which TensorFlow cannot send
            self._pending.append(variable)

    def once_equal(self, act: Callable[[], None]) -> None:
        """Has `act` called when all that was added is equal: what it changes may differ."""
        self._then.append(act)

    def synchronise(self) -> None:
        """Returns when all that was added is equal on all workers, bit by bit.

        Raises:
            MismatchError: workers have made different variables; or, where they must be equal,
                different values.
        """
        self._make_equal()
        acts, self._then = self._then, []
        with tf.init_scope():
            for act in acts:
                act()

    def _make_equal(self) -> None:
        if not self._pending:
            return
        with tf.init_scope():  # a function may be being traced
            variables, self._pending = self._pending, []
            checksums, names = [], []
            for variable in variables:  # one value at a time is in memory, where it is a copy
                value = _local_value(variable)
                checksums.append(checksum(value))
                names.append(_describe(variable, value.shape))
            kinds = "\n".join(map(_kind, names))
            totals = self._workers.gather(
                np.array([len(names), _hash(kinds.encode()), _hash(np.array(checksums))], np.int64),
                purpose="check of variables",
                detail=f"{len(names)} from {_kind(names[0])} on",
            )
            if np.all(totals == totals[0]):
                return
            self._check_names(names, totals)
            by_rank = self._workers.gather(  # [rank, variable]
                np.array(checksums, np.int64), purpose="check of each variable"
            )
            differing = np.flatnonzero(np.any(by_rank != by_rank[0], axis=0)).tolist()
            if self._must_be_equal:
                raise MismatchError(self._difference(names, by_rank, differing))
            self._take_from_chief([variables[place] for place in differing])

    def _check_names(self, names: list[str], totals: npt.NDArray[np.int64]) -> None:
        if np.all(totals[:, :2] == totals[0, :2]):
            return
        texts = gather_texts("\n".join(names), self._workers, purpose="names of variables")
        chief, *rest = [text.split("\n") for text in texts]
        rank, others = next(
            (rank, others)
            for rank, others in enumerate(rest, start=1)
            if list(map(_kind, others)) != list(map(_kind, chief))
        )
        shared = min(len(chief), len(others))
        place = next((i for i in range(shared) if _kind(chief[i]) != _kind(others[i])), shared)
        sides = [
            f"  worker {who} at {self._topology.addresses[who]} made {len(made)} variables, "
            f"number {place} of them: {made[place] if place < len(made) else 'none'}"
            for who, made in ((0, chief), (rank, others))
        ]
        raise MismatchError(
            "Workers must make the same variables in the same order, but\n"
            + "\n".join(sides)
            + "\nBuild the same model and optimizer on every worker."
        )

    def _difference(
        self, names: list[str], by_rank: npt.NDArray[np.int64], differing: list[int]
    ) -> str:
        first = differing[0]
        rank = int(np.flatnonzero(by_rank[:, first] != by_rank[0, first])[0])
        return (
            f"parallel_initialization=True needs equal values on all workers, but {len(differing)} "
            f"of {len(names)} variables differ. The first is {names[first]}, number {first}, which "
            f"worker {rank} at {self._topology.addresses[rank]} has otherwise than worker 0 at "
            f"{self._topology.addresses[0]}. Call keras.utils.set_random_seed(seed) with one seed "
            "on all workers before the model is built, and load the same files; or use "
            "parallel_initialization=False, which takes the chief's values."
        )

    def _take_from_chief(self, variables: Sequence[Any]) -> None:
        words = [to_words(_local_value(variable)) for variable in variables]
        packs = assign_buckets(
            [each.nbytes for each in words], [None] * len(words), bucket_bytes=_PACK_BYTES
        )
        for pack in packs:
            received = self._workers.broadcast(np.concatenate([words[place] for place in pack]))
            ends = np.cumsum([words[place].size for place in pack])
            for place, part in zip(pack, np.split(received, ends[:-1]), strict=True):
                old = _local_value(variables[place])
                new = part.view(np.uint8)[: old.nbytes].view(old.dtype).reshape(old.shape)
                for component in _components(variables[place]):
                    component.assign(new)


class SynchronisingScope:
    """A strategy's scope that ends with equal variables on all workers."""

    def __init__(self, scope: Any, variables: VariableSynchroniser) -> None:
        self._scope = scope
        self._variables = variables

    def __enter__(self) -> Any:
        return self._scope.__enter__()

    def __exit__(self, error_type: Any, error: Any, traceback: Any) -> None:
        self._scope.__exit__(error_type, error, traceback)
        if error_type is None:
            self._variables.synchronise()


def _components(variable: Any) -> tuple[Any, ...]:
    """The variable of each of this worker's replicas."""
    return getattr(variable, "values", (variable,))


def _local_value(variable: Any) -> npt.NDArray[Any]:
    """The first replica's value, only to be read: it is not copied where that can be."""
    value = _components(variable)[0].read_value()
    try:
        return np.asarray(memoryview(value))
    except (BufferError, TypeError, ValueError):  # as of bfloat16
        return np.asarray(value.numpy())


def _describe(variable: Any, shape: tuple[int, ...]) -> str:
    name = variable.name.partition(":")[0].replace(" ", "_")
    return f"{name} {variable.dtype.name}{tf.TensorShape(shape)}"


def _kind(description: str) -> str:
    """Dtype and shape. Names are for people: Keras counts them up in each process."""
    return description.partition(" ")[2]


def checksum(value: npt.NDArray[Any]) -> int:
    """64 bits of a hash of the bytes."""
    # Most of an optimizer's variables are zeros, and seen to be so in a fraction of the time.
    words = to_words(value)
    return _hash(words) if np.any(words) else 0


def _hash(data: Any) -> int:
    digest = hashlib.sha256(data).digest()
    return int.from_bytes(digest[:_CHECKSUM_BYTES], "little", signed=True)


def _to_bytes(value: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


def to_words(value: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    """The bytes of a value of any dtype, as a dtype that TensorFlow broadcasts."""
    data = _to_bytes(value)
    missing = -data.size % 4
    return (np.pad(data, (0, missing)) if missing else data).view(np.int32)
