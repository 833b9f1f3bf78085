"""What the command lines of the benchmarks have in common."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from absl import flags
from rich.console import Console
from rich.table import Table

_TABLE_WIDTH = 120
NOT_VERIFIED, USAGE_ERROR = 1, 2  # exit codes
flags.disclaim_key_flags()  # --help shows a program's flags, also those that are defined here


def define_delay(default_ms: float) -> flags.FlagHolder[float]:
    """Defines --one_way_delay_ms."""
    return flags.DEFINE_float(
        "one_way_delay_ms", default_ms, "From a worker to another.", lower_bound=0.0
    )


def define_bandwidth() -> flags.FlagHolder[float]:
    """Defines --bandwidth_mbit."""
    return flags.DEFINE_float(
        "bandwidth_mbit",
        0.0,
        "10^6 bits a second, of each pair of workers in each direction; 0 is without limit.",
        lower_bound=0.0,
    )


def parse_flags(argv: Sequence[str]) -> list[str]:
    """For `app.run`: what is wrong is one line and USAGE_ERROR, without a traceback."""
    try:
        program, *others = flags.FLAGS(argv)
    except flags.Error as error:
        exit_for_usage(f"{error}\nSee --help.")
    if others:
        exit_for_usage(f"Unknown arguments: {' '.join(others)}; flags begin with --. See --help.")
    return [program]


def exit_for_usage(complaint: str) -> NoReturn:
    print(complaint, file=sys.stderr)
    sys.exit(USAGE_ERROR)


def prepare_environment(**defaults: str) -> None:
    """Sets the environment of all workers; what is set already stays, as do the GPUs unused.

    Args:
        **defaults: more variables.
    """
    # Workers of one host share its cores; its GPUs, if any, could not be shared.
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    for name, value in {"TF_CPP_MIN_LOG_LEVEL": "2", **defaults}.items():
        os.environ.setdefault(name, value)


def hand_over(table: Table, report: Mapping[str, Any], *, output: str | None) -> int:
    """Prints the table, stores the report as JSON in the file `output`, if that is given.

    Returns:
        The exit code: 0 if all of `report["results"]` are verified, else NOT_VERIFIED.
    """
    # A file or a pipe has no width of its own, and rich would cut the columns at 80.
    Console(width=None if sys.stdout.isatty() else _TABLE_WIDTH).print(table)
    if output:
        Path(output).write_text(json.dumps(report, indent=2) + "\n")
    return 0 if all(row["verified"] for row in report["results"]) else NOT_VERIFIED
