"""Build an HTML page that compares several runs in charts and in a table.

The page works without a network connection. compare_page.html is the Jinja2 template, and compare_page.css is the style
sheet. compare_page.js draws the curves, and sorts and filters the table. This module does not import torch.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from common.runs.compare.metric_curves import MAX_POINTS, Curve, Numbers, RunCurves
from common.runs.compare.setting_labels import MISSING

PAGE_FOLDER = Path(__file__).parent
MARK = '<meta name="generator" content="make compare">'  # only files that contain this tag are overwritten
DISTINCT_COLOURS = (
    *("#2a78d6", "#e07b1a", "#2f9e44", "#d6336c", "#7b56c4"),
    *("#8a6d3b", "#c2a000", "#0f9aa8", "#c92a2a", "#6b7684"),
)  # for light pages; the style sheet lightens these colors on dark pages
LINE_DASHES = {"finished": "", "running": "2 3", "pending": "2 3"}
UNFINISHED_DASHES = "7 4"  # dash pattern for runs that failed or were stopped
FIRST_TESTS = ("test_accuracy", "test_loss")  # the evaluation metrics that are shown first
MAX_LABEL_WIDTH = 34  # maximum width of a label in characters


@dataclass(frozen=True)
class TableCell:
    """A cell in the table row of a run."""

    text: str
    value: float | None = None
    """Number that is used to sort the table, or None if the cell contains text."""

    @property
    def has_number(self) -> bool:
        return self.value is not None and math.isfinite(self.value)


@dataclass(frozen=True)
class ComparedRun:
    """The content that the page shows for one run."""

    key: str
    """Unique id of the run."""
    experiment: str
    label: str
    """Short name of the run that is unique within the experiment."""
    state: str
    curves: RunCurves
    columns: dict[str, TableCell]
    """Table cells of the run by column title."""
    settings: dict[str, str]
    detail: str = ""
    """Why the run is not finished, or an empty string."""
    links: dict[str, str] = field(default_factory=dict)
    """Relative URLs by link text."""


@dataclass(frozen=True)
class DrawnRun:
    """A run with its number on the page and the color of its curves."""

    number: int
    run: ComparedRun
    colour: str

    @property
    def dash(self) -> str:
        """Dash pattern of the run's curves, in the format of the SVG attribute stroke-dasharray."""
        return LINE_DASHES.get(self.run.state, UNFINISHED_DASHES)

    @property
    def search_text(self) -> str:
        """Lowercase text that the filter of the page searches."""
        run = self.run
        settings = [f"{key}={text}" for key, text in run.settings.items()]
        texts = [run.experiment, run.label, run.key, run.state, *settings]
        return " ".join(texts).lower()


BAR_MAXIMA = {"accuracy": 1.0, "efficiency": 1.0, "waiting": 1.0, "test loss": None, "samples/s": None, "peak MB": None}
"""Value at which the bars of each column are full. None means the largest value in the column."""


def choose_curve_colors(count: int) -> list[str]:
    """Return `count` distinct colors.

    If there are more than ten colors, their hues are spaced by the golden angle to keep adjacent colors distinct.
    """
    if count <= len(DISTINCT_COLOURS):
        return list(DISTINCT_COLOURS[:count])
    return [f"oklch({0.5 + 0.08 * (i % 3):.2f} 0.14 {137.508 * i % 360:.1f})" for i in range(count)]


def sort_by_experiment(runs: Sequence[ComparedRun]) -> list[ComparedRun]:
    """Group the runs by experiment. Within an experiment, the original order is kept."""
    experiments = list(dict.fromkeys(run.experiment for run in runs))
    return sorted(runs, key=lambda run: experiments.index(run.experiment))


def round_numbers(numbers: Numbers, format_spec: str = ".5g") -> list[float | None]:
    """Round numbers to the precision that a screen can show.

    NaN and infinity are replaced by None.
    """
    return [float(format(number, format_spec)) if math.isfinite(number) else None for number in numbers.tolist()]


def encode_curve(run_number: int, curve: Curve) -> dict[str, Any]:
    """Convert a curve to types that JSON supports.

    Minima and maxima are included only if the points of the curve are means of several steps.
    """
    steps, samples, seconds = curve.positions.T
    positions = [round_numbers(steps, ".12g"), round_numbers(samples, ".12g"), round_numbers(seconds, ".6g")]
    content = {"run": run_number, "positions": positions, "y": round_numbers(curve.value)}
    if not np.array_equal(curve.low, curve.high, equal_nan=True):
        content |= {"low": round_numbers(curve.low), "high": round_numbers(curve.high)}
    return content


