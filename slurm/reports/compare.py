"""The `compare` command: compare runs in a terminal table and on an HTML page. Does not import torch.

The page is self-contained: it opens from disk without a network connection.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
import sys
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import quote

from common.runs import result as results
from common.runs.compare import compare_page as pages
from common.runs.compare import metric_curves, setting_labels
from common.runs.compare.compare_page import ComparedRun, TableCell
from common.runs.compare.compare_table import Column, choose_columns, get_terminal_width, join_columns, shorten_text
from common.runs.folder import RunFolder, convert_disk_errors, read_json, write_atomic
from common.system.errors import UserError
from slurm.arguments import parse_zero_or_one
from slurm.reports import selection, status
from slurm.reports.logs import find_rank_0_log
from slurm.reports.selection import RunFilter
from slurm.reports.status import Status

MAX_LOG_LINKS = 4  # number of rank logs that are linked individually
MAX_LABEL_SETTINGS = 3


@dataclasses.dataclass
class RunFacts:
    """The data of one run that the table and the page show."""

    folder: RunFolder
    status: Status
    settings: dict[str, str]
    result: results.Result
    world: dict[str, Any]
    curves: metric_curves.RunCurves
    label_settings: list[str] = dataclasses.field(default_factory=list)
    """Keys of up to MAX_LABEL_SETTINGS settings that distinguish the run from others of the same experiment."""
    label: str = ""

    @classmethod
    def from_folder(cls, folder: RunFolder) -> RunFacts:
        """Read the data of a run from its folder."""
        attempts = folder.trace_attempts()
        world = read_json(attempts[0][0].attempt_folder / "world.json") if attempts else {}
        bounds = {bound for _, bound in attempts if bound is not None}
        return cls(
            folder,
            status.read_status(folder),
            selection.read_settings(folder),
            results.parse_result(folder.result),
            world,
            metric_curves.read_curves(folder.read_rows(), bounds),
        )

    @property
    def short_id(self) -> str:
        """The last part of the run id, which commands accept in place of the full id."""
        return self.folder.path.name.rpartition("-")[2]

    @property
    def is_incomplete(self) -> bool:
        """True if the run has not finished or its result cannot be read."""
        return self.status.state != "FINISHED" or bool(self.result.reason)

    def find_value(self, name: str) -> float | None:
        """Return a number from the result or, if the result lacks it, from the newest evaluation."""
        number = self.result.find_number(name)
        if number is None and name in self.curves.tests:
            return results.to_finite_number(self.curves.tests[name].value[-1])
        return number

    def to_dict(self) -> dict[str, Any]:
        """Return the run's value for each table column, or None for a missing value."""
        columns = {
            "run": self.status.run,
            "label": self.label,
            "experiment": self.folder.experiment,
            "state": self.status.state.lower(),
            "detail": self.status.detail,
            "restarts": self.status.restarts,
            "processes": self.world.get("processes"),
            "step": self.status.step,
            "loss": find_last_number(self.curves.loss),
            "test_loss": self.find_value("test_loss"),
            "test_accuracy": self.find_value("test_accuracy"),
            "samples_per_second": self.status.samples_per_second or None,
            "efficiency": self.find_value("efficiency"),
            "waiting": self.result.compute_waiting_share(),
            "memory_mb": self.result.find_peak_mb(),
            "split_at": self.result.format_partition(),
            "shards": self.result.format_shards(),
        }
        for name in ("ranks_lost", "seconds_lost", "steps_redone"):
            columns[name] = self.find_value(name)
        return columns


def find_last_number(curve: metric_curves.Curve) -> float | None:
    """Return the last value of a curve, or None if the curve is empty or the value is not finite."""
    return float(curve.value[-1]) if len(curve) and math.isfinite(curve.value[-1]) else None


def group_by_experiment(runs: list[RunFacts]) -> dict[str, list[RunFacts]]:
    """Group runs by the name of their experiment."""
    groups: dict[str, list[RunFacts]] = {}
    for run in runs:
        groups.setdefault(run.folder.experiment, []).append(run)
    return groups


def format_setting(run: RunFacts, key: str) -> str:
    """Return the value of a setting, shortened to fit a table cell."""
    return shorten_text(run.settings.get(key, setting_labels.MISSING))


def label_runs(runs: list[RunFacts]) -> None:
    """Set the label of each run.

    A label consists of the short id and the settings that distinguish the run from others of the same experiment.
    """
    for group in group_by_experiment(runs).values():
        settings = [run.settings for run in group]
        keys = setting_labels.choose_distinctive_settings(settings, MAX_LABEL_SETTINGS)
        short_keys = setting_labels.shorten_keys(keys, settings)
        for run in group:
            run.label_settings = keys
            run.label = run.short_id
            for key, short_key in zip(keys, short_keys, strict=True):
                run.label += f" {short_key}={format_setting(run, key)}"


