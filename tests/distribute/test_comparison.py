"""Facts that all workers must have alike: one collective where they do, a table where not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_largebatch.core.errors import MismatchError
from tf_largebatch.distribute._comparison import (
    differences,
    fingerprint,
    gather_texts,
    require_equal_facts,
)

FACTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


class Network:
    """Gathers among the threads of a test."""

    def __init__(self, size: int) -> None:
        self.purposes: list[list[str]] = [[] for _ in range(size)]
        self._values: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=30.0)

    def worker(self, rank: int) -> Worker:
        return Worker(self, rank)

    def gather(self, rank: int, value: npt.NDArray[np.int64], purpose: str) -> Any:
        self.purposes[rank].append(purpose)
        self._values[rank] = value
        self._barrier.wait()
        gathered = np.stack(self._values)
        self._barrier.wait()
        return gathered


class Worker:
    def __init__(self, network: Network, rank: int) -> None:
        self._network, self._rank = network, rank

    def gather(self, value: npt.NDArray[np.int64], *, purpose: str) -> npt.NDArray[np.int64]:
        return self._network.gather(self._rank, value, purpose)  # type: ignore[no-any-return]


def on_all(network: Network, size: int, body: Callable[[int, Worker], Any]) -> list[Any]:
    """What each worker's body returned or raised."""
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = body(rank, network.worker(rank))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30.0)
    return results


def compared(facts: list[Any]) -> tuple[list[Any], list[str]]:
    """What each worker raised, and the purposes of its collectives."""
    network = Network(len(facts))

    def body(rank: int, worker: Worker) -> None:
        require_equal_facts(facts[rank], worker, purpose="test", head="Workers must agree")

    results = on_all(network, len(facts), body)
    assert all(each == network.purposes[0] for each in network.purposes)
    return results, network.purposes[0]


@settings(deadline=None, max_examples=50)
@given(FACTS, FACTS)
def test_fingerprints_are_equal_as_facts_are(first: Any, second: Any) -> None:
    as_text = [repr(_sorted(facts)) for facts in (first, second)]
    assert (fingerprint(first) == fingerprint(second)) == (as_text[0] == as_text[1])


def _sorted(facts: Any) -> Any:
    if isinstance(facts, dict):
        return [(name, _sorted(facts[name])) for name in sorted(facts)]
    return tuple(map(_sorted, facts)) if isinstance(facts, list) else facts


def test_equal_facts_cost_one_collective() -> None:
    results, purposes = compared([{"a": 1, "b": {"c": [1, 2]}}, {"b": {"c": [1, 2]}, "a": 1}])
    assert results == [None, None]
    assert purposes == ["test"]


def test_all_workers_see_who_has_what() -> None:
    facts = [
        {"optimizer": {"learning_rate": {"decay_steps": [30, 60]}, "momentum": 0.9}, "loss": "mse"}
        for _ in range(3)
    ]
    facts[1]["optimizer"]["learning_rate"] = {"decay_steps": [40, 60]}  # type: ignore[index]
    errors, _ = compared(facts)
    assert {type(error) for error in errors} == {MismatchError}
    assert {str(error) for error in errors} == {
        "Workers must agree, but differ in\n"
        "  optimizer.learning_rate.decay_steps: [30, 60] on workers 0, 2; [40, 60] on worker 1"
    }


def test_other_kinds_of_facts_are_shown_leaf_by_leaf() -> None:
    rows = [(0, {"a": {"class": "X", "rate": 0.5}, "b": [{"c": 1}, {"c": 2}]}), (1, {"a": 0.5})]
    assert differences(rows, head="H").splitlines() == [
        "H, but differ in",
        '  a.class: "X" on worker 0; null on worker 1',
        "  a.rate: 0.5 on worker 0; null on worker 1",
        "  b.0.c: 1 on worker 0; null on worker 1",
        "  b.1.c: 2 on worker 0; null on worker 1",
        "  a: null on worker 0; 0.5 on worker 1",
    ]


def test_no_facts_against_some() -> None:
    assert differences([(0, None), (1, {"seed": 3})], head="H").splitlines()[1:] == [
        "  seed: null on worker 0; 3 on worker 1",
    ]
    assert differences([(0, None), (1, None)], head="H") == ""


def test_many_workers_and_long_values_stay_readable() -> None:
    rows = [(rank, {"a": "x" * 1000 if rank in (7, 8, 9, 12, 13) else 1}) for rank in range(16)]
    lines = differences(rows, head="H").splitlines()[1:]
    assert lines[:2] == ["  a:", "      1 on workers 0 to 6, 10, 11, 14, 15"]
    assert lines[2].endswith(" ... on workers 7 to 9, 12, 13") and len(lines[2]) < 400
    wide = [(rank, {str(number): rank for number in range(100)}) for rank in range(2)]
    assert differences(wide, head="H").splitlines()[-1] == "  and 80 more"


@pytest.mark.parametrize("texts", [["", ""], ["a", "bcd"], ["", "ä€𝄞\n x"], ["same", "same"]])
def test_texts_of_any_length_are_gathered(texts: list[str]) -> None:
    def body(rank: int, worker: Worker) -> list[str]:
        return gather_texts(texts[rank], worker, purpose="texts")

    assert on_all(Network(2), 2, body) == [texts, texts]
