"""Commands that the pages show exist: their programs, with these flags and values."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.docs._pages import PAGES, ROOT, text_of

TEXT = "\n".join(map(text_of, PAGES))
_PROGRAM = r"((?:tools|examples)/\w+\.py)"
# Up to the end of the line or of the code; what follows a lone -- is another command.
_COMMAND = re.compile(rf"\bpython {_PROGRAM}((?:[ \t]+(?!--\s)[^\s`#]+)*)")


def flags_by_program() -> dict[str, list[str]]:
    """All flags with which the pages show a program."""
    found: dict[str, list[str]] = {}
    for program, arguments in _COMMAND.findall(TEXT):
        flags = [each for each in arguments.split() if each.startswith("--")]
        found.setdefault(program, []).extend(flag for flag in flags if not flag.endswith("..."))
    return found


FLAGS = flags_by_program()


def names(flags: list[str]) -> Iterator[str]:
    return (flag.removeprefix("--").partition("=")[0] for flag in flags)


def test_programs_that_are_named_exist() -> None:
    missing = [name for name in re.findall(_PROGRAM, TEXT) if not (ROOT / name).is_file()]
    assert missing == []
    assert len(FLAGS) > 10


@pytest.mark.parametrize("program", sorted(set(FLAGS) - {"examples/train.py"}))
def test_a_tool_takes_the_flags_that_are_shown(program: str) -> None:
    done = subprocess.run(
        [sys.executable, program, *FLAGS[program], "--helpfull"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1, done.stderr  # absl's for help; a wrong value is another one
    known = set(re.findall(r"^  --(?:\[no\])?(\w+):", done.stdout, re.M))
    assert known
    assert set(names(FLAGS[program])) <= known


def test_the_trainer_takes_the_flags_that_are_shown() -> None:
    tree = ast.parse((ROOT / "examples/_config.py").read_text())
    (config,) = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    fields = {
        node.target.id
        for node in config.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    # The pages also name flags of its without the command.
    shown = re.findall(r"`--(dataset|data_dir|optimizer)=", TEXT)
    assert {*shown, *names(FLAGS.get("examples/train.py", []))} <= fields


def test_variables_and_targets_that_are_named_exist() -> None:
    code = "\n".join(path.read_text() for path in (ROOT / "tf_largebatch").rglob("*.py"))
    variables = set(re.findall(r"\bTF_LARGEBATCH_\w+", TEXT))
    assert variables
    assert {name for name in variables if f'"{name}"' not in code} == set()
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^ +make (?:PYTHON=\S+ )?([\w-]+)", TEXT, re.M))
    assert "test" in targets
    assert {name for name in targets if not re.search(rf"^{name}:", makefile, re.M)} == set()
