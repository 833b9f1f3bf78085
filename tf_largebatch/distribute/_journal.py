"""What this worker has reached: which collectives it knows, and at which of them it stands.

TensorFlow names a collective by a number, the instance key, that all workers must have chosen
alike. By default it counts them, call by call. That costs a remote call each time, and breaks loops
(`steps_per_execution`), as a number chosen per call cannot enter a loop; and a worker that calls
one collective more than the others then pairs each later one with another of theirs. Here a
collective has one key for good: in a graph a hash of its description and of all those before it in
the same graph; of an eager one, of its description. Workers that trace the same program have the
same keys, whenever and however often each of them traces; workers that run different programs never
pair two collectives that do not belong together, they only wait, and `_progress.py` tells them why.
How often an eager one was called needs no place in its key: none ends before all workers are there,
so that their n-th calls of it meet.
"""

from __future__ import annotations

import hashlib
import json
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

# TensorFlow's own counters start at 100; hashed keys lie far above them.
_FIRST_HASHED_KEY = 2**30
_RECORDS_SHOWN = 12
# Two words, so that it is no function's name.
_EAGER = ("an eager collective",)


@dataclass(frozen=True)
class Position:
    """Where a worker stands: how many arrivals at collectives, and what it arrived at last.

    Args:
        arrivals: how many.
        digest: of what it arrived at last.
        description: the same for people.
        ended: how the worker's process ended; empty while it runs.
    """

    arrivals: int
    digest: str
    description: str
    ended: str = ""

    def to_json(self) -> str:
        return json.dumps([self.arrivals, self.digest, self.description, self.ended])

    @classmethod
    def from_json(cls, text: str) -> Position:
        arrivals, digest, description, ended = json.loads(text)
        return cls(int(arrivals), str(digest), str(description), str(ended))