def list_differences_within_experiments(runs: list[RunFacts]) -> list[str]:
    """List the settings that differ between runs of the same experiment.

    Settings that appear in labels come first.
    """
    groups = list(group_by_experiment(runs).values())

    in_labels: list[str] = []
    for position in range(MAX_LABEL_SETTINGS):
        for group in groups:
            in_labels += group[0].label_settings[position : position + 1]

    differing: list[str] = []
    for group in groups:
        differing += setting_labels.list_differing_settings([run.settings for run in group])
    differing.sort(key=setting_labels.compute_label_priority)

    return list(dict.fromkeys(in_labels + differing))  # removes duplicates and keeps the order


def load_runs(folders: list[RunFolder]) -> tuple[list[RunFacts], list[str]]:
    """Load and label the runs, and list the settings in which they differ."""
    runs = [RunFacts.from_folder(folder) for folder in folders]
    label_runs(runs)
    return runs, setting_labels.list_differing_settings([run.settings for run in runs])


COLUMN_FORMATS = {
    "test_accuracy": "{:.2%}",
    "samples_per_second": "{:,.0f}",
    "test_loss": "{:.4f}",
    "step": "{}",
    "efficiency": "{:.0%}",
    "waiting": "{:.0%}",
    "memory_mb": "{:,.0f}",
    "processes": "{}",
    "restarts": "{}",
    "split_at": "{}",
    "shards": "{}",
    "ranks_lost": "{:.0f}",
    "seconds_lost": "{:.2f}",
    "steps_redone": "{:.0f}",
}
"""Table columns, most informative first, and the format string for the values of each column."""
COLUMN_HEADS = {
    "samples_per_second": "samples/s",
    "test_accuracy": "accuracy",
    "processes": "ranks",
    "memory_mb": "peak MB",  # highest peak memory of any rank
}


def format_column_head(name: str) -> str:
    """Return the heading of a column."""
    return COLUMN_HEADS.get(name, name.replace("_", " "))


def format_column_value(row: dict[str, Any], name: str) -> str:
    """Return a run's value for one column as text."""
    return setting_labels.MISSING if row[name] is None else COLUMN_FORMATS[name].format(row[name])


def list_nonempty_columns(runs: list[RunFacts]) -> list[str]:
    """List the columns in which at least one run has a value.

    `restarts` is listed only if a run was restarted.
    """
    rows = [run.to_dict() for run in runs]
    names = []
    for name in COLUMN_FORMATS:
        values = [row[name] for row in rows if row[name] is not None]
        if any(values) if name == "restarts" else values:
            names.append(name)
    return names


def format_run_table(runs: list[RunFacts], width: int) -> str:
    """Return the table as text, grouped by experiment.

    A line about each incomplete run follows the table. If the columns do not fit into `width` characters, run ids are
    shortened. Columns that still do not fit are listed below the table.
    """
    groups = group_by_experiment(runs)
    runs = list(chain(*groups.values()))
    rows = [run.to_dict() for run in runs]
    keys = list_differences_within_experiments(runs)
    settings = []
    for key in keys:
        settings.append(Column(key, [format_setting(run, key) for run in runs]))
    label_count = len(set[str]().union(*(run.label_settings for run in runs)))

    columns = [Column("state", [row["state"] for row in rows], is_left_aligned=True)]
    columns += settings[:label_count]
    for name in list_nonempty_columns(runs):
        columns.append(Column(format_column_head(name), [format_column_value(row, name) for row in rows]))
    columns += settings[label_count:]

    for ids in ([run.status.run for run in runs], [run.short_id for run in runs]):
        visible = choose_columns([Column("run", ids, is_left_aligned=True), *columns], width)
        if len(visible) > len(columns):
            break
    head, *body = join_columns(visible)
    lines = [head]
    for experiment, group in groups.items():
        lines.append(f"{experiment}:")
        lines += [body.pop(0) for _ in group]

    hidden = [column.title for column in columns if column not in visible]
    if hidden:
        lines.append(f"columns not shown because the terminal is too narrow: {', '.join(hidden)}")
    for run in runs:
        if run.is_incomplete:
            lines.append(f"{run.status.run} {run.status.state}: {run.status.detail}".removesuffix(": "))
    return "\n".join(lines)


def hide_measurement_curves(runs: list[RunFacts]) -> list[str]:
    """Remove the curves of measurement-only runs if other runs train a model.

    A measurement-only run has a chart and a column for each of its many points, which training runs lack. Returns the
    experiments whose curves were removed.
    """
    measuring = [run for run in runs if not selection.trains_model(run.settings)]
    if len(measuring) == len(runs):
        return []
    for run in measuring:
        run.curves = dataclasses.replace(run.curves, tests={})
    return sorted({run.folder.experiment for run in measuring})


