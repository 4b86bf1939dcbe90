"""The `compare` command: compare runs in a terminal table and on an HTML page. This module does not import torch.

The HTML page is a single file that opens from disk without a network connection.
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

MAX_LOG_LINKS = 4  # maximum number of ranks whose logs the page links individually
MAX_LABEL_SETTINGS = 3  # maximum number of settings in the label of a run


@dataclasses.dataclass
class RunFacts:
    """Data of one run for the terminal table and the HTML page."""

    folder: RunFolder
    status: Status
    settings: dict[str, str]
    result: results.Result
    world: dict[str, Any]
    curves: metric_curves.RunCurves
    label_settings: list[str] = dataclasses.field(default_factory=list)
    """Keys of up to MAX_LABEL_SETTINGS settings that distinguish the run from other runs of the same experiment."""
    label: str = ""
    """Short id of the run, followed by the settings in `label_settings`, such as `3f2a lr=0.1`."""

    @classmethod
    def from_folder(cls, folder: RunFolder) -> RunFacts:
        """Read the data of a run from the run folder."""
        attempts = folder.trace_attempts()  # the newest attempt comes first
        world = read_json(attempts[0][0].attempt_folder / "world.json") if attempts else {}
        last_steps = {step for _, step in attempts if step is not None}  # steps from which later attempts resumed
        return cls(
            folder,
            status.read_status(folder),
            selection.read_newest_settings(folder),
            results.parse_result(folder.result),
            world,
            metric_curves.read_curves(folder.read_rows(), last_steps),
        )

    @property
    def short_id(self) -> str:
        """Last part of the run id, which commands accept instead of the full id."""
        return self.folder.path.name.rpartition("-")[2]

    @property
    def is_incomplete(self) -> bool:
        """Whether the run has not finished or has no readable result."""
        return self.status.state != "FINISHED" or bool(self.result.reason)

    def find_number(self, name: str) -> float | None:
        """Return a number from the run's result or, if missing, from the newest evaluation.

        Returns None if neither contains the number as a finite value.
        """
        number = self.result.find_number(name)
        if number is None and name in self.curves.tests:
            return results.to_finite_number(self.curves.tests[name].value[-1])
        return number

    def to_table_row(self) -> dict[str, Any]:
        """Return the run's values for the table and the JSON output. Missing values are None."""
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
            "test_loss": self.find_number("test_loss"),
            "test_accuracy": self.find_number("test_accuracy"),
            "samples_per_second": self.status.samples_per_second or None,
            "efficiency": self.find_number("efficiency"),
            "waiting": self.result.compute_waiting_share(),
            "memory_mb": self.result.find_peak_mb(),
            "split_at": self.result.format_partition(),
            "shards": self.result.format_shards(),
        }
        columns |= {"name": self.status.name, "notes": self.status.notes}
        for name in ("ranks_lost", "seconds_lost", "steps_redone"):
            columns[name] = self.find_number(name)
        return columns


def find_last_number(curve: metric_curves.Curve) -> float | None:
    """Return the last value of a curve, or None if missing or not finite."""
    return float(curve.value[-1]) if len(curve) and math.isfinite(curve.value[-1]) else None


def group_runs_by_experiment(runs: list[RunFacts]) -> dict[str, list[RunFacts]]:
    """Return the runs of each experiment, by the name of the experiment."""
    groups: dict[str, list[RunFacts]] = {}
    for run in runs:
        groups.setdefault(run.folder.experiment, []).append(run)
    return groups


def format_setting(run: RunFacts, key: str) -> str:
    """Return the value of a run's setting, shortened to fit a table cell."""
    return shorten_text(run.settings.get(key, setting_labels.MISSING))


def label_runs(runs: list[RunFacts]) -> None:
    """Set the label of each run.

    The label of a run consists of the short id and of the settings that distinguish the run from other runs of the same
    experiment.
    """
    for group in group_runs_by_experiment(runs).values():
        settings = [run.settings for run in group]
        keys = setting_labels.choose_distinctive_settings(settings, MAX_LABEL_SETTINGS)
        short_keys = setting_labels.shorten_keys(keys, settings)
        for run in group:
            run.label_settings = keys
            run.label = run.short_id
            for key, short_key in zip(keys, short_keys, strict=True):
                run.label += f" {short_key}={format_setting(run, key)}"


def list_differences_within_experiments(runs: list[RunFacts]) -> list[str]:
    """Return the keys of the settings that differ between runs of the same experiment.

    The keys of settings in run labels come first.
    """
    groups = list(group_runs_by_experiment(runs).values())

    # First take the first label setting of every experiment, then the second label setting of every experiment, etc.
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
    """Read and label runs. Return the runs and the keys of the settings that differ."""
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
"""Format string for the values of each table column, by column name. The most informative columns come first."""
COLUMN_HEADS = {
    "samples_per_second": "samples/s",
    "test_accuracy": "accuracy",
    "processes": "ranks",
    "memory_mb": "peak MB",  # highest peak memory of any rank
    "shards": "shard sizes",  # the setting `shards` has its own column
}
"""Headings of columns, by column name. The heading of any other column is the column name."""


