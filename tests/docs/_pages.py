"""The blocks of code in README.md and docs/, and what their dots stand for."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
_FENCE = re.compile(r"^```(\w*)\s*$")
_NOT_RUN = re.compile(r"^<!-- not run: (.+) -->$")
# Three dots as one of the arguments of a call, the last or the first.
_DOTS = re.compile(r"(?<=[(,])(\s*)\.\.\.(?=\s*[,)])")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Args:
        page: its file, from the root of the repository.
        line: of its first line of code, from 1.
        heading: the heading that it stands below.
        language: as its fence says.
        text: the code.
        not_run: why it is only shown; None where it runs. `<!-- not run: reason -->` in front of
            the fence says so.
    """

    page: str
    line: int
    heading: str
    language: str
    text: str
    not_run: str | None


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def blocks_of(page: str) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    heading, reason, lines = "", None, iter(enumerate(text_of(page).splitlines(), start=1))
    for number, line in lines:
        fence = _FENCE.match(line)
        if fence:
            body = []
            for _, inner in lines:
                if inner.startswith("```"):
                    break
                body.append(inner)
            yield Block(page, number + 1, heading, fence[1], "\n".join(body), reason)
            reason = None
        elif line.startswith("#"):
            heading = line.lstrip("# ")
        elif line.strip():
            note = _NOT_RUN.match(line)
            reason = note[1] if note else None


def completed(block: Block) -> ast.Module:
    """The code with its dots filled in: a page says once what a call needs, and then leaves it out.

    Dots among the arguments of `f(...)` become `**elsewhere["f"]`. Dots that are a statement, which
    stand for code of the reader's own, become `meanwhile()`.
    """
    code = "\n" * (block.line - 1) + _DOTS.sub(r"\1**elsewhere", block.text)
    return ast.fix_missing_locations(_FilledIn().visit(ast.parse(code, block.page)))


class _FilledIn(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        for keyword in node.keywords:
            is_dots = isinstance(keyword.value, ast.Name) and keyword.value.id == "elsewhere"
            if keyword.arg is None and is_dots:
                name = ast.Constant(ast.unparse(node.func))
                keyword.value = ast.Subscript(keyword.value, name, ast.Load())
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.value, ast.Constant) and node.value.value is ...:
            call = ast.Call(ast.Name("meanwhile", ast.Load()), [], [])
            return ast.copy_location(ast.Expr(call), node)
        return node