class CollectivePlan:
    """The collectives of one graph on one device, in the order in which they are traced.

    Args:
        place: where the graph lies within others, equal for no two that can run at a time.
    """

    def __init__(self, place: tuple[str, ...] = ()) -> None:
        self.place = place
        self.records: list[str] = []
        self.branches = 0

    def text(self) -> str:
        return "\n".join([*self.place, *self.records])

    def digest(self) -> str:
        return hashlib.sha256(self.text().encode()).hexdigest()[:16]

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
        self._eager_arrivals = 0
        self._details: dict[int, str] = {}  # of eager plans, by number: of their last call
        # Variables, as graphs write them while they run; made outside of any strategy scope and
        # pinned to the host.
        with tf.init_scope(), tf.device("CPU:0"):
            self._arrivals = tf.Variable(0, dtype=tf.int64, trainable=False)
            self._plan_number = tf.Variable(-1, dtype=tf.int64, trainable=False)
            self._runs = tf.Variable(0, dtype=tf.int64, trainable=False)

    def new_plan(self, place: tuple[str, ...] = ()) -> CollectivePlan:
        plan = CollectivePlan(place)
        with self._lock:
            self._plans.append(plan)
        return plan

    def key_of(self, plan: CollectivePlan, *, count: int = 1) -> int:
        """The instance key of the last collective of `plan`, from it and all before it.

        Args:
            plan: what is traced so far.
            count: how many consecutive keys the collective takes, of which this is the first.
        """
        text = plan.text()
        key = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
        with self._lock:
            while True:
                key = _FIRST_HASHED_KEY + key % (_FIRST_HASHED_KEY - count)
                keys = range(key, key + count)
                if all(self._key_owner.get(each, text) == text for each in keys):
                    self._key_owner.update(dict.fromkeys(keys, text))
                    return key
                key += 1  # the hashes of two texts meet: all workers take the next free keys

    def arrive_in_graph(self, plan: CollectivePlan, value: tf.Tensor) -> tf.Operation:
        """An op that notes that this worker comes to the plan's first collective.

        It runs when `value`, which that collective takes, exists: a worker that hangs in its
        forward pass has not arrived.
        """
        number = self._plans.index(plan)
        with tf.control_dependencies([value]), tf.device("CPU:0"):
            numbered = self._plan_number.assign(number, read_value=False)
            return tf.group(numbered, self._arrivals.assign_add(1, read_value=False))

    def arrive(self, description: str, detail: str = "") -> None:
        """Notes an arrival at a collective that runs eagerly.

        Args:
            description: what is exchanged, the same on all workers.
            detail: more for people, such as a name that may differ between workers.
        """
        number = self.new_plan_once(description)
        with self._lock, tf.init_scope(), tf.device("CPU:0"):
            self._details[number] = detail
            self._plan_number.assign(number)
            self._arrivals.assign_add(1)
            self._eager_arrivals += 1

    def eager_key(self, description: str) -> int:
        """The instance key of the eager collective of that description."""
        return self.key_of(self._plans[self.new_plan_once(description)])

    def note_run(self) -> None:
        """Notes a `strategy.run`: now, or whenever the graph that is being traced runs."""
        with tf.device("CPU:0"):
            self._runs.assign_add(1, read_value=False)

    def progress(self) -> tuple[int, int]:
        """What changes with everything that may change variables on any worker.

        That is whatever goes through `strategy.run`, and any collective in a graph; not those that
        run eagerly, which compare and read. Equal at equal places of the same program.
        """
        return int(self._runs.numpy()), int(self._arrivals.numpy()) - self._eager_arrivals

    def new_plan_once(self, description: str) -> int:
        """The number of the plan that consists of this one collective."""
        with self._lock:
            for number, plan in enumerate(self._plans):
                if plan.place == _EAGER and plan.records == [description]:
                    return number
            plan = CollectivePlan(_EAGER)
            plan.records.append(description)
            self._plans.append(plan)
            return len(self._plans) - 1

    def position(self) -> Position:
        """Where this worker stands now; callable from any thread.

        It is two reads: of a worker that moves on in between, the number may be of another plan
        than the arrivals. Only a worker that stands still is judged.
        """
        arrivals, number = int(self._arrivals.numpy()), int(self._plan_number.numpy())
        if number < 0:
            return Position(0, "", "nothing yet")
        plan, detail = self._plans[number], self._details.get(number, "")
        description = plan.describe() + (f" ({detail})" if detail else "")
        return Position(arrivals, plan.digest(), description)


class PlansByGraph:
    """The plan of each graph that a launcher has traced collectives into.

    A graph within another must have keys of its own, as both may run at a time. Of a branch or a
    loop, which is always traced together with the graph around it, the place is all that was
    traced there before, and its number. A function within a function may have been traced long
    ago, or on another worker not yet; its place is its name and how deep it lies. (TensorFlow runs
    the calls of functions one after the other.)
    """

    def __init__(self, journal: CollectiveJournal) -> None:
        self._journal = journal
        self._plans: weakref.WeakKeyDictionary[Any, CollectivePlan] = weakref.WeakKeyDictionary()

    def add(self, record: str) -> tuple[CollectivePlan, bool]:
        """Adds a collective to the plan of the current graph; returns it, and whether it is new."""
        plan = self._plan_of(tf.compat.v1.get_default_graph())
        plan.records.append(record)
        return plan, len(plan.records) == 1

    def _plan_of(self, graph: Any) -> CollectivePlan:
        if graph not in self._plans:
            self._plans[graph] = self._journal.new_plan(self._place_of(graph))
        return self._plans[graph]

    def _place_of(self, graph: Any) -> tuple[str, ...]:
        outer = getattr(graph, "outer_graph", None)
        is_inner = outer is not None and outer.building_function
        if not getattr(graph, "is_control_flow_graph", False):
            name = str(getattr(graph, "name", ""))
            return (*self._plan_of(outer).place, name) if is_inner else (name,)
        plan = self._plan_of(outer)
        plan.branches += 1
        return (*plan.place, *plan.records, f"branch {plan.branches}")
