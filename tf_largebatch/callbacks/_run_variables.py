"""All variables of a training run, taken from every replica and given back to it.

Most are equal on all replicas. Some are each replica's own, such as batch norm's moving statistics,
the metrics of an epoch so far, or the seeds of dropout; which ones, is seen from their values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.distribute._variable_sync import checksum, to_words
from tf_largebatch.normalization._moving_statistics import components

Array = npt.NDArray[Any]
_FOLDED_WORDS = 4096


@dataclass(frozen=True)
class Captured:
    """The value of one variable.

    Attributes:
        value: the one of all replicas, or one of each, stacked in their order.
        is_per_replica: which of the two.
    """

    value: Array
    is_per_replica: bool


class Replicas:
    """The replicas of a model: which of them are here, and how to reach the others.

    Raises:
        ConfigurationError: there are replicas on other workers under another strategy than
            `LargeBatchStrategy`.
    """

    def __init__(self, model: keras.Model) -> None:
        strategy = model.distribute_strategy
        topology = getattr(strategy, "topology", None)
        self.total = strategy.num_replicas_in_sync
        self.rank = topology.rank if topology else 0
        self.num_workers = topology.num_workers if topology else 1
        self.local = self.total // self.num_workers
        self._extended = strategy.extended
        if self.local > 1 and self.local > len(strategy.extended.worker_devices):
            raise ConfigurationError(
                f"{type(strategy).__name__} has replicas on other workers, whose state can be had "
                "under LargeBatchStrategy only. Train under that."
            )

    @property
    def is_chief(self) -> bool:
        return self.rank == 0

    def gather(self, value: npt.NDArray[np.int64], *, purpose: str) -> npt.NDArray[np.int64]:
        """`[n]` of every worker, of one length, as `[workers, n]`."""
        if self.num_workers == 1:
            return value[None]
        return self._extended.gather(value, purpose=purpose)

    def broadcast(self, value: npt.NDArray[np.int32], *, root: int) -> npt.NDArray[np.int32]:
        """The `[n]` of the worker of rank `root`; n must be known to all."""
        if self.num_workers == 1:
            return value
        return self._extended.broadcast(value, root=root)


def describe(variable: Any) -> list[Any]:
    """Name, dtype and shape, for JSON."""
    shape = [int(size) for size in components(variable)[0].shape]
    name = getattr(variable, "path", variable.name).partition(":")[0]
    return [name, components(variable)[0].dtype.name, shape]


def capture(variables: Sequence[Any], replicas: Replicas) -> list[Captured] | None:
    """The values of all variables, on the chief; None on the other workers, which help.

    Copies, so that training may go on. Costs two collectives if there are several workers: one of
    checksums, one of the values that differ.
    """
    local = [[_read(component) for component in components(variable)] for variable in variables]
    differing = _differing(local, replicas)
    gathered = _gather_values([local[place] for place in differing], replicas)
    if not replicas.is_chief:
        return None
    of_place = dict(zip(differing, gathered, strict=True))
    return [
        Captured(of_place[place], True) if place in of_place else Captured(values[0], False)
        for place, values in enumerate(local)
    ]


def restore(variables: Sequence[Any], saved: Sequence[Captured], replicas: Replicas) -> None:
    """Gives every replica of this worker its values.

    Where there are other replicas than when they were saved, the saved ones are dealt out in turn.
    """
    for variable, captured in zip(variables, saved, strict=True):
        for place, component in enumerate(components(variable)):
            value = captured.value
            if captured.is_per_replica:
                value = value[(replicas.rank * replicas.local + place) % len(value)]
            component.assign(tf.constant(value, component.dtype))


def _read(component: Any) -> Array:
    """A copy of the value."""
    value = np.asarray(component.read_value().numpy())
    # TensorFlow copies by now, but does not promise to.
    return value if value.flags.owndata else value.copy()


def _differing(local: Sequence[Sequence[Array]], replicas: Replicas) -> list[int]:
    """The places of variables, `[variable, local replica]`, that not all replicas have alike."""
    if replicas.total == 1:
        return []
    sums = np.array([[_folded_checksum(value) for value in values] for values in local], np.int64)
    by_rank = replicas.gather(sums.reshape(-1), purpose="check of what a state must hold")
    # [variable, replica]
    by_replica = np.concatenate(by_rank.reshape(-1, len(local), replicas.local), axis=1)
    return np.flatnonzero(np.any(by_replica != by_replica[:, :1], axis=1)).tolist()


def _folded_checksum(value: Array) -> int:
    """64 bits, for which a large value is not hashed whole: training waits for it.

    Its rows of words are added up first, from which any change of one bit is still seen.
    """
    words = to_words(value)
    whole = words.size // _FOLDED_WORDS * _FOLDED_WORDS
    if whole <= _FOLDED_WORDS:
        return checksum(words)
    rows = words[:whole].view(np.uint64).reshape(-1, _FOLDED_WORDS // 2)
    folded = np.add.reduce(rows, axis=0)  # modulo 2**64
    return checksum(np.concatenate([folded.view(np.int32), words[whole:]]))


def _gather_values(values: Sequence[Sequence[Array]], replicas: Replicas) -> list[Array]:
    """`[replica, ...]` of each of the variables, of whose local replicas `values` are."""
    if not values:
        return []
    own = [to_words(np.stack(of_replicas)) for of_replicas in values]
    ends = np.cumsum([words.size for words in own])
    packed = np.concatenate(own)
    padded = np.pad(packed, (0, packed.size % 2)).view(np.int64)
    by_rank = replicas.gather(padded, purpose="what a state must hold of each replica")
    words_by_rank = by_rank.view(np.int32)[:, : packed.size]  # [worker, word]
    parts = np.split(words_by_rank, ends[:-1], axis=1)
    return [
        np.concatenate([_from_words(row, np.stack(of_replicas)) for row in part])
        for part, of_replicas in zip(parts, values, strict=True)
    ]


def _from_words(words: npt.NDArray[np.int32], like: Array) -> Array:
    data = np.ascontiguousarray(words).view(np.uint8)[: like.nbytes]
    return data.view(like.dtype).reshape(like.shape)


def differences(saved: Mapping[str, Sequence[Any]], here: Mapping[str, Sequence[Any]]) -> list[str]:
    """One line for each group whose variables, as `describe` has them, are not the same kind.

    Names are for people: Keras counts them up in each process.
    """
    lines = []
    for group in sorted({*saved, *here}):
        old, new = list(saved.get(group, ())), list(here.get(group, ()))
        if [each[1:] for each in old] == [each[1:] for each in new]:
            continue
        shared = min(len(old), len(new))
        place = next((i for i in range(shared) if old[i][1:] != new[i][1:]), shared)
        sides = ", ".join(
            f"{where} {_shown(made[place]) if place < len(made) else 'none'}"
            for where, made in (("in the state", old), ("here", new))
        )
        lines.append(
            f"{group}: {len(old)} variables in the state, {len(new)} here; number {place}: {sides}"
        )
    return lines


def _shown(description: Sequence[Any]) -> str:
    name, dtype, shape = description
    return f"{name} {dtype}{shape}"
