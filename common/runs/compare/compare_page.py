"""Build an HTML page that compares several runs in charts and in a table.

The page works without a network connection. page/compare.html is the Jinja2 template, and page/compare.css is the style
sheet. The scripts in page/ draw the curves, and sort and filter the table. This module does not import torch.
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
from markupsafe import Markup

from common.runs.compare import sampled_rows
from common.runs.compare.curve_styles import CurveStyle, choose_curve_style
from common.runs.compare.metric_curves import MAX_POINTS, Curve, Numbers, RunCurves
from common.runs.compare.metric_names import SPEED, MetricLabel, compute_metric_order, label_metric
from common.runs.compare.setting_labels import MISSING, format_setting_head
from common.system.text import format_count

PAGE_FOLDER = Path(__file__).parent / "page"
SCRIPTS = ("numbers.js", "curves.js", "drawing.js", "pointer.js", "selection.js", "table.js", "reload.js")
MARK = '<meta name="generator" content="make compare">'  # only files that contain this tag are overwritten
MIN_SMOOTHED_POINTS = 31  # curves with fewer points are drawn with dots, and are not smoothed
MAX_STEP_RATIO = 3  # if the numbers of steps differ by a larger factor, the charts show the part of the run
STEP_AXIS = 0
PART_OF_RUN_AXIS = 3
BAR_MAXIMA = {"accuracy": 1.0, "efficiency": 1.0, "waiting": 1.0, "test loss": None, "samples/s": None, "peak MB": None}
"""Value at which the bars of each column are full. None means the largest value in the column."""


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
class LoggedImage:
    """An image that a run has logged."""

    name: str
    step: int
    address: str
    """Relative URL of the file."""


@dataclass(frozen=True)
class ComparedRun:
    """The content that the page shows for one run, or for several runs that differ only in their seed."""

    key: str
    """Unique id of the run."""
    experiment: str
    short_id: str
    label: str
    """Short id of the run, and the settings that distinguish the run from other runs of the experiment."""
    state: str
    curves: RunCurves
    columns: dict[str, TableCell]
    """Table cells of the run by column title."""
    settings: dict[str, str]
    detail: str = ""
    """Why the run is not finished, or an empty string."""
    links: dict[str, str] = field(default_factory=dict)
    """Relative URLs by link text."""
    images: Sequence[LoggedImage] = ()
    run_count: int = 1
    """Number of runs that share the row and the curves."""
    end_symbol: str = ""
    """Symbol at the end of the curves: `circle` (active), `cross` (did not finish), or empty (finished)."""


@dataclass(frozen=True)
class DrawnRun:
    """A run with its number on the page and the style of its curves."""

    number: int
    run: ComparedRun
    style: CurveStyle

    @property
    def search_text(self) -> str:
        """Lowercase text that the filter of the page searches."""
        run = self.run
        settings = [f"{key}={text}" for key, text in run.settings.items()]
        texts = [run.experiment, run.label, run.key, run.state, *settings]
        return " ".join(texts).lower()


def sort_by_experiment(runs: Sequence[ComparedRun]) -> list[ComparedRun]:
    """Group the runs by experiment. Within an experiment, the original order is kept."""
    experiments = list(dict.fromkeys(run.experiment for run in runs))
    return sorted(runs, key=lambda run: experiments.index(run.experiment))


def round_numbers(numbers: Numbers, format_spec: str = ".5g") -> list[float | None]:
    """Round numbers to the precision that a screen can show.

    NaN and infinity are replaced by None.
    """
    return [float(format(number, format_spec)) if math.isfinite(number) else None for number in numbers.tolist()]


class CurveEncoder:
    """Converts curves to types that JSON supports, and stores the positions that several curves share only once."""

    def __init__(self) -> None:
        self.positions: list[list[list[float | None]]] = []
        """Steps, samples and seconds of the points of a curve."""
        self.indices: dict[bytes, int] = {}

    def encode(self, run_number: int, curve: Curve, factor: float) -> dict[str, Any]:
        """Encode a curve, whose values are multiplied by `factor`.

        Minima and maxima are included only if the points of the curve are means of several values.
        """
        index = self.indices.setdefault(curve.positions.tobytes(), len(self.positions))
        if index == len(self.positions):
            steps, samples, seconds = curve.positions.T
            formats = ((steps, ".12g"), (samples, ".12g"), (seconds, ".6g"))
            self.positions.append([round_numbers(numbers, format_spec) for numbers, format_spec in formats])
        content = {"run": run_number, "at": index, "y": round_numbers(factor * curve.value)}
        if curve.has_range:
            content |= {"low": round_numbers(factor * curve.low), "high": round_numbers(factor * curve.high)}
        return content


def build_charts(runs: Sequence[ComparedRun], encoder: CurveEncoder) -> dict[str, list[dict[str, Any]]]:
    """Return the charts in which at least one curve has several points, by the heading of their group.

    Metrics that have only single points are shown only in the table.
    """
    step_names: dict[str, None] = {}
    test_names: dict[str, None] = {}
    for run in runs:
        step_names |= dict.fromkeys(run.curves.steps)
        test_names |= dict.fromkeys(run.curves.tests)

    groups: dict[str, list[dict[str, Any]]] = {}
    for names, is_evaluation in ((step_names, False), (test_names, True)):
        for name in sorted(names, key=compute_metric_order):
            label = label_metric(name, is_evaluation)
            curves = [(run.curves.tests if is_evaluation else run.curves.steps).get(name) for run in runs]
            point_count = max(len(curve) for curve in curves if curve is not None)
            if point_count > 1:
                chart = make_chart(label, curves, encoder)
                is_noisy = not is_evaluation and name != "learning_rate"
                chart["may_smooth"] = is_noisy and point_count >= MIN_SMOOTHED_POINTS
                chart["may_log"] = "loss" in name
                groups.setdefault(label.group, []).append(chart)
    if SPEED in groups:
        groups[SPEED] = groups.pop(SPEED)  # the last group
    return groups


def make_chart(label: MetricLabel, curves: Sequence[Curve | None], encoder: CurveEncoder) -> dict[str, Any]:
    """Return a chart of a metric. The position of a curve in `curves` is the number of its run."""
    encoded = []
    for number, curve in enumerate(curves):
        if curve is not None:
            encoded.append(encoder.encode(number, curve, label.factor))
    return {"title": label.title, "unit": label.unit, "curves": encoded}


def choose_axis(runs: Sequence[ComparedRun]) -> int:
    """Return the horizontal axis that the charts show at first.

    The axis is the part of the run if the numbers of steps of finished runs differ by more than MAX_STEP_RATIO.
    """
    last_steps = [run.curves.last_step for run in runs if run.state == "finished" and run.curves.last_step]
    is_relative = bool(last_steps) and max(last_steps) > MAX_STEP_RATIO * min(last_steps)
    return PART_OF_RUN_AXIS if is_relative else STEP_AXIS


def make_title(runs: Sequence[ComparedRun]) -> str:
    """Return the title of the page."""
    count = sum(run.run_count for run in runs)
    groups = f" in {format_count(len(runs), 'group')}" if count > len(runs) else ""
    return f"{format_count(count, 'run')}{groups} compared"


def list_image_names(runs: Sequence[ComparedRun]) -> list[str]:
    """Return the names of the images of all runs."""
    names: dict[str, None] = {}
    for run in runs:
        names |= dict.fromkeys(image.name for image in run.images)
    return list(names)


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


def render_page(
    runs: Sequence[ComparedRun],
    label_settings: Sequence[str],
    other_settings: Sequence[str],
    experiment_settings: Sequence[str],
    reload_seconds: float = 0,
) -> str:
    """Return the comparison page as HTML.

    The table shows `label_settings` before the results, and `other_settings` after them. `experiment_settings` are the
    settings that differ only between experiments. With `reload_seconds`, the page reloads itself in this interval.
    """
    runs = sort_by_experiment(runs)
    drawn_runs = [DrawnRun(number, run, choose_curve_style(number)) for number, run in enumerate(runs)]
    groups: dict[str, list[DrawnRun]] = {}
    for drawn_run in drawn_runs:
        groups.setdefault(drawn_run.run.experiment, []).append(drawn_run)

    encoder = CurveEncoder()
    chart_groups = build_charts(runs, encoder)
    drawn_data = []
    for drawn_run in drawn_runs:
        run = drawn_run.run
        name = f"{run.experiment} {run.label}" if len(groups) > 1 else run.label
        content = {"name": name, "key": run.key, "state": run.state, "end_symbol": run.end_symbol}
        drawn_data.append(content | vars(drawn_run.style))
    charts = [chart for group in chart_groups.values() for chart in group]
    data = {"runs": drawn_data, "charts": charts, "positions": encoder.positions, "reload": reload_seconds}

    script = "\n".join((PAGE_FOLDER / name).read_text() for name in SCRIPTS)
    return (
        make_environment()
        .get_template("compare.html")
        .render(
            mark=MARK,
            title=make_title(runs),
            script=script,
            script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
            style=(PAGE_FOLDER / "compare.css").read_text(),
            created=time.strftime("%Y-%m-%d %H:%M:%S"),
            max_points=MAX_POINTS,
            complete_mb=sampled_rows.MAX_COMPLETE_BYTES >> 20,
            drawn_runs=drawn_runs,
            groups=groups,
            axis=choose_axis(runs),
            chart_groups=chart_groups,
            data=data,
            image_names=list_image_names(runs),
            columns=list_columns(runs),
            bar_maxima=compute_bar_maxima(runs),
            label_settings=label_settings,
            other_settings=other_settings,
            format_setting_head=format_setting_head,
            experiment_settings=experiment_settings,
            missing_cell=TableCell(MISSING),
            make_setting_cell=make_setting_cell,
        )
    )
