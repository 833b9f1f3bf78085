"""All workers come to the same saved state, whoever's disk it is on."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tf_largebatch.callbacks._run_variables import Replicas
from tf_largebatch.core.errors import DataError
from tf_largebatch.core.state_directory import LoadedState, StateDirectory
from tf_largebatch.core.state_text import from_text, to_text
from tf_largebatch.distribute._variable_sync import to_words

_NONE, _UNREADABLE = -1, -2
_DIGEST_WORDS = 4  # of 64 bits


@dataclass(frozen=True)
class AgreedState:
    """A state that all workers have.

    Attributes:
        where: for people.
        contents, arrays: see `StateDirectory.save`.
    """

    where: str
    contents: dict[str, Any]
    arrays: list[npt.NDArray[Any]]


def agree_on_state(directory: StateDirectory, replicas: Replicas) -> AgreedState | None:
    """The newest state that any worker can read, on all workers; None if nobody has one.

    Where it is in everybody's directory, as on a shared file system, each reads it there. Else the
    worker that has it sends it to the others, so that a directory on the chief's own disk is
    enough.

    Raises:
        DataError: some worker has states, and nobody has one that can be read; on all workers.
    """
    own, problem = _load(directory)
    by_rank = replicas.gather(_facts(own, problem), purpose="choice of a saved state")
    updates = by_rank[:, 0]
    newest = int(updates.max())
    if newest < 0:
        if np.any(updates == _UNREADABLE):
            ranks = np.flatnonzero(updates == _UNREADABLE).tolist()
            raise DataError(
                problem or f"The states of the workers {ranks} cannot be read; see their messages."
            )
        return None
    if problem is not None:
        warnings.warn(f"{problem}\nThe state of another worker is used.", stacklevel=2)
    root = int(np.argmax(updates == newest))
    if np.all(by_rank == by_rank[root]):
        assert own is not None
        return AgreedState(str(own.path), own.contents, own.arrays)
    if own is not None and own.update == newest and np.any(by_rank[replicas.rank] != by_rank[root]):
        warnings.warn(
            f"{str(own.path)!r} is not the state that worker {root} has of the same update; that "
            f"of worker {root} is used.",
            stacklevel=2,
        )
    where = f"{str(own.path)!r}" if replicas.rank == root and own else "the directory"
    return _sent_by(root, own, f"{where} of worker {root}", replicas)


def _load(directory: StateDirectory) -> tuple[LoadedState | None, str | None]:
    try:
        return directory.load_newest(), None
    except DataError as error:
        return None, str(error)


def _facts(own: LoadedState | None, problem: str | None) -> npt.NDArray[np.int64]:
    """(update, digest) for comparison."""
    if own is None:
        return np.array([_NONE if problem is None else _UNREADABLE] + [0] * _DIGEST_WORDS)
    digest = np.frombuffer(bytes.fromhex(own.digest), np.int64, _DIGEST_WORDS)
    return np.concatenate([np.array([own.update], np.int64), digest])


def _sent_by(root: int, own: LoadedState | None, where: str, replicas: Replicas) -> AgreedState:
    """The root's state, sent piece by piece."""
    is_root = replicas.rank == root
    text = ""
    if is_root:
        assert own is not None
        kinds = [[array.dtype.name, list(array.shape)] for array in own.arrays]
        text = json.dumps([to_text(own.contents), kinds])
    header = np.frombuffer(text.encode(), np.uint8)
    # The length travels by a gather, as a broadcast is of a known length.
    sizes = replicas.gather(np.array([header.size]), purpose="length of a saved state")
    received = _broadcast(header, int(sizes[root, 0]), root, replicas)
    contents, kinds = json.loads(received.tobytes().decode())
    arrays = []
    for place, (name, shape) in enumerate(kinds):
        array = own.arrays[place] if is_root and own else np.empty(shape, np.dtype(name))
        data = array.reshape(-1).view(np.uint8)
        arrays.append(_broadcast(data, data.size, root, replicas).view(array.dtype).reshape(shape))
    return AgreedState(where, from_text(contents), arrays)


def _broadcast(
    data: npt.NDArray[np.uint8], size: int, root: int, replicas: Replicas
) -> npt.NDArray[np.uint8]:
    """The root's bytes, of which all know the number."""
    words = to_words(data if replicas.rank == root else np.empty(size, np.uint8))
    if words.size:
        words = replicas.broadcast(words, root=root)
    return np.array(words).view(np.uint8)[:size]
