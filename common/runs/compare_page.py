"""One page for a browser with curves and a table of several runs. It asks no network. Imports no torch.

compare_page.html is its frame, compare_page.css its look, compare_page.js draws the curves, sorts and filters.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from common.runs.metric_curves import POINTS, Curve, Numbers, RunCurves
from common.runs.setting_labels import MISSING

HERE = Path(__file__).parent
MARK = '<meta name="generator" content="make compare">'  # only a file with it is overwritten
DISTINCT = (
    *("#2a78d6", "#e07b1a", "#2f9e44", "#d6336c", "#7b56c4"),
    *("#8a6d3b", "#c2a000", "#0f9aa8", "#c92a2a", "#6b7684"),
)  # for light pages; on dark ones the style sheet makes them lighter
DASH = {"finished": "", "running": "2 3", "pending": "2 3"}  # of a line; everything else ended early
EARLY = "7 4"


@dataclass(frozen=True)
class Cell:
    """One number of a run in the table."""

    text: str
    value: float | None = None
    """What it is sorted by; None where there is none, or where it is a word."""


@dataclass(frozen=True)
class ComparedRun:
    """One run as the page shows it."""

    key: str
    """What tells it from all others: its id."""
    experiment: str
    label: str
    """Short, and different from those of the experiment's other runs."""
    state: str
    curves: RunCurves
    columns: dict[str, Cell]
    """Head and content of its cells in the table."""
    settings: dict[str, str]
    detail: str = ""
    """Why it is not finished."""
    links: dict[str, str] = field(default_factory=dict)
    """Words and relative addresses."""


BARS = {"accuracy": 1.0, "efficiency": 1.0, "waiting": 1.0, "test loss": None, "samples/s": None, "peak MB": None}
"""Columns whose cells hold a bar, with the value of a full one; None: the largest in the column."""


def choose_colours(count: int) -> list[str]:
    """Return `count` colours, distinct as far as there are so many; neighbours differ most, by the golden angle."""
    if count <= len(DISTINCT):
        return list(DISTINCT[:count])
    return [f"oklch({0.5 + 0.08 * (i % 3):.2f} 0.14 {137.508 * i % 360:.1f})" for i in range(count)]


def group_runs(runs: Iterable[ComparedRun]) -> dict[str, list[ComparedRun]]:
    """Return the runs of each experiment, in the order in which they come."""
    found: dict[str, list[ComparedRun]] = {}
    for run in runs:
        found.setdefault(run.experiment, []).append(run)
    return found


def round_numbers(values: Numbers, shown: str = ".5g") -> list[float | None]:
    """Return numbers with as many digits as a screen can show; None for what is no number."""
    return [float(format(value, shown)) if math.isfinite(value) else None for value in values.tolist()]


def encode_curve(run: int, curve: Curve) -> dict[str, Any]:
    """Return a curve of the run of this number as JSON; without lowest and highest where it is not thinned."""
    at = [round_numbers(curve.at[:, axis], ".12g" if axis < 2 else ".6g") for axis in range(3)]
    found = {"run": run, "at": at, "y": round_numbers(curve.value)}
    if not np.array_equal(curve.low, curve.high, equal_nan=True):
        found |= {"low": round_numbers(curve.low), "high": round_numbers(curve.high)}
    return found


def build_charts(runs: Sequence[ComparedRun]) -> list[dict[str, Any]]:
    """Return the charts that have curves; what has one point in each run stands in the table alone."""

    def make_chart(title: str, kind: str, curves: Sequence[Curve | None], **more: bool) -> dict[str, Any]:
        found = [encode_curve(i, curve) for i, curve in enumerate(curves) if curve is not None and len(curve)]
        return {"title": title, "kind": kind, "curves": found} | more

    first = ["test_accuracy", "test_loss"]
    every = dict.fromkeys(name for run in runs for name in run.curves.tests)
    tests = [name for name in first if name in every] + [name for name in every if name not in first]
    found = [make_chart("training loss", "number", [run.curves.loss for run in runs], may_smooth=True, may_log=True)]
    for name in tests:
        kind, own = "percent" if "accuracy" in name else "number", [run.curves.tests.get(name) for run in runs]
        found.append(make_chart(name.replace("_", " "), kind, own, may_smooth=False, may_log="loss" in name))
    found.append(make_chart("samples/s", "number", [run.curves.speed for run in runs], may_smooth=True, may_log=False))
    return [one for one in found if any(len(curve["y"]) > 1 for curve in one["curves"])]


