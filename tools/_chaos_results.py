"""Whether a training that was struck down gave what an undisturbed one gave; what it cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from _chaos_run import Outcome
from _chaos_settings import arrays_path
from _chaos_striker import Blow
from rich import box
from rich.table import Table

_SHOWN = 200  # characters of a value


def compare(undisturbed: Outcome, disturbed: Outcome) -> list[dict[str, Any]]:
    """One row for each thing compared: `what`, `verified`, and `difference`, the first one."""
    rows: list[dict[str, Any]] = []

    def add(what: str, difference: str | None) -> None:
        rows.append({"what": what, "verified": difference is None, "difference": difference})

    pairs = list(zip(undisturbed.results, disturbed.results, strict=True))
    for rank, (expected, found) in enumerate(pairs):
        paths = [arrays_path(run.folder, rank) for run in (undisturbed, disturbed)]
        add(f"worker {rank}: variables of model and optimizer", variables_difference(*paths))
        add(
            f"worker {rank}: SHA-256 of the weights",
            first_difference(expected["weights_sha256"], found["weights_sha256"]),
        )
        add(
            f"worker {rank}: History",
            first_difference(
                {"epoch": expected["epochs"], **expected["history"]},
                {"epoch": found["epochs"], **found["history"]},
            ),
        )
        add(
            f"worker {rank}: weights are those of worker 0",
            first_difference(disturbed.results[0]["weights_sha256"], found["weights_sha256"]),
        )
    texts = [run.training.csv_path.read_text() for run in (undisturbed, disturbed)]
    add("CSV file", first_difference(*(text.split("\n") for text in texts)))
    add(
        "TensorBoard",
        first_difference(*(run.results[0]["scalars"] for run in (undisturbed, disturbed))),
    )
    return rows


def first_difference(expected: Any, found: Any) -> str | None:
    """Where two values of JSON differ first, and how; None if they do not. NaN equals NaN."""
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        keys = [*expected, *(key for key in found if key not in expected)]
    elif isinstance(expected, list) and isinstance(found, list):
        keys = range(max(len(expected), len(found)))
    else:
        same = type(expected) is type(found) and repr(expected) == repr(found)
        return None if same else f": {_short(found)} instead of {_short(expected)}"
    for key in keys:
        sides = [_item(side, key) for side in (expected, found)]
        if _MISSING in sides:
            if sides[0] is _MISSING:
                return f"[{key!r}]: {_short(sides[1])}, which should not be there"
            return f"[{key!r}]: is missing, should be {_short(sides[0])}"
        if (difference := first_difference(*sides)) is not None:
            return f"[{key!r}]{difference}"
    return None


class _Missing:
    pass


_MISSING = _Missing()


def _item(side: Any, key: Any) -> Any:
    try:
        return side[key]
    except (KeyError, IndexError):
        return _MISSING


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + " ..."


def variables_difference(expected: Path, found: Path) -> str | None:
    """The first variable of two `.npz` files that differs in a bit; None if none does."""
    with np.load(expected) as old, np.load(found) as new:
        if old.files != new.files:
            return f"names{first_difference(list(old.files), list(new.files))}"
        different = [name for name in old.files if not _same_bits(old[name], new[name])]
        if not different:
            return None
        name = different[0]
        text = f"{len(different)} of {len(old.files)} differ, first {name.replace('|', '/')!r}"
        if old[name].shape != new[name].shape or old[name].dtype != new[name].dtype:
            return f"{text}: {_kind(new[name])} instead of {_kind(old[name])}"
        # As bits, or NaN would differ from itself.
        places = np.argwhere(_bits(old[name]) != _bits(new[name]))
        index = tuple(int(each) for each in places[0][: old[name].ndim])
        return (
            f"{text}{list(index)}: {new[name][index]!r} instead of {old[name][index]!r}, "
            f"and {len(places) - 1} more of its {old[name].size} elements"
        )


def _same_bits(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> bool:
    return _kind(one) == _kind(other) and one.tobytes() == other.tobytes()


def _kind(array: npt.NDArray[Any]) -> str:
    return f"{array.dtype}{list(array.shape)}"


def _bits(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if array.dtype.kind == "f":
        return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}").reshape(array.shape)
    return array


def blow_row(blow: Blow) -> dict[str, Any]:
    """For JSON."""
    again = None
    if blow.batches is not None and blow.resumed_at is not None:
        again = max(0, blow.batches - blow.resumed_at)  # a TERM lets them go on to a batch's end
    return {
        "gang": blow.gang,
        "moment": blow.strike.moment,
        "signal": blow.strike.signal,
        "victims": list(blow.strike.victims),
        "pause_seconds": blow.strike.pause_seconds,
        "epoch": blow.epoch,
        "batches": blow.batches,
        "left_partial_file": blow.left_partial_file,
        "end_seconds": blow.end_seconds,
        "resumed_at": blow.resumed_at,
        "batches_again": again,
        "codes": blow.codes,
    }


def run_figures(outcome: Outcome) -> dict[str, Any]:
    """For JSON."""
    return {
        "seconds": outcome.seconds,
        "start_seconds": outcome.start_seconds,
        "batches": outcome.batches,
        "epochs": len(outcome.results[0]["epochs"]),
        "restarts": outcome.gangs - 1,
        "strikes": [blow_row(blow) for blow in outcome.blows],
        "strikes_left_over": outcome.left_over,
    }


def blows_table(blows: Sequence[Blow]) -> Table:
    """What was done, for people."""
    table = Table(title="What was done to the training", box=box.SIMPLE_HEAD)
    for heading in ("gang", "moment", "signal and workers", "epoch", "batch"):
        table.add_column(heading, no_wrap=True)
    for heading in ("all ended after", "resumed at", "batches again", "state torn"):
        table.add_column(heading, justify="right", no_wrap=True)
    for blow in blows:
        row = blow_row(blow)
        ended = row["end_seconds"]
        table.add_row(
            str(blow.gang),
            blow.strike.moment,
            blow.strike.describe(),
            *("-" if row[name] is None else str(row[name]) for name in ("epoch", "batches")),
            "went on" if ended is None else f"{ended:.1f} s",
            *(
                "-" if row[name] is None else str(row[name])
                for name in ("resumed_at", "batches_again")
            ),
            "yes" if blow.left_partial_file else "",
        )
    return table


def comparison_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """What is equal, and what differs first where it is not."""
    table = Table(title="Against the undisturbed training", box=box.SIMPLE_HEAD)
    table.add_column("compared", no_wrap=True)
    table.add_column("result", overflow="fold")
    for row in rows:
        table.add_row(row["what"], _result(row))
    return table


def _result(row: Mapping[str, Any]) -> str:
    return "equal" if row["verified"] else f"DIFFERS {row['difference'].splitlines()[0]}"
