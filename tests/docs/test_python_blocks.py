"""Every Python block of README.md and docs/ runs, in the order of its page.

All pages run in one process, each in a folder and with names of its own, on two replicas of one
CPU. What is the reader's own comes from `_stand_ins.py`.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.docs._pages import PAGES, blocks_of, completed
from tests.processes import run_python

PYTHON = {page: [each for each in blocks_of(page) if each.language == "python"] for page in PAGES}
WITH_CODE = [page for page in PAGES if PYTHON[page]]
MOST_NOT_RUN = 2


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    printed = run_python(
        "-m",
        "tests.docs._run_blocks_script",
        str(tmp_path_factory.mktemp("pages")),
        *WITH_CODE,
        seconds=500,
        environment={"TF_LARGEBATCH_CPU_REPLICAS": "2"},
    )
    return json.loads(printed.splitlines()[-1])


@pytest.mark.parametrize("page", WITH_CODE)
def test_the_blocks_of_a_page_run(page: str, results: Any) -> None:
    assert results[page]["error"] is None, results[page]["error"]
    assert results[page]["ran"] == [each.line for each in PYTHON[page] if each.not_run is None]


def test_few_blocks_are_only_shown_and_say_why() -> None:
    shown = [each for blocks in PYTHON.values() for each in blocks if each.not_run is not None]
    assert len(shown) <= MOST_NOT_RUN
    for block in shown:
        assert len(str(block.not_run)) > 20
        completed(block)  # is Python all the same


def test_dots_stand_for_what_was_said_before() -> None:
    """A failing block fails here: dots are filled in, and nothing else is changed."""
    block = PYTHON["README.md"][0]
    for text, names, expected in (
        ("result = f(1, ...)", {"f": lambda *a, **k: (a, k)}, ((1,), {"b": 2})),
        ("result = f(..., a=1)", {"f": lambda *a, **k: (a, k)}, ((), {"b": 2, "a": 1})),
        ("result = 1\n...", {"meanwhile": lambda: None}, 1),
    ):
        names |= {"elsewhere": {"f": {"b": 2}}}
        changed = type(block)("page", 1, "", "python", text, None)
        exec(compile(completed(changed), "page", "exec"), names)
        assert names["result"] == expected
    broken = type(block)("page", 7, "", "python", "raise KeyError", None)
    with pytest.raises(KeyError) as caught:
        exec(compile(completed(broken), "page", "exec"), {})
    assert caught.traceback[-1].lineno == 6  # from 0: errors show the line of the page
