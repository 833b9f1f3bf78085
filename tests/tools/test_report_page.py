"""The page of a report of runs: what is in it, and what a browser makes of it."""

from __future__ import annotations

import csv
import html.parser
import importlib.util
import io
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tf_largebatch as tlb
from tests.tools._report_examples import HISTORY, hostile_runs, make_run
from tests.tools.tool_runs import ROOT, load

pytestmark = pytest.mark.timeout(120)

load("_report_history")
read_runs = load("_report_runs").read_runs
tables = load("_report_tables")
pages = load("_report_page")


class PageParser(html.parser.HTMLParser):
    """The elements of a page, and the texts in them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data: str) -> None:
        tag, attributes = self.elements[-1] if self.elements else ("", {})
        self.texts.setdefault(attributes.get("id") or tag, []).append(data)


def test_the_pages_numbers_are_those_of_the_csv(tmp_path: Path) -> None:
    folders = hostile_runs(tmp_path)
    parser = PageParser(pages.page(read_runs(folders)))
    data = json.loads("".join(parser.texts["data"]))
    whole = list(csv.DictReader(io.StringIO(HISTORY)))
    columns = data["runs"][0]["columns"]
    assert data["runs"][0]["epochs"] == [int(row["epoch"]) + 1 for row in whole]
    assert sorted(columns) == sorted(set(whole[0]) - {"epoch"})
    for name, values in columns.items():
        assert values == [float(row[name]) for row in whole]  # to the last bit
    assert data["runs"][1]["epochs"] == [1, 2, 3]
    assert data["runs"][1]["columns"]["noise"] == [7.5] * 3
    assert data["runs"][2]["columns"]["loss"] == [2.0, "NaN", "Infinity", 1.5]
    assert [chart["title"] for chart in data["charts"]] == [
        "Accuracy",
        "Loss",
        "Learning rate",
        "Images per second",
        "</script ><b>",
        "noise",
    ]
    assert (data["charts"][1]["training"], data["charts"][1]["validation"]) == ("loss", "val_loss")
    assert (data["charts"][2]["training"], data["charts"][2]["validation"]) == (
        "learning_rate",
        None,
    )


def test_the_page_holds_the_tables(tmp_path: Path) -> None:
    runs = read_runs(hostile_runs(tmp_path))
    parser = PageParser(pages.page(runs))
    cells = parser.texts["td"]
    for run in runs:
        assert set(list(tables.overview(run).values())[1:]) <= set(cells)
    for texts in tables.differences(runs).values():
        assert set(texts) <= set(cells)
    assert any("cut: history.csv, line 5: has no end" in text for text in parser.texts["li"])


def test_the_page_has_no_elements_of_others_and_nothing_from_elsewhere(tmp_path: Path) -> None:
    text = pages.page(read_runs(hostile_runs(tmp_path)))
    parser = PageParser(text)
    tags = {tag for tag, _ in parser.elements}
    assert not tags & {"img", "b", "link", "iframe", "base", "form", "object"}
    assert [tag for tag, _ in parser.elements].count("script") == 2
    assert tags >= {"html", "meta", "style", "script", "table", "noscript"}
    for _, attributes in parser.elements:
        assert not {"src", "href", "onerror"} & set(attributes)
    addresses = set(re.findall(r"[a-z]+://[^\s\"')]+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, nothing that is fetched
    (policy,) = [each["content"] for _, each in parser.elements if "http-equiv" in each]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    assert not re.search(r"@import|url\(", text)
    assert "\x1b" not in text and "\\x1b[31m" in text


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"warmup": "constant", "warmup_epochs": 2.5},
        {"warmup": "none"},
        {"warmup_epochs": 0.0},
        {"warmup_epochs": 9.0, "decay_epochs": (3.0, 3.001)},  # warmup past the end
        {"per_replica_batch_size": 1, "epochs": 90, "warmup_epochs": 5.0},
        {"per_replica_batch_size": 4000, "epochs": 1, "decay_epochs": ()},  # one update
    ],
)
def test_no_update_is_off_the_recipes_line(changes: dict[str, Any]) -> None:
    fields = {"epochs": 8, "per_replica_batch_size": 32, "base_batch_size": 8, **changes}
    recipe = tlb.Recipe(num_examples=4000, num_replicas=1, base_learning_rate=0.1, **fields)
    epochs, rates = zip(*pages.recipe_curve(recipe), strict=True)
    assert len(epochs) < 60
    updates = np.arange(recipe.total_steps)
    drawn = np.interp((updates + 1) / recipe.steps_per_epoch, epochs, rates)
    np.testing.assert_allclose(drawn, recipe.learning_rate_at(updates), rtol=1e-9)


# In a browser


def in_browser(page: Path, script: str, *, width: int = 1300, scheme: str = "light") -> Any:
    """The value of an expression in the opened page, which asks for and complains of nothing.

    Skips the test where there is no browser.
    """
    if importlib.util.find_spec("PySide6") is None:
        pytest.skip("no browser: PySide6-Addons is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "tests.tools._page_in_browser", str(page), str(width), scheme],
        cwd=ROOT,
        input=script,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if "ImportError" in done.stderr:  # a library of the system that Chromium needs
        pytest.skip(f"no browser: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["messages"] == []
    assert found["requested"] == [page.as_uri()]
    return found["value"]


@pytest.fixture(scope="module")
def opened_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("opened")
    path = folder / "report.html"
    path.write_text(pages.page(read_runs(hostile_runs(folder))), encoding="utf-8")
    return path


CURVES = """(() => {
  const found = {};
  for (const figure of document.querySelectorAll("figure")) {
    for (const path of figure.querySelectorAll("g > path.curve:not(.cross)")) {
      const {run, kind} = path.parentNode.dataset;
      found[[figure.dataset.chart, run, kind]] = path.getAttribute("d");
    }
  }
  return {found, crosses: document.querySelectorAll(".cross").length, title: document.title};
})()"""


def test_curves_are_drawn_through_the_values(opened_page: Path) -> None:
    seen = in_browser(opened_page, CURVES)
    assert seen["title"] == "3 training runs"
    assert seen["crosses"] == 2  # NaN and infinity
    rows = list(csv.DictReader(io.StringIO(HISTORY)))
    for column, scale in (
        ("accuracy", float),
        ("val_accuracy", float),
        ("images_per_second", float),
        ("loss", lambda text: math.log(float(text))),
        ("val_loss", lambda text: math.log(float(text))),
    ):
        chart = column.removeprefix("val_")
        kind = "validation" if column.startswith("val_") else "training"
        points = np.array(
            [point.split(",") for point in seen["found"][f"{chart},0,{kind}"][1:].split("L")], float
        )
        values = np.array([scale(row[column]) for row in rows])
        np.testing.assert_allclose(np.diff(points[:, 0], 2), 0, atol=1e-6)  # epochs, evenly
        slope, start = np.polyfit(values, points[:, 1], 1)
        assert slope < 0  # upwards
        np.testing.assert_allclose(points[:, 1], slope * values + start, atol=1e-6)
    assert seen["found"]["loss,2,training"].count("L") == 0  # not across the NaN
    assert not any(key.startswith("learning_rate") for key in seen["found"])


LEGEND = """(() => {
  const buttons = [...document.querySelectorAll("#legend button")];
  const named = (text) => buttons.find((button) => button.textContent === text);
  const state = () => ({
    pressed: buttons.map((button) => button.getAttribute("aria-pressed")),
    curves: [...new Set([...document.querySelectorAll("g[data-run]")].map(
      (group) => `${group.dataset.run} ${group.dataset.kind}`))].sort(),
    recipes: document.querySelectorAll("path.recipe").length,
    empty: [...document.querySelectorAll("figure")].filter(
      (figure) => !figure.querySelector("g")).length,
  });
  const after = (text) => { named(text).click(); return state(); };
  return {
    names: buttons.map((button) => button.textContent), start: state(),
    cut: after("cut"), training: after("training"), none: after("none"), all: after("all"),
  };
})()"""


def test_the_legend_turns_runs_off_and_on(opened_page: Path) -> None:
    seen = in_browser(opened_page, LEGEND)
    assert seen["names"] == ["whole", "cut", "<b>&amp;", "all", "none", "training", "validation"]
    both = [f"{run} {kind}" for run in (0, 1, 2) for kind in ("training", "validation")]
    assert seen["start"]["curves"] == both
    assert seen["start"]["recipes"] == 3
    assert seen["start"]["pressed"] == ["true", "true", "true", None, None, "true", "true"]
    assert seen["cut"]["curves"] == [text for text in both if text[0] != "1"]
    assert seen["cut"]["recipes"] == 2
    assert seen["cut"]["pressed"][:3] == ["true", "false", "true"]
    # Rates and speeds stay: they are of neither side. Of the third run they are not known.
    assert seen["training"]["curves"] == [
        "0 training",
        "0 validation",
        "2 training",
        "2 validation",
    ]
    assert seen["training"]["pressed"][5:] == ["false", "true"]
    assert seen["none"]["curves"] == [] and seen["none"]["empty"] == 6
    assert [text[0] for text in seen["all"]["curves"]] == ["0", "0", "1", "1", "2", "2"]


HOVER = """(() => {
  const figure = document.querySelector("[data-chart=CHART]");
  const svg = figure.querySelector("svg"), tooltip = figure.querySelector(".tooltip");
  const texts = () => tooltip.hidden ? null : [...tooltip.querySelectorAll("tr")].map(
    (row) => [...row.children].map((cell) => cell.textContent));
  const box = svg.getBoundingClientRect();
  const at = (share) => {
    const clientX = box.left + 62 + share * (box.width - 62 - 14);
    svg.dispatchEvent(new PointerEvent("pointermove", {clientX, clientY: box.top + 60}));
    const place = tooltip.getBoundingClientRect();
    return {texts: texts(), inside: place.left >= 0 && place.right <= innerWidth};
  };
  const press = (key) => {
    svg.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true, cancelable: true}));
    return texts();
  };
  const before = texts(), second = at(0.36), last = at(0.95);
  svg.dispatchEvent(new PointerEvent("pointerleave"));
  const left = texts(), right = press("ArrowRight"), next = press("ArrowRight");
  return {before, second, last, left, right, next, escaped: press("Escape")};
})()"""


@pytest.mark.parametrize("width", [400, 1300])
def test_values_of_the_epoch_under_the_pointer(opened_page: Path, width: int) -> None:
    seen = in_browser(opened_page, HOVER.replace("CHART", "loss"), width=width)
    second = [
        ["epoch 2", "training", "validation"],
        ["whole", "0.5598", "0.2657"],
        ["cut", "0.5598", "0.2657"],
        ["<b>&amp;", "NaN", ""],
    ]
    assert seen["before"] is seen["left"] is seen["escaped"] is None
    assert seen["second"] == {"texts": second, "inside": True}
    assert seen["last"] == {
        "texts": [
            ["epoch 4", "training", "validation"],
            ["whole", "0.2143", "0.1897"],
            ["<b>&amp;", "1.5", ""],
        ],
        "inside": True,
    }
    assert seen["right"][0][0] == "epoch 1"
    assert seen["next"] == second


LOOK = """(() => {
  const style = (selector) => getComputedStyle(document.querySelector(selector));
  const all = (selector) => [...document.querySelectorAll(selector)];
  const probe = document.body.appendChild(document.createElement("i"));
  const colour = (text) => { probe.style.color = text; return getComputedStyle(probe).color; };
  const zoom = (svg) => svg ? svg.clientWidth / svg.viewBox.baseVal.width : 1;
  const size = (each) => parseFloat(getComputedStyle(each).fontSize) * zoom(each.ownerSVGElement);
  const isOutside = (text) => {
    const own = text.getBoundingClientRect(), svg = text.ownerSVGElement.getBoundingClientRect();
    return own.left < svg.left - 1 || own.right > svg.right + 1;
  };
  const seen = {
    overflow: document.scrollingElement.scrollWidth - document.scrollingElement.clientWidth,
    columns: style("#charts").gridTemplateColumns.split(" ").length,
    paper: style("body").backgroundColor, panel: style("figure").backgroundColor,
    texts: [
      ...["body", ".hint", ".notes"].map((each) => style(each).color), style("svg text").fill],
    runs: [...Array(8).keys()].map((run) => colour(`var(--run-${run})`)),
    smallest: Math.min(...all("svg text, td, th, button, label").map(size)),
    outside: all("figure svg text").filter(isOutside).map((text) => text.textContent),
  };
  probe.remove();
  return seen;
})()"""


def contrast(first: str, second: str) -> float:
    """Of two opaque colours of CSS, as WCAG 2 defines it: 1 to 21."""

    def luminance(colour: str) -> float:
        shares = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [
            share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4
            for share in shares
        ]
        return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))

    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1300])
def test_readable_in_light_and_dark_wide_and_narrow(
    opened_page: Path, scheme: str, width: int
) -> None:
    seen = in_browser(opened_page, LOOK, width=width, scheme=scheme)
    assert seen["overflow"] == 0  # tables scroll by themselves
    assert seen["outside"] == []
    assert seen["columns"] == (1 if width == 400 else 2)
    assert seen["smallest"] >= 12
    black_or_white = "rgb(0, 0, 0)" if scheme == "dark" else "rgb(255, 255, 255)"
    assert contrast(seen["paper"], black_or_white) < 1.25
    for background in (seen["paper"], seen["panel"]):
        assert all(contrast(text, background) >= 4.5 for text in seen["texts"])
        assert all(contrast(run, background) >= 3 for run in seen["runs"])


UNUSUAL = """(() => {
  const figures = [...document.querySelectorAll("figure")];
  for (const box of document.querySelectorAll("input")) box.click();  // the other scale too
  for (const svg of document.querySelectorAll(".plot > svg")) {
    svg.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight", bubbles: true}));
  }
  return {
    titles: figures.map((figure) => figure.querySelector("figcaption span").textContent),
    wrong: figures.filter((figure) => /NaN|Infinity|undefined/.test(
      figure.querySelector("svg").outerHTML)).length,
    paths: [...document.querySelectorAll("[data-chart=loss] g")].map((group) => group.innerHTML),
    noises: document.querySelectorAll("[data-chart=constructor] g").length,
    first: document.querySelector("tbody th").textContent,
  };
})()"""


@pytest.mark.parametrize(
    ("history", "titles"),
    [
        (None, ["Learning rate"]),
        ("epoch,loss\n0,0.0\n", ["Loss", "Learning rate"]),  # no place on a log scale
        ("epoch,loss\n0,2.0\n7,2.0\n", ["Loss", "Learning rate"]),
        ("epoch,loss\n0,1e308\n1,-1e308\n2,5e-324\n", ["Loss", "Learning rate"]),
        ("epoch,loss\n0,nan\n1,inf\n2,-inf\n", ["Loss", "Learning rate"]),
        ("epoch,loss,constructor\n0,3.0,4\n", ["Loss", "Learning rate", "constructor"]),
    ],
)
def test_unusual_histories(tmp_path: Path, history: str | None, titles: list[str]) -> None:
    runs = read_runs(
        [make_run(tmp_path / "odd", history=history), make_run(tmp_path / "new", history=None)]
    )
    page = tmp_path / "page.html"
    page.write_text(pages.page(runs), encoding="utf-8")
    seen = in_browser(page, UNUSUAL)
    assert seen["titles"] == titles
    assert seen["wrong"] == 0
    assert seen["first"] == "odd"
    assert len(seen["paths"]) == titles.count("Loss")
    assert all(seen["paths"])  # a curve, a point or a cross
    assert seen["noises"] == titles.count("constructor")  # none of the run without such a column
