"""What this worker has reached: which collectives it knows, and at which of them it stands.

TensorFlow names a collective by a number, the instance key, that all workers must have chosen
alike. By default it takes a fresh one at every call, which costs a remote call each time, and
breaks loops (`steps_per_execution`), as a number chosen per call cannot enter a loop. Here a
collective in a graph has one key for good: a hash of its description and of all those before it
in the same graph. Workers that trace the same program have the same keys, whenever and however
often each of them traces; workers that trace different programs never pair two collectives that
do not belong together, they only wait, and `_progress.py` tells them why.
"""

from __future__ import annotations

import hashlib
import json
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

# TensorFlow's own counters start at 100; hashed keys lie far above them.
_FIRST_HASHED_KEY = 2**30
_RECORDS_SHOWN = 12


@dataclass(frozen=True)
class Position:
    """Where a worker stands: how many arrivals at collectives, and what it arrived at last."""

    arrivals: int
    digest: str
    description: str

    def to_json(self) -> str:
        return json.dumps([self.arrivals, self.digest, self.description])

    @classmethod
    def from_json(cls, text: str) -> Position:
        arrivals, digest, description = json.loads(text)
        return cls(int(arrivals), str(digest), str(description))


class CollectivePlan:
    """The collectives of one graph on one device, in the order in which they are traced."""

    def __init__(self) -> None:
        self.records: list[str] = []

    def digest(self) -> str:
        return hashlib.sha256("\n".join(self.records).encode()).hexdigest()[:16]

    def describe(self) -> str:
        shown = self.records[:_RECORDS_SHOWN]
        more = len(self.records) - len(shown)
        return ", ".join(shown) + (f", and {more} more" if more else "")


class CollectiveJournal:
    """Instance keys, plans and arrivals of one strategy."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._plans: list[CollectivePlan] = []
        self._key_owner: dict[int, str] = {}
        # [arrivals, number of the plan]. A variable, as graphs write it while they run; made
        # outside of any strategy scope and pinned to the host.
        with tf.init_scope(), tf.device("CPU:0"):
            self._state = tf.Variable(np.array([0, -1]), dtype=tf.int64, trainable=False)

    def new_plan(self) -> CollectivePlan:
        plan = CollectivePlan()
        with self._lock:
            self._plans.append(plan)
        return plan

    def key_of(self, plan: CollectivePlan) -> int:
        """The instance key of the last collective of `plan`, from it and all before it."""
        text = "\n".join(plan.records)
        key = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
        with self._lock:
            while True:
                key = _FIRST_HASHED_KEY + key % _FIRST_HASHED_KEY
                if self._key_owner.setdefault(key, text) == text:
                    return key
                key += 1  # two texts with one hash: both take the next free key on all workers

    def arrive_in_graph(self, plan: CollectivePlan) -> tf.Operation:
        """An op that, when it runs, notes that this worker comes to the plan's first collective."""
        number = self._plans.index(plan)
        with tf.device("CPU:0"):
            arrivals = self._state[0] + 1
            return self._state.assign(tf.stack([arrivals, number])).op

    def arrive(self, description: str) -> None:
        """Notes an arrival at a collective that runs eagerly."""
        plan = self.new_plan_once(description)
        with self._lock, tf.init_scope(), tf.device("CPU:0"):
            arrivals = int(self._state.numpy()[0]) + 1
            self._state.assign(np.array([arrivals, plan], np.int64))

    def new_plan_once(self, description: str) -> int:
        """The number of the plan that consists of this one collective."""
        with self._lock:
            for number, plan in enumerate(self._plans):
                if plan.records == [description]:
                    return number
            plan = CollectivePlan()
            plan.records.append(description)
            self._plans.append(plan)
            return len(self._plans) - 1

    def position(self) -> Position:
        """Where this worker stands now; callable from any thread."""
        arrivals, number = (int(value) for value in self._state.numpy())
        if number < 0:
            return Position(0, "", "nothing yet")
        plan = self._plans[number]
        return Position(arrivals, plan.digest(), plan.describe())


class PlansByGraph:
    """The plan of each graph that a launcher has traced collectives into."""

    def __init__(self, journal: CollectiveJournal) -> None:
        self._journal = journal
        self._plans: weakref.WeakKeyDictionary[Any, CollectivePlan] = weakref.WeakKeyDictionary()

    def add(self, record: str) -> tuple[CollectivePlan, bool]:
        """Adds a collective to the plan of the current graph; returns it, and whether it is new."""
        graph = tf.compat.v1.get_default_graph()
        plan = self._plans.get(graph)
        is_new = plan is None
        if plan is None:
            plan = self._plans[graph] = self._journal.new_plan()
        plan.records.append(record)
        return plan, is_new
