"""The verb `compare`: runs side by side, as a table on the terminal and as one page for a browser. Imports no torch.

The page holds everything: it opens from disk, without a network.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

from common.core.errors import UserError
from common.runs import compare_page as pages
from common.runs import metric_curves, setting_labels
from common.runs import result as results
from common.runs.compare_page import Cell, ComparedRun
from common.runs.compare_table import Column, choose_columns, get_terminal_width, join_columns, shorten_text
from common.runs.folder import Folder, disk_errors, read_json, write_atomic
from slurm.arguments import parse_switch
from slurm.reports import selection, status
from slurm.reports.logs import find_rank_0_log
from slurm.reports.selection import Choice
from slurm.reports.status import Status

LOGS = 4  # ranks whose logs have links of their own
NAMED = 3  # settings that may stand in a run's label


@dataclasses.dataclass
class Compared:
    """One run, with everything that the table and the page show."""

    folder: Folder
    status: Status
    settings: dict[str, str]
    result: results.Result
    world: dict[str, Any]
    curves: metric_curves.RunCurves
    telling: list[str] = dataclasses.field(default_factory=list)
    """Settings that tell it from the other runs of its experiment, at most NAMED."""
    label: str = ""

    @classmethod
    def from_folder(cls, folder: Folder) -> Compared:
        world = next((read_json(a.attempt / "world.json") for a, _ in folder.trace_attempts()[:1]), {})
        own = selection.read_settings(folder)
        bounds = {bound for _, bound in folder.trace_attempts() if bound is not None}
        drawn = metric_curves.read_curves(folder.read_rows(), bounds)
        return cls(folder, status.read_status(folder), own, results.parse_result(folder.result), world, drawn)

    @property
    def short_id(self) -> str:
        """The last characters of the id, which commands take as well."""
        return self.folder.path.name.rpartition("-")[2]

    @property
    def lacks_result(self) -> bool:
        """True where numbers do not tell its state: it is not finished, or its result cannot be read."""
        return self.status.state != "FINISHED" or bool(self.result.reason)

    @property
    def trains(self) -> bool:
        """False for a run that only measures: its metrics are no evaluations."""
        return selection.trains_model(self.settings)

    def find_value(self, name: str) -> float | None:
        """A number of the result; of an evaluation so far where there is none yet."""
        value = self.result.find_number(name)
        if value is None and name in self.curves.tests:
            value = results.to_number(self.curves.tests[name].value[-1])
        return value

    def to_dict(self) -> dict[str, Any]:
        """The columns of the table, null where a run has no such number."""
        return {
            "run": self.status.run,
            "label": self.label,
            "experiment": self.folder.experiment,
            "state": self.status.state.lower(),
            "detail": self.status.detail,
            "restarts": max(0, self.status.attempts - 1),
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
            **{name: self.find_value(name) for name in ("ranks_lost", "seconds_lost", "steps_redone")},
        }


def find_last_number(curve: metric_curves.Curve) -> float | None:
    """The last value that is a number."""
    return float(curve.value[-1]) if len(curve) and math.isfinite(curve.value[-1]) else None


def group_runs(runs: list[Compared]) -> dict[str, list[Compared]]:
    """The runs of each experiment."""
    found: dict[str, list[Compared]] = {}
    for run in runs:
        found.setdefault(run.folder.experiment, []).append(run)
    return found


def label_runs(runs: list[Compared]) -> None:
    """Give each run the settings that tell it from others of its experiment, and a label: its id's end, and these."""
    for own in group_runs(runs).values():
        settings = [run.settings for run in own]
        telling = setting_labels.choose_telling_settings(settings, NAMED)
        names = setting_labels.shorten_keys(telling, settings)
        for run in own:
            values = [shorten_text(run.settings.get(key, setting_labels.MISSING)) for key in telling]
            words = [f"{name}={value}" for name, value in zip(names, values, strict=True)]
            run.telling, run.label = telling, " ".join([run.short_id, *words])


