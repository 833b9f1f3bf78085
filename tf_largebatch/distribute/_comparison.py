"""Compares facts among the workers: a hash where all is well, a table of who has what where not.

Facts are numbers and texts by name, nested as deep as may be. What is shown is each leaf that
differs, by the names on the way to it: `optimizer.learning_rate.decay_steps`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tf_largebatch.core.errors import MismatchError

_HASH_BYTES = 8
_MOST_LINES = 20
_LONGEST_VALUE = 300
_LONGEST_LINE = 100
_ABSENT = "null"


class Workers(Protocol):
    """What a comparison asks of the cluster; every worker must ask it alike."""

    def gather(self, value: npt.NDArray[np.int64], *, purpose: str) -> npt.NDArray[np.int64]:
        """`[n]` of every worker as `[workers, n]`; `purpose` must be the same on all."""
        ...


def fingerprint(facts: Any) -> int:
    """64 bits of a hash; equal facts have equal ones."""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()
    return int.from_bytes(digest[:_HASH_BYTES], "little", signed=True)


def require_equal_facts(
    facts: Mapping[str, Any], workers: Workers, *, purpose: str, head: str
) -> None:
    """Returns if all workers have equal facts; one collective.

    Args:
        facts: this worker's, for JSON.
        workers: how to reach the others.
        purpose: names the collective.
        head: what must be equal, as the beginning of a sentence that ends in ", but differ in".

    Raises:
        MismatchError: they differ; on all workers, with a table of who has what.
    """
    hashes = workers.gather(np.array([fingerprint(facts)], np.int64), purpose=purpose)
    if np.any(hashes != hashes[0]):
        raise_mismatch(facts, workers, purpose=purpose, head=head)


def raise_mismatch(facts: Any, workers: Workers, *, purpose: str, head: str) -> None:
    """What follows where the workers' fingerprints were found to differ; as above."""
    texts = gather_texts(json.dumps(facts), workers, purpose=f"{purpose}, in words")
    rows = [(rank, json.loads(text)) for rank, text in enumerate(texts)]
    raise MismatchError(differences(rows, head=head) or f"{head}, but differ in their hashes.")


def gather_texts(text: str, workers: Workers, *, purpose: str) -> list[str]:
    """The text of every worker, in rank order."""
    data = np.frombuffer(text.encode(), np.uint8).astype(np.int64)
    lengths = workers.gather(np.array([data.size], np.int64), purpose=purpose)[:, 0]
    rows = workers.gather(np.pad(data, (0, int(lengths.max()) - data.size)), purpose=purpose)
    return [
        row[:length].astype(np.uint8).tobytes().decode()
        for row, length in zip(rows, lengths, strict=True)
    ]


def differences(rows: Sequence[tuple[int, Any]], *, head: str) -> str:
    """A text that shows, for each fact on which ranks differ, who has what; or empty.

    Args:
        rows: of each rank its facts.
        head: as in `require_equal_facts`.
    """
    leaves = [(rank, dict(_leaves(facts))) for rank, facts in rows]
    lines = []
    for name in dict.fromkeys(name for _, facts in leaves for name in facts):
        holders: dict[str, list[int]] = {}
        for rank, facts in leaves:
            holders.setdefault(facts.get(name, _ABSENT), []).append(rank)
        if len(holders) > 1:
            lines.append(_line(name, holders))
    if not lines:
        return ""
    more = len(lines) - _MOST_LINES
    lines[_MOST_LINES:] = [f"  and {more} more"] if more > 0 else []
    return "\n".join([f"{head}, but differ in", *lines])


def _line(name: str, holders: Mapping[str, Sequence[int]]) -> str:
    sides = [f"{value} on {_names(ranks)}" for value, ranks in holders.items()]
    line = f"  {name}: {'; '.join(sides)}"
    return line if len(line) <= _LONGEST_LINE else "\n".join([f"  {name}:", *_indented(sides)])


def _indented(sides: Sequence[str]) -> list[str]:
    return [f"      {side}" for side in sides]


def _names(ranks: Sequence[int]) -> str:
    """`worker 3`, or `workers 0, 2 to 5`."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][-1] == rank - 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    shown = [
        f"{part[0]} to {part[-1]}" if len(part) > 2 else ", ".join(map(str, part)) for part in parts
    ]
    return f"worker{'s'[: len(ranks) > 1]} {', '.join(shown)}"


def _leaves(facts: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Each fact that holds no others, as text, with the names on the way to it."""
    if isinstance(facts, Mapping) and facts:
        for name, value in facts.items():
            yield from _leaves(value, (*path, str(name)))
    elif isinstance(facts, list) and any(isinstance(each, Mapping) for each in facts):
        yield from _leaves(dict(enumerate(facts)), path)
    else:
        text = json.dumps(facts)
        yield (
            ".".join(path) if path else "value",
            text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]} ...",
        )
