"""No command line of the example trainer ends in anything but a run or a typed error."""

from __future__ import annotations

import json

from tests.processes import run_python


def test_every_command_line_is_a_configuration_or_a_typed_error() -> None:
    printed = run_python("-m", "tests.examples._fuzz_flags_script", import_from=["examples"])
    counts = json.loads(printed)
    # Enough of the 1,000 get so far that the checks behind the flags are reached.
    assert counts["configurations"] > 150
    assert counts["recipes"] > 50
