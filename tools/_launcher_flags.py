"""The command lines of the launchers: flags that both have, then `--` and the command."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from _supervisor import SupervisorOptions
from absl import flags

USAGE_ERROR = 2  # exit code
_LOG_DIR = flags.DEFINE_string(
    "log_dir",
    None,
    "Folder for the logs; default: a new one.",
    allow_override=True,  # absl.logging has a flag of this name for its own files
)
_TIMEOUT = flags.DEFINE_float(
    "timeout_seconds",
    0.0,
    "Stop all workers after this time, restarts included; 0 is no limit.",
    lower_bound=0.0,
)
_GRACE = flags.DEFINE_float(
    "grace_seconds", 10.0, "What the others get to end when one has failed.", lower_bound=0.0
)
_TERMINATE = flags.DEFINE_float(
    "terminate_seconds",
    10.0,
    "From SIGTERM, on which workers may save their state, to SIGKILL.",
    lower_bound=0.0,
)
_MAX_RESTARTS = flags.DEFINE_integer(
    "max_restarts", 0, "How often all workers are started again after a failure.", lower_bound=0
)
_BACKOFF = flags.DEFINE_float(
    "restart_backoff_seconds",
    1.0,
    "Wait before a restart; doubled each time up to 60 s, anew after an attempt of 10 minutes.",
    lower_bound=0.0,
)
_STATUS = flags.DEFINE_float(
    "status_seconds",
    30.0,
    "Time between status lines where standard error is no terminal; 0 is none.",
    lower_bound=0.0,
)


def parse_flags(argv: Sequence[str]) -> list[str]:
    """For `app.run`: what is wrong is one line and USAGE_ERROR, without a traceback."""
    flags.FLAGS.set_gnu_getopt(False)  # flags after the command belong to the command
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        exit_for_usage(f"{error}\nSee --help.")


def exit_for_usage(complaint: str) -> NoReturn:
    print(complaint, file=sys.stderr)
    sys.exit(USAGE_ERROR)


def command_of(argv: Sequence[str]) -> list[str]:
    """The command behind the flags; without one, exits with what is wrong."""
    command = list(argv[1:])
    if not command:
        exit_for_usage("No command given. Put it after --, as in: -- python train.py")
    return command


def supervisor_options() -> SupervisorOptions:
    """The flags as options; makes the folder of the logs."""
    log_dir = Path(_LOG_DIR.value or tempfile.mkdtemp(prefix="tf_largebatch_logs_"))
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        exit_for_usage(f"--log_dir={log_dir} cannot be made: {error.strerror}.")
    return SupervisorOptions(
        log_dir=log_dir,
        max_restarts=_MAX_RESTARTS.value,
        backoff_seconds=_BACKOFF.value,
        timeout_seconds=_TIMEOUT.value,
        grace_seconds=_GRACE.value,
        terminate_seconds=_TERMINATE.value,
        status_seconds=_STATUS.value,
    )
