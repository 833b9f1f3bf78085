"""What TensorFlow's profiler has written (`*.xplane.pb`), read without TensorBoard.

Names are those of TensorFlow 2.18 to 2.21. On the host, by thread:

    <name>:<type>                       an operation that ran there; of a step where it lies within
    ExecutorState::Process              a thread's share of a graph, whose `id` names its run
    ExecutorState::ProcessAsync::Start  an operation that ends later, of `kernel_type`; `_p` there
    ExecutorState::ProcessAsync::Done   is `_c` here
    InstantiatedCapturedFunction::*     a run of a function of tf.data, of this `id`
    *IteratorGetNext*Op::DoCompute      a step gets its batch
    CpuExecutable::Execute*             a run of what XLA has compiled

On a GPU each line is a stream of kernels, and those of NCCL are collectives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tf_largebatch.core.errors import DataError
from tf_largebatch.core.intervals import Intervals, union
from tf_largebatch.core.step_parts import Activity, StepWindow

STEP_NAME, NUM_STEPS = "train", "num_steps"  # of the annotation around a call, and its statistic
_PROCESS = "ExecutorState::Process"
_ASYNC_START, _ASYNC_DONE = f"{_PROCESS}Async::Start", f"{_PROCESS}Async::Done"
_DATA_FUNCTION = "InstantiatedCapturedFunction::"
_GETS_INPUT, _COLLECTIVE = "IteratorGetNext", "Collective"
_RECEIVES = ("CollectiveBcastRecv", "CollectiveBcastRecvV2")
_COMPILED = "CpuExecutable::Execute"  # of XLA; its operations run on threads of their own


@dataclass(frozen=True)
class Span:
    """Something that happened.

    Args:
        plane: of the machine or a device.
        line: the thread or stream.
        name: what it was.
        kind: the operation's type, where it is one.
        begin: in nanoseconds.
        end: likewise.
        facts: the numbers and texts noted of it.
    """

    plane: str
    line: str
    name: str
    kind: str
    begin: int
    end: int
    facts: Mapping[str, Any]

    @property
    def is_operation(self) -> bool:
        return bool(self.kind) and self.name == f"{self.name.rpartition(':')[0]}:{self.kind}"


@dataclass(frozen=True)
class RecordedRun:
    """A recording, sorted out.

    Args:
        windows: the calls of the training function, in order.
        activity: what went on, within them and around.
        spans: all of it, thread by thread, in the order of their begins.
        collectives: of those, the ones that end later than their call: from start to end.
    """

    windows: tuple[StepWindow, ...]
    activity: Activity
    spans: tuple[Span, ...]
    collectives: tuple[Span, ...]


def find_recording(folder: Path) -> Path:
    """The newest file that the profiler has written below `folder`.

    Raises:
        DataError: there is none.
    """
    files = sorted(
        folder.glob("plugins/profile/*/*.xplane.pb"), key=lambda each: each.stat().st_mtime
    )
    if not files:
        raise DataError(f"TensorFlow's profiler has written no *.xplane.pb below {folder}.")
    return files[-1]


def read_recording(path: Path) -> RecordedRun:
    """Reads a `*.xplane.pb`.

    Raises:
        DataError: it cannot be read.
    """
    # Loaded when it is needed; TensorFlow moves such modules from time to time.
    from google.protobuf.message import DecodeError
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace()
    try:
        space.ParseFromString(path.read_bytes())
    except DecodeError as error:
        raise DataError(f"{path} is no recording of TensorFlow's profiler: {error}.") from error
    return sorted_out(tuple(_spans(space)))


def sorted_out(spans: tuple[Span, ...]) -> RecordedRun:
    """What the spans of a recording mean."""
    host = [span for span in spans if not _is_on_device(span)]
    device = [span for span in spans if _is_on_device(span)]
    of_data = {span.facts.get("id") for span in host if span.name.startswith(_DATA_FUNCTION)}
    ends_later = [span for span in _ending_later(host) if span.facts["step_id"] not in of_data]
    collectives = [span for span in ends_later if span.kind.startswith(_COLLECTIVE)]
    input_wait = [span for span in ends_later if _GETS_INPUT in span.kind]
    input_wait += [
        span
        for span in host
        if _GETS_INPUT in span.name
        and span.name.endswith("Op::DoCompute")
        and span.facts.get("id") not in of_data
    ]
    compute = list(_operations_of_graphs(host, of_data))
    compute += [span for span in host if span.name.startswith(_COMPILED)]
    with_data = [span for span in collectives if span.kind not in _RECEIVES]
    if device:  # operations on the host only enqueue what runs there
        compute = [span for span in device if not _is_nccl(span)]
        collectives += [span for span in device if _is_nccl(span)]
        with_data += [span for span in device if _is_nccl(span)]
    activity = Activity(
        compute=_when(compute),
        input_wait=_when(input_wait),
        collectives=_when(collectives),
        data_starts=sorted(span.begin for span in with_data),
    )
    windows = sorted(_windows(host), key=lambda window: window.begin)
    return RecordedRun(tuple(windows), activity, spans, tuple(collectives))


def _spans(space: Any) -> Iterator[Span]:
    for plane in space.planes:
        kinds, names = plane.event_metadata, plane.stat_metadata
        for line in plane.lines:
            label = line.display_name or line.name
            for event in sorted(
                line.events, key=lambda event: (event.offset_ps, -event.duration_ps)
            ):
                kind = kinds[event.metadata_id]
                begin = line.timestamp_ns + event.offset_ps // 1000
                end = line.timestamp_ns + (event.offset_ps + event.duration_ps) // 1000
                facts = {names[stat.metadata_id].name: _value(stat, names) for stat in event.stats}
                yield Span(plane.name, label, kind.name, kind.display_name, begin, end, facts)


def _value(stat: Any, names: Any) -> Any:
    which = stat.WhichOneof("value")
    value = getattr(stat, which) if which else None
    return names[value].name if which == "ref_value" else value


def _is_on_device(span: Span) -> bool:
    return span.plane.startswith("/device:GPU")


def _is_nccl(span: Span) -> bool:
    return span.name.lower().startswith("nccl")


def _windows(host: list[Span]) -> Iterator[StepWindow]:
    for span in host:
        if span.name == STEP_NAME and NUM_STEPS in span.facts:
            steps = (int(span.facts[name]) for name in ("step_num", NUM_STEPS))
            yield StepWindow(*steps, begin=span.begin, end=span.end)


def _ending_later(host: list[Span]) -> Iterator[Span]:
    """Operations that end later than the call that started them, in one piece."""
    starts = {span.facts.get("_p"): span for span in host if span.name == _ASYNC_START}
    for done in host:
        start = starts.get(done.facts.get("_c")) if done.name == _ASYNC_DONE else None
        if start is not None:
            facts = start.facts
            name, kind = str(facts["name"]), str(facts["kernel_type"])
            yield Span(start.plane, start.line, name, kind, start.begin, done.end, facts)


def _operations_of_graphs(host: list[Span], of_data: set[Any]) -> Iterator[Span]:
    """What ran on the threads of graphs, but for those of tf.data, and for waiting."""
    around: list[Span] = []  # of one line, the innermost last: a graph may call another
    for span in host:  # line by line, in order
        while around and (around[-1].line != span.line or around[-1].end <= span.begin):
            around.pop()
        if span.name == _PROCESS:
            around.append(span)
        waits = span.kind.startswith(_COLLECTIVE) or _GETS_INPUT in span.kind
        if span.is_operation and not waits and around and around[-1].facts["id"] not in of_data:
            yield span


def _when(spans: list[Span]) -> Intervals:
    pairs = np.array([(span.begin, span.end) for span in spans], np.int64)
    return union(pairs.reshape(-1, 2))
