"""The page of a report: tables, and curves that its own small script draws.

All data of the page is one block of JSON, with the very numbers of history.csv; `_report_page.js`
draws them, `_report_page.css` gives light and dark. The page's own policy forbids it the network.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _report_history import Values
from _report_runs import Run, printable
from _report_tables import TEXT_COLUMNS, differences, overview

import tf_largebatch as tlb

_RAMP_POINTS = 33  # of a warmup, which is a curve on a logarithmic scale
_TITLES = {
    "accuracy": "Accuracy",
    "loss": "Loss",
    "learning_rate": "Learning rate",
    "images_per_second": "Images per second",
}
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<header><h1>{title}</h1></header>
<main>
<section><h2>Results</h2>
{overview}
<p class="hint">Accuracy, loss: of the last epoch; best: with its epoch; images/s: the median of
the epochs without the first.</p>
{notes}</section>
<section><h2>Curves</h2>
<noscript><p>The curves need JavaScript, which is off here.</p></noscript>
<div id="legend" role="group" aria-label="Curves that are shown"></div>
<div id="charts"></div>
</section>
<section><h2>What differs</h2>
{differences}</section>
</main>
<footer>Made by tools/report_runs.py of tf_largebatch {version}.</footer>
<script type="application/json" id="data">{data}</script>
<script>
{script}</script>
</body>
</html>
"""


def page(runs: Sequence[Run]) -> str:
    """The whole page, one file without anything from elsewhere."""
    folder = Path(__file__).parent
    rows = [overview(run) for run in runs]
    return _PAGE.format(
        policy=_POLICY,
        title="A training run" if len(runs) == 1 else f"{len(runs)} training runs",
        style=(folder / "_report_page.css").read_text(encoding="utf-8"),
        script=(folder / "_report_page.js").read_text(encoding="utf-8"),
        overview=_overview_table(rows),
        notes=_notes(runs),
        differences=_differences_table(runs, [row["run"] for row in rows]),
        version=html.escape(tlb.__version__),
        data=_json(page_data(runs)),
    )


def page_data(runs: Sequence[Run]) -> dict[str, Any]:
    """What the script draws. A NaN or an infinity, which JSON has not, is a text."""
    return {
        "runs": [
            {
                "label": run.label,
                "epochs": run.history.epochs,
                "columns": {
                    printable(name): _storable(values)
                    for name, values in run.history.columns.items()
                },
                "recipe": recipe_curve(run.recipe),
            }
            for run in runs
        ],
        "charts": _charts(printable(name) for run in runs for name in run.history.columns),
    }


def recipe_curve(recipe: tlb.Recipe) -> list[tuple[float, float]]:
    """(epochs after the update, its rate), at the corners of the curve and within the ramp.

    Between them the rate changes evenly, so no update is off the line.
    """
    last = recipe.total_steps - 1
    corners = {0, last, recipe.warmup_steps - 1, recipe.warmup_steps}
    for step in recipe.decay_steps:
        corners |= {step - 1, step}
    ramp = np.linspace(0, recipe.warmup_steps, _RAMP_POINTS).round().astype(int)
    steps = sorted(step for step in corners | set(ramp.tolist()) if 0 <= step <= last)
    rates = recipe.learning_rate_at(np.array(steps)).tolist()
    return [
        ((step + 1) / recipe.steps_per_epoch, rate) for step, rate in zip(steps, rates, strict=True)
    ]


def _storable(values: Values) -> list[float | str | None]:
    names = {math.inf: "Infinity", -math.inf: "-Infinity"}
    return [
        value if value is None or math.isfinite(value) else names.get(value, "NaN")
        for value in values
    ]


def _charts(columns: Iterable[str]) -> list[dict[str, Any]]:
    """One for each quantity, with its column of training, of validation, or both."""
    known = set(columns)
    quantities = {name.removeprefix("val_") for name in known} | {"learning_rate"}
    first = [name for name in _TITLES if name in quantities]
    return [
        {
            "title": _TITLES.get(name, name),
            "training": name if name in known else None,
            "validation": f"val_{name}" if f"val_{name}" in known else None,
            "percent": name.endswith("accuracy"),
            "logarithmic": name.endswith("loss"),
            "from_zero": name in ("learning_rate", "images_per_second"),
            "recipe": name == "learning_rate",
        }
        for name in (*first, *sorted(quantities - set(first)))
    ]


def _json(data: Any) -> str:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _overview_table(rows: Sequence[dict[str, str]]) -> str:
    head = "".join(f'<th scope="col"{_side(name)}>{html.escape(name)}</th>' for name in rows[0])
    lines = []
    for number, row in enumerate(rows):
        run, *others = row.items()
        cells = "".join(
            f'<td data-heading="{html.escape(name)}"{_side(name)}>{html.escape(text)}</td>'
            for name, text in others
        )
        name = f'<i class="swatch" data-run="{number}"></i>{html.escape(run[1])}'
        lines.append(f'<tr><th scope="row">{name}</th>{cells}</tr>')
    return (
        f'<div class="wide"><table class="overview"><thead><tr>{head}</tr></thead>\n'
        f"<tbody>{_lines(lines)}</tbody></table></div>"
    )


def _side(heading: str) -> str:
    return ' class="left"' if heading in TEXT_COLUMNS else ""


def _differences_table(runs: Sequence[Run], labels: Sequence[str]) -> str:
    differing = differences(runs)
    if not differing:
        return f"<p>{'All settings are the same.' if len(runs) > 1 else 'There is one run.'}</p>"
    head = "".join(f'<th scope="col">{html.escape(label)}</th>' for label in labels)
    lines = [
        f'<tr><th scope="row">{html.escape(name)}</th>'
        + "".join(f"<td>{html.escape(text)}</td>" for text in texts)
        + "</tr>"
        for name, texts in differing.items()
    ]
    return (
        f'<div class="wide"><table class="differences"><thead><tr><td></td>{head}</tr></thead>\n'
        f"<tbody>{_lines(lines)}</tbody></table></div>"
    )


def _notes(runs: Sequence[Run]) -> str:
    lines = [
        f"<li>{html.escape(f'{run.label}: {note}')}</li>" for run in runs for note in run.notes
    ]
    return f'<ul class="notes">{_lines(lines)}</ul>\n' if lines else ""


def _lines(lines: Iterable[str]) -> str:
    return "\n".join(lines)
