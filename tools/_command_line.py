"""What the command lines of the benchmarks have in common."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from absl import flags

NOT_VERIFIED, USAGE_ERROR = 1, 2  # exit codes


def parse_flags(argv: Sequence[str]) -> list[str]:
    """For `app.run`: a wrong flag is one line and USAGE_ERROR, without a traceback."""
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        exit_for_usage(f"{error}\nSee --help.")


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