def make_compared_run(run: RunFacts, names: list[str], page_folder: Path) -> ComparedRun:
    """Build the data of a run for the page.

    The data contains the columns in `names` and links relative to `page_folder`.
    """
    row = run.to_dict()
    cells = {}
    for name in names:
        number = None if isinstance(row[name], str) else results.to_finite_number(row[name])
        cells[format_column_head(name)] = TableCell(format_column_value(row, name), number)
    for name, curve in run.curves.tests.items():
        if name not in COLUMN_FORMATS and len(curve):
            newest = float(curve.value[-1])
            cells[format_column_head(name)] = TableCell(f"{newest:.4g}", results.to_finite_number(newest))
    return ComparedRun(
        run.status.run,
        run.folder.experiment,
        run.label,
        run.status.state.lower(),
        run.curves,
        cells,
        run.settings,
        run.status.detail if run.is_incomplete else "",
        collect_run_links(run.folder, page_folder),
    )


def collect_run_links(folder: RunFolder, page_folder: Path) -> dict[str, str]:
    """Return the titles and addresses of links to the files of a run and to its W&B run.

    Addresses of files are relative to `page_folder`.
    """
    files = {"folder": folder.path, "settings": folder.path / "config.yaml", "result": folder.path / "result.json"}
    for attempt in folder.list_attempts()[-1:]:
        logs = sorted(attempt.attempt_folder.glob("logs/rank-*.log"), key=lambda path: int(path.stem.split("-")[1]))
        for log in logs[:MAX_LOG_LINKS]:
            files[f"log {log.stem.rpartition('-')[2]}"] = log
        if len(logs) > MAX_LOG_LINKS:
            files["all logs"] = attempt.attempt_folder / "logs"
        if (folder.path / "submit").exists():
            files["job"] = find_rank_0_log(folder)
    start = page_folder.absolute()
    links = {title: quote(os.path.relpath(path, start)) for title, path in files.items() if path.exists()}
    address = str(read_json(folder.path / "wandb" / "status.json").get("url"))
    if address.startswith("https://"):
        links["W&B"] = address
    return links


def write_page(page: Path, text: str) -> None:
    """Write the page. Raises UserError if this would overwrite a file that this command did not write."""
    try:
        if not page.parent.exists():
            raise UserError(f"PAGE={page}: the folder {page.parent} does not exist; create it or choose another file")
        if page.exists() and not is_compare_page(page):
            raise UserError(f"{page} exists but was not written by make compare; delete it or choose another PAGE")
        with convert_disk_errors(page):
            write_atomic(page, text)
    except OSError as error:
        reason = "part of the path is a file" if isinstance(error, FileExistsError) else error.strerror
        raise UserError(f"cannot write PAGE={page} ({reason}); use another file, such as runs/compare.html") from None


def is_compare_page(path: Path) -> bool:
    """Return whether this command wrote a file.

    Pages from older versions lack the mark and are recognized by their title.
    """
    with open(path, "rb") as file:
        beginning = file.read(1000).decode(errors="replace")
    return pages.MARK in beginning or bool(re.search(r"<title>\d+ runs compared</title>", beginning))


def format_link(path: Path) -> str:
    """Return the URL of a file, as a clickable link if stdout is a terminal."""
    address = path.absolute().as_uri()
    return f"\033]8;;{address}\033\\{address}\033]8;;\033\\" if sys.stdout.isatty() else address


def main(args: argparse.Namespace) -> int:
    """Print the table of runs and write the page, or print only JSON; return the exit status."""
    as_json = parse_zero_or_one("JSON", args.json)
    if as_json and args.page:
        raise UserError("PAGE cannot be combined with JSON=1, which writes no page; omit one of them")
    root = Path(args.runs_folder or "runs")
    criteria = RunFilter(args.runs, args.name, args.last, args.where, args.sweep)
    runs, differing = load_runs(selection.select_runs(criteria, root))
    if as_json:
        rows = []
        for run in runs:
            settings = {key: run.settings.get(key) for key in differing}
            rows.append(run.to_dict() | {"settings": settings})
        print(json.dumps({"differing": differing, "runs": rows}, indent=2))
        return 0
    print(format_run_table(runs, get_terminal_width()), flush=True)

    page = Path(args.page or root / "compare.html")
    for name in hide_measurement_curves(runs):
        reason = "because other runs train a model"
        print(f"the page omits the measurements of {name} {reason}; to show them: make compare NAME={name}")
    in_experiments = list_differences_within_experiments(runs)
    between_experiments = [key for key in differing if key not in in_experiments]
    columns = list_nonempty_columns(runs)
    compared_runs = [make_compared_run(run, columns, page.parent) for run in runs]
    write_page(page, pages.render_page(compared_runs, in_experiments, between_experiments))
    print(f"page: {format_link(page)}")
    return 0
