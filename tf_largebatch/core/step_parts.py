"""Where the time of a training step goes: waiting for input, computing, waiting for others."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.core.intervals import Intervals, difference, intersection, length, union

PARTS = ("compute", "input_wait", "exposed_communication", "other")
_NANOSECONDS = 1e9
_WORDS = {
    "compute": "compute",
    "input_wait": "waiting for input",
    "exposed_communication": "exposed communication",
    "other": "the rest: Python, callbacks, dispatch",
}


@dataclass(frozen=True)
class StepParts:
    """The seconds of a step, each counted once: the four parts add up to `seconds`.

    Args:
        step: its number in this `fit`, from 0.
        seconds: from its begin to that of the next one.
        compute: in which an operation of the model or the optimizer ran, whatever else did.
        input_wait: of the rest, in which the step waited for its batch.
        exposed_communication: of the rest, in which collectives were under way: what communication
            adds to the step, as opposed to what it hides behind compute.
        other: what is left.
    """

    step: int
    seconds: float
    compute: float
    input_wait: float
    exposed_communication: float
    other: float


@dataclass(frozen=True)
class StepReport:
    """Where the time of some training steps went.

    `seconds` and the parts of the same names as those of `StepParts` are medians over the steps.

    Args:
        steps: one after the other.

    Raises:
        ConfigurationError: there is no step.
    """

    steps: tuple[StepParts, ...]

    def __post_init__(self) -> None:
        if not self.steps:
            raise ConfigurationError("steps=() is empty; a StepReport is of one step or more.")

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self._median("seconds")

    @property
    def compute(self) -> float:
        """Seconds of a step, as all of the following."""
        return self._median("compute")

    @property
    def input_wait(self) -> float:
        """See `StepParts`."""
        return self._median("input_wait")

    @property
    def exposed_communication(self) -> float:
        """See `StepParts`."""
        return self._median("exposed_communication")

    @property
    def other(self) -> float:
        """See `StepParts`."""
        return self._median("other")

    def share(self, part: str) -> float:
        """The part's time in all steps together, by the time of all steps: from 0 to 1.

        Shares add up to 1, which medians do not quite.

        Raises:
            ConfigurationError: there is no such part.
        """
        if part not in PARTS:
            raise ConfigurationError(f"part={part!r} must be one of {', '.join(PARTS)}.")
        whole = sum(each.seconds for each in self.steps)
        return float(sum(getattr(each, part) for each in self.steps) / whole) if whole else 0.0

    def describe(self) -> str:
        """A table for people: of each part the median in ms, and its share of all steps' time."""
        count = len(self.steps)
        width = max(map(len, _WORDS.values()))
        lines = [
            f"A step took {1e3 * self.seconds:.2f} ms (medians of {count} from step "
            f"{self.steps[0].step} on, shares of their sum):"
        ]
        lines += [
            f"  {_WORDS[part]:<{width}} {1e3 * self._median(part):>10.2f} ms "
            f"{self.share(part):>6.1%}"
            for part in PARTS
        ]
        return "\n".join(lines)

    def _median(self, name: str) -> float:
        return float(statistics.median(getattr(each, name) for each in self.steps))


@dataclass(frozen=True)
class StepWindow:
    """When a call of the training function took place.

    Args:
        step: the number of its first step.
        num_steps: how many steps it made.
        begin: in nanoseconds.
        end: the begin of what comes next.
    """

    step: int
    num_steps: int
    begin: int
    end: int


@dataclass(frozen=True)
class Activity:
    """What went on, in nanoseconds.

    Args:
        compute: when operations of the training step ran.
        input_wait: when it waited for its next batch.
        collectives: from the start of each collective to its end.
        data_starts: when collectives that have something to send started. A receive can be posted
            long before; until then it only waits.
    """

    compute: Intervals
    input_wait: Intervals
    collectives: Intervals
    data_starts: Sequence[int] = ()


@dataclass(frozen=True)
class Division:
    """When each part of a window was, `other` left out: what nobody else claims."""

    compute: Intervals
    input_wait: Intervals
    exposed_communication: Intervals


def divide(window: StepWindow, activity: Activity) -> Division:
    """An instant belongs to the first of compute, input and communication that is going on.

    Communication begins with the first collective of the window that has something to send.
    """
    whole = union([(window.begin, window.end)])
    compute = intersection(whole, activity.compute)
    left = difference(whole, compute)
    waits = intersection(left, activity.input_wait)
    left = difference(left, waits)
    first = min((at for at in activity.data_starts if window.begin <= at), default=window.end)
    communicates = intersection(union([(first, window.end)]), activity.collectives)
    return Division(compute, waits, intersection(left, communicates))


def parts_of(window: StepWindow, division: Division) -> StepParts:
    """The seconds of the parts: of one step, where the window holds several."""
    parts = {
        field.name: length(getattr(division, field.name)) for field in dataclasses.fields(division)
    }
    whole = window.end - window.begin
    parts |= {"seconds": whole, "other": whole - sum(parts.values())}
    scale = 1.0 / (_NANOSECONDS * window.num_steps)
    return StepParts(window.step, **{name: scale * value for name, value in parts.items()})