def format_cell(cell: Cell, full: float | None = None) -> str:
    """Return a table cell as HTML, with a bar in it where `full`, the value of a full bar, is given."""
    value, bar = "", ""
    if cell.value is not None and math.isfinite(cell.value):
        value = f' data-value="{cell.value!r}"'
        if full:
            bar = f' class="bar" style="--share:{min(1.0, max(0.0, cell.value / full)):.3f}"'
    return f"<td{value}{bar}>{html.escape(cell.text)}</td>"


def format_table_head(words: Sequence[str]) -> str:
    """Return a table's head as HTML; its words are buttons that sort."""
    cells = (f'<th scope="col"><button>{html.escape(word)}</button></th>' for word in words)
    return f"<thead><tr>{''.join(cells)}</tr></thead>"


def make_setting_cell(text: str) -> Cell:
    """A cell of a setting, sorted as a number where it is one."""
    try:
        return Cell(text, float(text))
    except ValueError:
        return Cell(text)


def format_name(run: ComparedRun) -> str:
    """A run's label as HTML, and its state unless it is finished. Lines break between settings, else within names."""
    words = (re.sub("(?<=[=_.:/,])", "<wbr>", html.escape(word)) for word in run.label.split(" "))
    label = " ".join(f'<span class="name">{word}</span>' for word in words)
    state = "" if run.state == "finished" else f" <small>{html.escape(run.state)}</small>"
    return label + state


def format_run(number: int, run: ComparedRun, colour: str, cells: Iterable[str]) -> str:
    """Return a run's row of the table as HTML."""
    words = [run.experiment, run.label, run.key, run.state, *(f"{key}={text}" for key, text in run.settings.items())]
    links = " ".join(f'<a href="{html.escape(to)}">{html.escape(word)}</a>' for word, to in run.links.items())
    state = f'<span class="state {html.escape(run.state)}">{html.escape(run.state)}</span>'
    detail = f"<small>{html.escape(run.detail)}</small>" if run.detail else ""
    return (
        f'<tr class="run" data-run="{number}" data-words="{html.escape(" ".join(words).lower())}" style="--c:{colour}">'
        f'<th scope="row" title="{html.escape(run.key)}"><span class="mark"></span>{format_name(run)}</th>'
        f'{"".join(cells)}<td class="end">{state}{detail}</td><td>{links}</td></tr>'
    )


def format_runs_table(runs: Sequence[ComparedRun], colours: Sequence[str], settings: Sequence[str]) -> str:
    """Return the table as HTML: settings, results and files of each run, experiment by experiment."""
    names = dict.fromkeys(name for run in runs for name, cell in run.columns.items() if cell.text != MISSING)
    most = {
        name: max((run.columns[name].value or 0 for run in runs if name in run.columns), default=0) for name in names
    }
    full = {name: BARS[name] or most[name] for name in names if name in BARS}
    lines = [format_table_head(["run", *names, *settings, "state", "files"])]
    number = 0
    for experiment, own in group_runs(runs).items():
        lines.append("<tbody>")
        if len(group_runs(runs)) > 1:
            span = len(settings) + len(names) + 3
            head = f'<th scope="rowgroup" colspan="{span}"><span>{html.escape(experiment)}</span></th>'
            lines.append(f'<tr class="group">{head}</tr>')
        for run in own:
            cells = [format_cell(run.columns.get(name, Cell(MISSING)), full.get(name)) for name in names]
            cells += [format_cell(make_setting_cell(run.settings.get(key, MISSING))) for key in settings]
            lines.append(format_run(number, run, colours[number], cells))
            number += 1
        lines.append("</tbody>")
    longest = min(34, max(len(run.label) for run in runs))
    return f'<table id="results" style="--label:{longest}">{"".join(lines)}</table>'


