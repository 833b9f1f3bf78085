"""A recording as a file that Perfetto (ui.perfetto.dev) and chrome://tracing open.

It is Chrome's Trace Event Format: spans of a thread ("X") in microseconds, names of threads and
processes ("M"). First come the steps and their parts, then the collectives, then each thread or
stream as recorded.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tf_largebatch.callbacks._recorded_run import RecordedRun, Span
from tf_largebatch.core.step_parts import PARTS, Division

_SUMMARY, _STEPS = "Steps", "steps"
_NOISE = "ThreadpoolListener::"  # a mark for each closure
_NANOSECONDS_A_MICROSECOND = 1e3


def write_trace(path: Path, run: RecordedRun, divisions: Sequence[Division]) -> None:
    """Writes `path`, a `.json.gz`.

    Args:
        path: of the file.
        run: what was recorded.
        divisions: of its windows.
    """
    events = {"traceEvents": _with_names(_summary(run, divisions), _rows(run))}
    with gzip.open(path, "wt", compresslevel=5) as file:
        json.dump(events, file, separators=(",", ":"), default=str)


# Where a span is shown, and what: (process, thread, span's name, begin, end, facts).
_Row = tuple[str, str, str, int, int, dict[str, Any]]


def _summary(run: RecordedRun, divisions: Sequence[Division]) -> Iterator[_Row]:
    for window, division in zip(run.windows, divisions, strict=True):
        yield _SUMMARY, _STEPS, f"step {window.step}", window.begin, window.end, {}
        for part in PARTS:
            for begin, end in getattr(division, part, ()):
                yield _SUMMARY, part.replace("_", " "), part, int(begin), int(end), {}
    free_from: list[int] = []  # of each lane: spans of one must not overlap
    for span in sorted(run.collectives, key=lambda span: span.begin):
        free = (lane for lane, until in enumerate(free_from) if until <= span.begin)
        lane = next(free, len(free_from))
        free_from[lane : lane + 1] = [span.end]
        thread = f"collectives {lane:02d}"
        yield _SUMMARY, thread, span.kind or span.name, span.begin, span.end, {"name": span.name}


def _rows(run: RecordedRun) -> Iterator[_Row]:
    for span in run.spans:
        if not span.name.startswith(_NOISE):
            yield span.plane, span.line, span.name, span.begin, span.end, _told(span)


def _told(span: Span) -> dict[str, Any]:
    return {name: fact for name, fact in span.facts.items() if not name.startswith("_")}


def _with_names(*groups: Iterator[_Row]) -> list[dict[str, Any]]:
    rows = [row for group in groups for row in group]
    origin = min((begin for *_, begin, _, _ in rows), default=0)
    processes: dict[str, int] = {}
    threads: dict[tuple[str, str], int] = {}
    events = []
    for process, thread, name, begin, end, facts in rows:
        place = {
            "pid": processes.setdefault(process, 1 + len(processes)),
            "tid": threads.setdefault((process, thread), 1 + len(threads)),
        }
        at = (begin - origin) / _NANOSECONDS_A_MICROSECOND
        lasts = (end - begin) / _NANOSECONDS_A_MICROSECOND
        events.append({"ph": "X", "name": name, "ts": at, "dur": lasts, "args": facts, **place})
    return [*_metadata(processes, threads), *events]


def _metadata(
    processes: dict[str, int], threads: dict[tuple[str, str], int]
) -> Iterator[dict[str, Any]]:
    for process, pid in processes.items():
        names = {"process_name": {"name": process}, "process_sort_index": {"sort_index": pid}}
        for what, args in names.items():
            yield {"ph": "M", "name": what, "pid": pid, "args": args}
    for (process, thread), tid in threads.items():
        place = {"pid": processes[process], "tid": tid}
        names = {"thread_name": {"name": thread}, "thread_sort_index": {"sort_index": tid}}
        for what, args in names.items():
            yield {"ph": "M", "name": what, **place, "args": args}
