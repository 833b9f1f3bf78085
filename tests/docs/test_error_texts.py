"""Messages that the pages quote are those of the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

import pytest

import tf_largebatch as tlb
from tests.docs._pages import PAGES, ROOT, Block, blocks_of

# What TensorFlow makes of a text of ours, or Python of a warning; and what is printed.
_NOT_OURS = ("DeadlineExceededError", "InvalidArgumentError", "UserWarning", "tf_largebatch")
QUOTED = [block for page in PAGES for block in blocks_of(page) if block.language == "text"]


def texts_of_the_package() -> str:
    """All texts of the code, a line each; what differs from case to case cuts them into parts."""
    texts: list[str] = []
    for path in sorted((ROOT / "tf_largebatch").rglob("*.py")):
        tree = ast.parse(path.read_text())
        constants = {
            target.id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            texts += _text(node, constants).splitlines()
    return "\n".join(texts)


def _text(node: ast.AST, constants: Mapping[str, Any]) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.FormattedValue):
        name = node.value.id if isinstance(node.value, ast.Name) else ""
        return str(constants.get(name, "\n"))
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, constants) for part in node.values)
    return ""


@pytest.fixture(scope="module")
def texts() -> str:
    return texts_of_the_package()


def test_there_are_messages_to_compare() -> None:
    assert len(QUOTED) > 40


@pytest.mark.parametrize("block", QUOTED, ids=lambda block: f"{block.page}:{block.line}")
def test_a_quoted_message_is_in_the_code(block: Block, texts: str) -> None:
    name, message = block.text.split(": ", maxsplit=1)
    if name not in _NOT_OURS:
        assert issubclass(getattr(tlb, name), tlb.LargeBatchError)
    for part in re.split("…", message):
        assert part.strip(" ,.;:()") in texts, part