def build_charts(runs: Sequence[ComparedRun]) -> list[dict[str, Any]]:
    """Return the charts in which at least one curve has several points.

    Metrics that have only single points are shown only in the table.
    """
    charts: list[dict[str, Any]] = []

    def add_chart(title: str, curves: Sequence[Curve | None], *, may_smooth: bool, may_log: bool) -> None:
        encoded = [encode_curve(i, curve) for i, curve in enumerate(curves) if curve is not None and len(curve)]
        if any(len(curve["y"]) > 1 for curve in encoded):
            kind = "percent" if "accuracy" in title else "number"
            chart = {"title": title, "kind": kind, "curves": encoded, "may_smooth": may_smooth, "may_log": may_log}
            charts.append(chart)

    test_names: dict[str, None] = {}
    for run in runs:
        test_names |= dict.fromkeys(run.curves.tests)
    add_chart("training loss", [run.curves.loss for run in runs], may_smooth=True, may_log=True)
    for name in sorted(test_names, key=lambda name: FIRST_TESTS.index(name) if name in FIRST_TESTS else 2):
        curves = [run.curves.tests.get(name) for run in runs]
        add_chart(name.replace("_", " "), curves, may_smooth=False, may_log="loss" in name)
    add_chart("samples/s", [run.curves.speed for run in runs], may_smooth=True, may_log=False)
    return charts


def make_setting_cell(run: ComparedRun, key: str) -> TableCell:
    """Return the table cell of a setting. A numeric setting gets a number, by which the table sorts it."""
    text = run.settings.get(key, MISSING)
    try:
        return TableCell(text, float(text))
    except ValueError:
        return TableCell(text)


def list_columns(runs: Sequence[ComparedRun]) -> list[str]:
    """Return the titles of the columns in which at least one run has a value."""
    titles: dict[str, None] = {}
    for run in runs:
        titles |= dict.fromkeys(title for title, cell in run.columns.items() if cell.text != MISSING)
    return list(titles)


def compute_bar_maxima(runs: Sequence[ComparedRun]) -> dict[str, float]:
    """Return the value at which the bars of each column are full."""
    maxima: dict[str, float] = {}
    for title, maximum in BAR_MAXIMA.items():
        numbers = [run.columns[title].value or 0 for run in runs if title in run.columns]
        maxima[title] = maximum or max(numbers, default=0)
    return maxima


def allow_line_breaks(text: str) -> Markup:
    """Return text as HTML that allows line breaks after punctuation, for example in setting names."""
    return Markup("<wbr>").join(re.split("(?<=[=_.:/,])", text))


def make_environment() -> jinja2.Environment:
    """Return the Jinja2 environment for the template.

    The environment escapes every value that is not marked as safe.
    """
    loader = jinja2.FileSystemLoader(PAGE_FOLDER)
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["break_lines"] = allow_line_breaks
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment


def render_page(runs: Sequence[ComparedRun], settings: Sequence[str], experiment_settings: Sequence[str]) -> str:
    """Return the comparison page as HTML.

    `settings` are the settings that differ within an experiment, with the most distinctive setting first.
    `experiment_settings` are the settings that differ only between experiments.
    """
    runs = sort_by_experiment(runs)
    colours = choose_curve_colors(len(runs))
    drawn_runs = [DrawnRun(number, run, colours[number]) for number, run in enumerate(runs)]
    groups: dict[str, list[DrawnRun]] = {}
    for drawn_run in drawn_runs:
        groups.setdefault(drawn_run.run.experiment, []).append(drawn_run)

    curve_styles = []
    for drawn_run in drawn_runs:
        run = drawn_run.run
        name = f"{run.experiment} {run.label}" if len(groups) > 1 else run.label
        curve_styles.append({"name": name, "colour": drawn_run.colour, "dash": drawn_run.dash})

    script = (PAGE_FOLDER / "compare_page.js").read_text()
    return (
        make_environment()
        .get_template("compare_page.html")
        .render(
            mark=MARK,
            script=script,
            script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
            style=(PAGE_FOLDER / "compare_page.css").read_text(),
            created=time.strftime("%Y-%m-%d %H:%M:%S"),
            max_points=MAX_POINTS,
            drawn_runs=drawn_runs,
            groups=groups,
            charts=build_charts(runs),
            curve_styles=curve_styles,
            columns=list_columns(runs),
            bar_maxima=compute_bar_maxima(runs),
            label_width=min(MAX_LABEL_WIDTH, max(len(run.label) for run in runs)),
            settings=list(settings),
            experiment_settings=experiment_settings,
            missing_cell=TableCell(MISSING),
            make_setting_cell=make_setting_cell,
        )
    )
