"""Compares runs of examples/train.py, in the terminal and in one page for the browser.

    python tools/report_runs.py runs/batch_32 runs/batch_256
    python tools/report_runs.py runs/* --output=comparison.html

Takes run directories, also of runs that go on or were broken off. Prints a line for each run, the
settings and fields of the recipe that are not the same in all of them, and what is wrong with their
files. The page has the same, and curves of all that was logged, against epochs: it is one file
without anything from elsewhere, can be mailed, and needs a browser but no network.

"val. accuracy" is of the last epoch, "best" the highest, with its epoch; "images/s" is the median
of the epochs without the first. Exit code: 0, or 2 for a wrong command line or what is no run
directory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from _command_line import exit_for_usage
from _report_page import page
from _report_runs import Run, printable, read_runs
from _report_tables import print_report
from absl import app, flags
from rich.console import Console

import tf_largebatch as tlb

_OUTPUT = flags.DEFINE_string("output", "report.html", "The page; empty: none is written.")
_WIDTH = 200  # where standard output is no terminal, and rich would cut the columns at 80


def _parse_flags(argv: Sequence[str]) -> list[str]:
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        exit_for_usage(f"{error}\nSee --help.")


def _write_page(runs: Sequence[Run], path: Path) -> None:
    temporary = path.parent / f".{path.name}.partial"
    try:
        temporary.write_text(page(runs), encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        exit_for_usage(f"--output={printable(str(path))}: {error.strerror}.")


def main(argv: Sequence[str]) -> int:
    if len(argv) < 2:
        exit_for_usage("No run directories given, as in: report_runs.py runs/a runs/b. See --help.")
    try:
        runs = read_runs([Path(argument) for argument in argv[1:]])
    except (tlb.DataError, tlb.ConfigurationError) as error:
        exit_for_usage(str(error))
    print_report(runs, Console(width=None if sys.stdout.isatty() else _WIDTH))
    if _OUTPUT.value:
        path = Path(_OUTPUT.value)
        _write_page(runs, path)
        print(f"The page is {printable(str(path))}.")
    return 0


if __name__ == "__main__":
    app.run(main, flags_parser=_parse_flags)
