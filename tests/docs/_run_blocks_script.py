"""Runs the Python blocks of all pages, one page after the other, in a folder each.

    python -m tests.docs._run_blocks_script FOLDER PAGE...

The last line printed is JSON: of each page "ran", the lines of the blocks that ran, and "error", a
text or null. A page is left at its first error.
"""

from __future__ import annotations

import contextlib
import io
import json
import linecache
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import tf_largebatch as tlb
from tests.docs._pages import Block, blocks_of, completed
from tests.docs._stand_ins import before, for_page, prepared_headings


def run_page(page: str, folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True)
    os.chdir(folder)
    names, ran, headings = for_page(page), [], [""]
    blocks = [each for each in blocks_of(page) if each.language == "python" and not each.not_run]
    for block in blocks:
        try:
            if block.heading != headings[-1]:
                headings.append(block.heading)
                before(page, block.heading, names)
            run(block, names)
        except BaseException:  # a block that ends the process is wrong as well
            return {"ran": ran, "error": traceback.format_exc()}
        ran.append(block.line)
    gone = prepared_headings(page) - set(headings)
    return {"ran": ran, "error": f"Prepared for headings that are gone: {gone}" if gone else None}


def run(block: Block, names: dict[str, Any]) -> None:
    # Where AutoGraph looks for the source of a function.
    lines = ("\n" * (block.line - 1) + block.text).splitlines(keepends=True)
    linecache.cache[block.page] = (len(block.text), None, lines, block.page)
    exec(compile(completed(block), block.page, "exec"), names)


def main(folder: str, *pages: str) -> None:
    tlb.LargeBatchStrategy()  # makes the replicas, before a block runs anything without a strategy
    results = {}
    for number, page in enumerate(pages):
        with contextlib.redirect_stdout(io.StringIO()):
            results[page] = run_page(page, Path(folder, str(number)))
    print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