def format_experiments_table(runs: Sequence[ComparedRun], settings: Sequence[str]) -> str:
    """Return the settings that differ between experiments only, as HTML: a column for each experiment."""
    groups = group_runs(runs)
    if len(groups) < 2 or not settings:
        return ""
    lines = [format_table_head(["setting", *groups]), "<tbody>"]
    for key in settings:
        cells = "".join(format_cell(make_setting_cell(own[0].settings.get(key, MISSING))) for own in groups.values())
        lines.append(f'<tr><th scope="row">{html.escape(key)}</th>{cells}</tr>')
    head = "<summary>Settings that differ between experiments alone</summary>"
    return f'<details>{head}<div class="wide"><table>{"".join(lines)}</tbody></table></div></details>'


def format_legend(runs: Sequence[ComparedRun], colours: Sequence[str]) -> str:
    """Return the legend of all charts as HTML: a switch for each run, under one for each experiment."""
    lines, number, groups = [], 0, group_runs(runs)
    for experiment, own in groups.items():
        lines.append('<fieldset class="kind">')
        name = html.escape(experiment)
        lines.append(f'<legend><label><input type="checkbox" class="all" checked>{name}</label></legend>')
        for run in own:
            line = f'<path d="M0 4H22" class="line" stroke-dasharray="{choose_line_style(run)}"/>'
            lines += [
                f'<label class="run" data-run="{number}" style="--c:{colours[number]}" title="{html.escape(run.key)}">',
                f'<input type="checkbox" checked><svg width="22" height="8">{line}</svg>',
                f"<span>{format_name(run)}</span></label>",
            ]
            number += 1
        lines.append("</fieldset>")
    return "".join(lines)


def choose_line_style(run: ComparedRun) -> str:
    """The dashes of a run's line, by its state."""
    return DASH.get(run.state, EARLY)


def render_page(given: Sequence[ComparedRun], within: Sequence[str], between: Sequence[str]) -> str:
    """Return the whole page as HTML.

    `within` are the settings that differ within an experiment, the most telling first, `between` those that only differ
    between experiments.
    """
    groups = group_runs(given)
    runs = [run for own in groups.values() for run in own]
    colours = choose_colours(len(runs))
    charts = build_charts(runs)
    names = [f"{run.experiment} {run.label}" if len(groups) > 1 else run.label for run in runs]
    drawn = [
        {"name": n, "colour": c, "dash": choose_line_style(r)} for n, c, r in zip(names, colours, runs, strict=True)
    ]
    frames = "".join(
        f'<figure><h3>{html.escape(one["title"])}</h3><div class="chart"></div></figure>' for one in charts
    )
    script = (HERE / "compare_page.js").read_text()
    parts = {
        "mark": MARK,
        "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "title": f"{len(runs)} run{'s' if len(runs) > 1 else ''} compared",
        "made": time.strftime("%Y-%m-%d %H:%M:%S"),
        "points": str(POINTS),
        "style": (HERE / "compare_page.css").read_text(),
        "charts": frames or '<p class="note">No run has a curve to draw yet.</p>',
        "legend": format_legend(runs, colours),
        "table": format_runs_table(runs, colours, within),
        "more": format_experiments_table(runs, between),
        "data": json.dumps({"runs": drawn, "charts": charts}, separators=(",", ":")).replace("<", "\\u003c"),
        "script": script,
    }
    frame = (HERE / "compare_page.html").read_text()
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], frame)  # once: what is put in is not looked at
