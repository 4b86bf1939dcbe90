"""The verb `compare`: runs side by side, as a table on the terminal and as one page for a browser. Imports no torch.

The page holds everything, the plotting library included: it opens from disk, without a network.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

from common.core.errors import UserError
from common.runs import compare_page as pages
from common.runs import metric_curves
from common.runs import result as results
from common.runs.compare_page import ComparedRun
from common.runs.folder import Folder, disk_errors, read_json, write_atomic
from slurm.arguments import parse_switch
from slurm.reports import selection, status
from slurm.reports.logs import find_rank_0_log
from slurm.reports.selection import Choice
from slurm.reports.status import Status

NO_MATTER = ("runs", "data.cache", "data.root", "log.", "wandb.")  # settings that do not change what is computed
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
    label: str = ""

    @classmethod
    def of(cls, folder: Folder) -> Compared:
        world = next((read_json(a.attempt / "world.json") for a, _ in folder.chain()[:1]), {})
        own = selection.read_settings(folder)
        bounds = {bound for _, bound in folder.chain() if bound is not None}
        drawn = metric_curves.read_curves(folder.read_rows(), bounds)
        return cls(folder, status.read_status(folder), own, results.parse_result(folder.result), world, drawn)

    @property
    def needs_words(self) -> bool:
        """Whether numbers do not tell how it is doing: it is not finished, or its result cannot be read."""
        return self.status.state != "FINISHED" or bool(self.result.reason)

    def final(self, name: str) -> float | None:
        """A number of the result; of an evaluation so far where there is none yet."""
        value = self.result.find_number(name)
        if value is None and name in self.curves.tests:
            value = results.to_number(self.curves.tests[name].value[-1])
        return value

    def facts(self) -> dict[str, Any]:
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
            "loss": find_last(self.curves.loss),
            "test_loss": self.final("test_loss"),
            "test_accuracy": self.final("test_accuracy"),
            "samples_per_second": self.status.samples_per_second or None,
            "efficiency": self.final("efficiency"),
            "waiting": self.result.compute_waiting_share(),
            "memory_mb": self.result.find_peak_mb(),
            "cut": format_cut(self.result),
        }


def format_cut(result: results.Result) -> str | None:
    """The layers that begin a stage; None for a run without stages, or with one."""
    stages = result.measured.get("stages")
    named = isinstance(stages, list) and all(isinstance(names, list) and names for names in stages)
    return ",".join(str(names[0]) for names in stages[1:]) or None if named else None  # type: ignore[index]


def find_last(curve: metric_curves.Curve) -> float | None:
    """The last value that is a number."""
    return float(curve.value[-1]) if len(curve) and math.isfinite(curve.value[-1]) else None


def list_differences(runs: list[Compared]) -> list[str]:
    """List the settings whose values differ between the runs that have them."""
    found = []
    for key in dict.fromkeys(key for run in runs for key in run.settings):
        values = {run.settings[key] for run in runs if key in run.settings}
        if len(values) > 1 and not any(key == n or (n.endswith(".") and key.startswith(n)) for n in NO_MATTER):
            found.append(key)
    return found


def label_runs(runs: list[Compared], differing: list[str]) -> None:
    """Give each run a short label: the end of its id, its experiment, its differing settings."""
    kinds: dict[str, list[Compared]] = {}
    for run in runs:
        kinds.setdefault(run.folder.experiment, []).append(run)
    several = len(kinds) > 1
    within = {name: list_differences(own) for name, own in kinds.items()}  # what differs between experiments is no news
    for run in runs:
        told = [key for key in within[run.folder.experiment] if key in differing]
        parts = [run.folder.path.name.rpartition("-")[2]]
        parts += [run.folder.experiment] if several else []
        parts += [f"{key.rpartition('.')[2]}={run.settings.get(key, '-')}" for key in told[:NAMED]]
        run.label = " ".join(parts)


def compare_runs(folders: list[Folder]) -> tuple[list[Compared], list[str]]:
    """The runs with their labels, and the settings in which they differ."""
    runs = [Compared.of(folder) for folder in folders]
    differing = list_differences(runs)
    label_runs(runs, differing)
    return runs, differing


SHOWN = {
    "state": "{}",
    "restarts": "{}",
    "processes": "{}",
    "step": "{}",
    "test_loss": "{:.4f}",
    "test_accuracy": "{:.2%}",
    "samples_per_second": "{:,.0f}",
    "efficiency": "{:.0%}",
    "waiting": "{:.0%}",
    "memory_mb": "{:,.0f}",
    "cut": "{}",
}
HEADS = {"samples_per_second": "samples/s", "test_accuracy": "accuracy", "memory_mb": "MB"}


def format_value(facts: dict[str, Any], name: str) -> str:
    """The text of one column of a run."""
    return pages.MISSING if facts[name] is None else SHOWN[name].format(facts[name])


def format_table(runs: list[Compared], differing: list[str]) -> str:
    """The table as text: one line per run, differing settings last, then a line for each run that is not finished."""
    every = [run.facts() for run in runs]
    columns = [name for name in SHOWN if any(facts[name] is not None for facts in every)]
    lines = [["run", *(HEADS.get(name, name.replace("_", " ")) for name in columns), *differing]]
    for run, facts in zip(runs, every, strict=True):
        own = [run.settings.get(key, pages.MISSING) for key in differing]
        lines.append([facts["run"], *(format_value(facts, name) for name in columns), *own])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    left = {0, 1}  # words; the rest are numbers
    text = [
        "  ".join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    ]
    words = [f"{run.status.run} {run.status.state}: {run.status.detail}" for run in runs if run.needs_words]
    return "\n".join([line.rstrip() for line in text] + [word.removesuffix(": ") for word in words])


def make_picture(run: Compared, place: Path, differing: list[str]) -> ComparedRun:
    """The data of a run for the page, with links relative to the folder `place`."""
    facts = run.facts()
    columns = {HEADS.get(name, name.replace("_", " ")): format_value(facts, name) for name in SHOWN if name != "state"}
    if run.needs_words:
        columns["detail"] = run.status.detail
    return ComparedRun(
        run.status.run,
        run.label,
        run.status.state.lower(),
        run.curves,
        columns,
        {key: run.settings[key] for key in differing if key in run.settings},
        facts["waiting"],
        facts["memory_mb"],
        list_links(run.folder, place),
    )


def list_links(folder: Folder, place: Path) -> dict[str, str]:
    """Titles and addresses, relative to `place`, of the files in a run folder."""
    files = {"folder": folder.path, "settings": folder.path / "config.yaml", "result": folder.path / "result.json"}
    for attempt in folder.attempts()[-1:]:
        logs = sorted(attempt.attempt.glob("logs/rank-*.log"), key=lambda path: int(path.stem.split("-")[1]))
        files |= {f"log of {path.stem.replace('-', ' ')}": path for path in logs[:LOGS]}
        files |= {"all logs": attempt.attempt / "logs"} if len(logs) > LOGS else {}
        files |= {"job": find_rank_0_log(folder)} if (folder.path / "submit").exists() else {}
    found = {word: quote(os.path.relpath(path, place.absolute())) for word, path in files.items() if path.exists()}
    online = str(read_json(folder.path / "wandb" / "status.json").get("url"))
    return found | ({"W&B": online} if online.startswith("https://") else {})


def write_page(page: Path, text: str) -> None:
    """Write a new page, or over an older one. Raises UserError."""
    try:
        if not page.parent.exists():
            raise UserError(f"PAGE={page}: there is no folder {page.parent}; make it, or name another file")
        if page.exists() and not is_page(page):
            raise UserError(f"PAGE={page} exists and is no page of make compare; name a new file, or remove that one")
        with disk_errors(page):
            write_atomic(page, text)
    except OSError as error:
        why = "part of the path is a file" if isinstance(error, FileExistsError) else error.strerror
        raise UserError(f"PAGE={page}: cannot be written ({why}); name a file, such as runs/compare.html") from None


def is_page(path: Path) -> bool:
    """Tell whether a file was written by this command, in this version or before pages were marked."""
    with open(path, "rb") as file:
        beginning = file.read(1000).decode(errors="replace")
    return pages.MARK in beginning or bool(re.search(r"<title>\d+ runs compared</title>", beginning))


def main(given: argparse.Namespace) -> int:
    """Print the table of runs and write their page; returns the exit status."""
    as_json = parse_switch("JSON", given.json)
    root = Path(given.runs or "runs")
    folders = selection.select_runs(Choice(given.pick, given.name, given.last, given.where, given.sweep), root)
    runs, differing = compare_runs(folders)
    page = Path(given.page or root / "compare.html")
    if as_json:
        rows = [run.facts() | {"settings": {key: run.settings.get(key) for key in differing}} for run in runs]
        print(json.dumps({"page": str(page.absolute()), "differing": differing, "runs": rows}, indent=2), flush=True)
    else:
        print(format_table(runs, differing), flush=True)
    write_page(page, pages.render_page([make_picture(run, page.parent, differing) for run in runs], differing))
    if not as_json:
        print(f"page: {page.absolute()}")
    return 0