def list_differences_within_experiments(runs: list[Compared]) -> list[str]:
    """The settings that differ between runs of the same experiment: those in labels, then the others."""
    groups = group_runs(runs).values()
    told = [key for i in range(NAMED) for own in groups for key in own[0].telling[i : i + 1]]
    rest = [key for own in groups for key in setting_labels.list_differing_settings([run.settings for run in own])]
    return list(dict.fromkeys([*told, *sorted(rest, key=setting_labels.compute_label_priority)]))


def load_compared_runs(folders: list[Folder]) -> tuple[list[Compared], list[str]]:
    """The runs with their labels, and the settings in which they differ."""
    runs = [Compared.from_folder(folder) for folder in folders]
    label_runs(runs)
    return runs, setting_labels.list_differing_settings([run.settings for run in runs])


SHOWN = {
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
"""Columns of the table, the most telling first, and how their values are written."""
HEADS = {"samples_per_second": "samples/s", "test_accuracy": "accuracy", "processes": "ranks"}
HEADS |= {"memory_mb": "peak MB"}  # of the memory of a rank


def format_column_head(name: str) -> str:
    """The head of a column."""
    return HEADS.get(name, name.replace("_", " "))


def format_value(facts: dict[str, Any], name: str) -> str:
    """The text of one column of a run."""
    return setting_labels.MISSING if facts[name] is None else SHOWN[name].format(facts[name])


def list_columns(runs: list[Compared]) -> list[str]:
    """The columns that say something of any of the runs."""
    every = [run.to_dict() for run in runs]
    return [n for n in SHOWN if any(facts[n] or (facts[n] == 0 and n != "restarts") for facts in every)]


def format_table(given: list[Compared], width: int) -> str:
    """The table as text, experiment by experiment, then a line for each run that is not finished.

    Where not all columns fit, ids are shortened to their ends, and the columns that are left out are named.
    """
    groups = group_runs(given)
    runs = [run for own in groups.values() for run in own]
    every = [run.to_dict() for run in runs]
    within = list_differences_within_experiments(runs)
    names = list_columns(runs)
    settings = [
        Column(key, [shorten_text(run.settings.get(key, setting_labels.MISSING)) for run in runs]) for key in within
    ]
    told = len({key for run in runs for key in run.telling})
    columns = [Column("state", [facts["state"] for facts in every], left=True), *settings[:told]]
    columns += [Column(format_column_head(name), [format_value(facts, name) for facts in every]) for name in names]
    columns += settings[told:]
    for cells in ([run.status.run for run in runs], [run.short_id for run in runs]):
        chosen = choose_columns([Column("run", cells, left=True), *columns], width)
        if len(chosen) > len(columns):
            break
    head, *lines = join_columns(chosen)
    text = [head]
    for name, own in groups.items():
        text.append(f"{name}:")
        text += [lines.pop(0) for _ in own]
    missing = [column.head for column in columns if column not in chosen]
    text += [f"not shown, the terminal is too narrow: {', '.join(missing)}"] if missing else []
    words = [f"{run.status.run} {run.status.state}: {run.status.detail}" for run in runs if run.lacks_result]
    return "\n".join(text + [word.removesuffix(": ") for word in words])


def hide_measurements_beside_training(runs: list[Compared]) -> list[str]:
    """Drop the curves of runs that only measure where other runs train; return the experiments of these runs.

    A measurement has a chart and a column for each of its many points, which no run that trains has.
    """
    measuring = [run for run in runs if not run.trains]
    if len(measuring) == len(runs):
        return []
    for run in measuring:
        run.curves = dataclasses.replace(run.curves, tests={})
    return sorted({run.folder.experiment for run in measuring})


def make_compared_run(run: Compared, names: list[str], beside: Path) -> ComparedRun:
    """The data of a run for the page in the folder `beside`, with these columns and relative links."""
    facts = run.to_dict()
    columns = {}
    for name in names:
        value = None if isinstance(facts[name], str) else results.to_number(facts[name])
        columns[format_column_head(name)] = Cell(format_value(facts, name), value)
    for name, curve in run.curves.tests.items():
        if name not in SHOWN and len(curve):
            columns[format_column_head(name)] = Cell(
                f"{curve.value[-1]:.4g}", results.to_number(float(curve.value[-1]))
            )
    return ComparedRun(
        run.status.run,
        run.folder.experiment,
        run.label,
        run.status.state.lower(),
        run.curves,
        columns,
        run.settings,
        run.status.detail if run.lacks_result else "",
        list_links(run.folder, beside),
    )


def list_links(folder: Folder, beside: Path) -> dict[str, str]:
    """Titles and addresses, relative to the folder `beside`, of the files in a run folder."""
    files = {"folder": folder.path, "settings": folder.path / "config.yaml", "result": folder.path / "result.json"}
    for attempt in folder.attempts()[-1:]:
        logs = sorted(attempt.attempt.glob("logs/rank-*.log"), key=lambda path: int(path.stem.split("-")[1]))
        files |= {f"log {path.stem.rpartition('-')[2]}": path for path in logs[:LOGS]}
        files |= {"all logs": attempt.attempt / "logs"} if len(logs) > LOGS else {}
        files |= {"job": find_rank_0_log(folder)} if (folder.path / "submit").exists() else {}
    found = {word: quote(os.path.relpath(path, beside.absolute())) for word, path in files.items() if path.exists()}
    online = str(read_json(folder.path / "wandb" / "status.json").get("url"))
    return found | ({"W&B": online} if online.startswith("https://") else {})


def write_page(page: Path, text: str) -> None:
    """Write a new page, or over an older one. Raises UserError."""
    try:
        if not page.parent.exists():
            raise UserError(f"PAGE={page}: there is no folder {page.parent}; make it, or name another file")
        if page.exists() and not is_compare_page(page):
            raise UserError(f"PAGE={page} exists and is no page of make compare; name a new file, or remove that one")
        with disk_errors(page):
            write_atomic(page, text)
    except OSError as error:
        why = "part of the path is a file" if isinstance(error, FileExistsError) else error.strerror
        raise UserError(f"PAGE={page}: cannot be written ({why}); name a file, such as runs/compare.html") from None


def is_compare_page(path: Path) -> bool:
    """Tell whether a file was written by this command, in this version or before pages were marked."""
    with open(path, "rb") as file:
        beginning = file.read(1000).decode(errors="replace")
    return pages.MARK in beginning or bool(re.search(r"<title>\d+ runs compared</title>", beginning))


def format_link(path: Path) -> str:
    """The address of a file, which a terminal opens at a click."""
    address = path.absolute().as_uri()
    return f"\033]8;;{address}\033\\{address}\033]8;;\033\\" if sys.stdout.isatty() else address


def main(given: argparse.Namespace) -> int:
    """Print the table of runs and write their page, or print JSON alone; returns the exit status."""
    as_json = parse_switch("JSON", given.json)
    if as_json and given.page:
        raise UserError("JSON=1 writes no page; leave out PAGE= or JSON=1")
    root = Path(given.runs_folder or "runs")
    folders = selection.select_runs(Choice(given.runs, given.name, given.last, given.where, given.sweep), root)
    runs, differing = load_compared_runs(folders)
    if as_json:
        rows = [run.to_dict() | {"settings": {key: run.settings.get(key) for key in differing}} for run in runs]
        print(json.dumps({"differing": differing, "runs": rows}, indent=2))
        return 0
    print(format_table(runs, get_terminal_width()), flush=True)
    page, within = Path(given.page or root / "compare.html"), list_differences_within_experiments(runs)
    for name in hide_measurements_beside_training(runs):
        print(f"the page shows the measurements of {name} where no other runs are compared: make compare NAME={name}")
    between = [key for key in differing if key not in within]
    pictures = [make_compared_run(run, list_columns(runs), page.parent) for run in runs]
    write_page(page, pages.render_page(pictures, within, between))
    print(f"page: {format_link(page)}")
    return 0