def format_column_head(name: str) -> str:
    """Return the heading of the table column with this name."""
    return COLUMN_HEADS.get(name, name.replace("_", " "))


def format_column_value(row: dict[str, Any], name: str) -> str:
    """Return a run's value for one table column as text, or a dash if missing."""
    return setting_labels.MISSING if row[name] is None else COLUMN_FORMATS[name].format(row[name])


def list_nonempty_columns(runs: list[RunFacts]) -> list[str]:
    """Return the names of the columns in which at least one run has a value.

    The column `restarts` is included only if at least one run was restarted.
    """
    rows = [run.to_table_row() for run in runs]
    names = []
    for name in COLUMN_FORMATS:
        values = [row[name] for row in rows if row[name] is not None]
        if values and (name != "restarts" or any(values)):
            names.append(name)
    return names


def format_run_table(runs: list[RunFacts], width: int) -> str:
    """Return the table of runs as text, with one row per run, grouped by experiment.

    A line about each incomplete run follows the table. If the columns do not fit into `width` characters, the table
    contains short run ids. The names of columns that still do not fit are listed below the table.
    """
    groups = group_runs_by_experiment(runs)
    runs = list(chain(*groups.values()))
    rows = [run.to_table_row() for run in runs]
    keys = list_differences_within_experiments(runs)  # settings in labels come first
    settings = []
    for key in keys:
        settings.append(Column(key, [format_setting(run, key) for run in runs]))
    label_count = len(set[str]().union(*(run.label_settings for run in runs)))

    # Earlier columns take precedence if the terminal is narrow. Settings in labels precede the results of the runs.
    columns = [Column("state", [row["state"] for row in rows], is_left_aligned=True)]
    columns += settings[:label_count]
    for name in list_nonempty_columns(runs):
        columns.append(Column(format_column_head(name), [format_column_value(row, name) for row in rows]))
    columns += settings[label_count:]

    # Use the full run ids if all columns fit next to them, and short ids otherwise.
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
    """Remove the evaluation curves of measurement-only runs if other runs train a model.

    Each curve of a measurement-only run adds a chart and a column to the page. A training run has no values for these
    charts and columns. Returns the names of the experiments whose curves were removed.
    """
    measuring = [run for run in runs if not selection.trains_model(run.folder.experiment, run.settings)]
    if len(measuring) == len(runs):
        return []
    for run in measuring:
        run.curves = dataclasses.replace(run.curves, tests={})
    return sorted({run.folder.experiment for run in measuring})


def make_compared_run(run: RunFacts, names: list[str], page_folder: Path) -> ComparedRun:
    """Build the data that the HTML page shows for a run.

    `names` contains the names of the table columns. Links to files are relative to `page_folder`.
    """
    row = run.to_table_row()
    cells = {}
    for name in names:
        number = None if isinstance(row[name], str) else results.to_finite_number(row[name])
        cells[format_column_head(name)] = TableCell(format_column_value(row, name), number)
    # Every evaluation metric without a column in the terminal table gets an additional column on the page.
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
    """Return links to the files of a run and to its W&B run, by title.

    Links to files are relative to `page_folder`. Files that do not exist are omitted.
    """
    names = {"settings": "config.yaml", "resolved settings": "resolved.yaml", "result": "result.json"}
    files = {"folder": folder.path} | {title: folder.path / name for title, name in names.items()}
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
    """Write the HTML page to a file.

    Raises UserError if writing fails, or if the file exists and was not written by `make compare`.
    """
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
    """Return whether `make compare` wrote a file.

    Pages from older versions do not contain the tag `pages.MARK` and are recognized by their title.
    """
    with open(path, "rb") as file:
        beginning = file.read(1000).decode(errors="replace")
    return pages.MARK in beginning or bool(re.search(r"<title>\d+ runs compared</title>", beginning))


def format_link(path: Path) -> str:
    """Return the URL of a file, as a clickable link if stdout is a terminal."""
    address = path.absolute().as_uri()
    # Terminals display the escape sequence OSC 8 as a link.
    return f"\033]8;;{address}\033\\{address}\033]8;;\033\\" if sys.stdout.isatty() else address


def main(args: argparse.Namespace) -> int:
    """Compare runs in a table and on an HTML page, and return the exit status.

    With JSON=1, the comparison is printed as JSON, and no page is written. Raises UserError for invalid arguments.
    """
    as_json = parse_zero_or_one("JSON", args.json)
    if as_json and args.page:
        raise UserError("PAGE cannot be combined with JSON=1, which writes no page; omit one of them")
    root = Path(args.runs_folder or "runs")
    criteria = RunFilter.from_arguments(args)
    runs, differing = load_runs(selection.select_runs(criteria, root))
    if as_json:
        rows = []
        for run in runs:
            rows.append(run.to_table_row() | {"settings": {key: run.settings.get(key) for key in differing}})
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
