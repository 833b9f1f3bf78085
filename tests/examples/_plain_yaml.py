"""Reads the plain part of YAML that manifests are written in; refuses everything else.

Block mappings and sequences, plain and quoted scalars, `|` blocks, lists of quoted strings in one
line, comments on lines of their own or behind a space, several documents.
"""

from __future__ import annotations

import json
import re
from typing import Any

_KEY = re.compile(r"([A-Za-z][A-Za-z0-9_./-]*):(?: +(.*))?")
_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./:-]*")


def read_documents(text: str) -> list[Any]:
    """All documents of the text; ValueError where it is not plain, or not YAML."""
    return [_Reader(part).read() for part in re.split(r"(?m)^---$", text)]


class _Reader:
    """Reads one document, line by line; `_lines` is what is left, outermost first."""

    def __init__(self, text: str) -> None:
        if "\t" in text:
            raise ValueError("a tab")
        self._lines = text.splitlines()

    def read(self) -> Any:
        value = self._block(0)
        if self._next() is not None:
            raise ValueError(f"not at this depth: {self._lines[0]!r}")
        return value

    def _next(self) -> tuple[int, str] | None:
        """(depth, text) of the next line that says something."""
        while self._lines:
            text = re.sub(r"(^| )\s*#.*", "", self._lines[0]).rstrip()
            if text:
                return len(text) - len(text.lstrip()), text.lstrip()
            self._lines.pop(0)
        return None

    def _block(self, depth: int) -> Any:
        line = self._next()
        if line is None or line[0] != depth:
            raise ValueError(f"expected something at depth {depth}, not {line}")
        return self._sequence(depth) if line[1].startswith("- ") else self._mapping(depth)

    def _sequence(self, depth: int) -> list[Any]:
        values = []
        while (line := self._next()) is not None and line[0] == depth:
            if not line[1].startswith("- "):
                raise ValueError(f"no item: {line[1]!r}")
            item = line[1][2:]
            if _KEY.fullmatch(item):  # a mapping, whose first key stands behind the dash
                self._lines[0] = " " * (depth + 2) + item
                values.append(self._mapping(depth + 2))
            else:
                self._lines.pop(0)
                values.append(self._value(item, depth))
        return values

    def _mapping(self, depth: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        while (line := self._next()) is not None and line[0] == depth:
            match = _KEY.fullmatch(line[1])
            if match is None or match[1] in values:
                raise ValueError(f"no new key: {line[1]!r}")
            self._lines.pop(0)
            if match[2]:
                values[match[1]] = self._value(match[2], depth)
            else:
                following = self._next()
                if following is None:
                    raise ValueError(f"nothing behind {line[1]!r}")
                values[match[1]] = self._block(following[0])
        return values

    def _value(self, text: str, depth: int) -> Any:
        if text == "|":
            return self._literal(depth)
        if text in ("true", "false"):
            return text == "true"
        if re.fullmatch(r"[0-9]+", text) or text[0] in '"[':
            return json.loads(text)
        if not _PLAIN.fullmatch(text) and not re.fullmatch(r"-[a-z]", text):
            raise ValueError(f"no plain value: {text!r}")
        return text

    def _literal(self, depth: int) -> str:
        lines = []
        inner = len(self._lines[0]) - len(self._lines[0].lstrip())
        if inner <= depth:
            raise ValueError("an empty block")
        while self._lines and (not self._lines[0] or self._lines[0].startswith(" " * inner)):
            lines.append(self._lines.pop(0)[inner:])
        return "\n".join(lines).rstrip("\n") + "\n"
