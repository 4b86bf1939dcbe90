"""Records, which benchmarks write and pages show: one JSON per machine and day, with all samples and their tables.

    {"format": 1, "date": "2026-11-22", "machine": {"cpu": ..., "cores": ..., "memory_gb": ...}, "versions": {...},
     "parts": {"ddp_multinode/step": {"title": ..., "command": ..., "commit": ..., "facts": ["1 thread", ...],
       "rounds": 4, "calibration": [seconds before each round], "samples": {side: {name: [one number a round]}},
       "table": {"columns": [...], "rows": [...]}}}}

A row of a table has `what`, `cells` (text or {"value", "low", "high"}) and, if its first cell has one, a `goal`
({"bound", "at_least"}).
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.config.config import ROOT
from common.runs import provenance
from common.runs.folder import write_json
from common.system.text import format_count
from tests.benchmarks.measure import ENOUGH, NOISY, Number, Samples, find_slow_rounds

FORMAT = 1
RESULTS = ROOT / "tests" / "benchmarks" / "results"
RECORDED = ROOT / "tests" / "benchmarks" / "recorded"
PACKAGES = ("torch", "torchvision", "numpy", "lightning", "accelerate")
GOAL = "goal"  # head of the last column of a table in which rows have goals
Cell = str | Number
Json = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of a table; `bound` is the goal of its first cell."""

    what: str
    cells: Sequence[Cell]
    bound: float | None = None
    at_least: bool = True

    def json(self) -> Json:
        cells = [cell if isinstance(cell, str) else rounded(cell) for cell in self.cells]
        goal = {} if self.bound is None else {"goal": {"bound": self.bound, "at_least": self.at_least}}
        return {"what": self.what, "cells": cells} | goal


@dataclasses.dataclass(frozen=True)
class Table:
    """Heads of columns, of which the first contains the labels of rows, and rows."""

    columns: Sequence[str]
    rows: Sequence[Row]


def at_least(label: str, number: Number, bound: float) -> Row:
    """Return a row whose number should be at least `bound`."""
    return Row(label, [number], bound, at_least=True)


def at_most(label: str, number: Number, bound: float) -> Row:
    """Return a row whose number should be at most `bound`."""
    return Row(label, [number], bound, at_least=False)


def list_step_times(samples: Samples, unit: str = "ms") -> list[Row]:
    """Return a row per side: the time of a step, in ms or us."""
    factor = {"ms": 1e3, "us": 1e6}[unit]
    return [Row(f"{unit} per step: {side}", [samples.number(side, factor=factor)]) for side in samples.values]


def make_value_table(rows: Sequence[Row]) -> Table:
    """Return a table whose rows have one number each."""
    return Table(("measured", "value"), rows)


def rounded(number: Number) -> Json:
    return {name: float(f"{value:.6g}") for name, value in dataclasses.asdict(number).items()}


# ---- writing


class Record:
    """The JSON of this machine and day."""

    def __init__(self, folder: Path = RESULTS) -> None:
        date = provenance.format_utc_now()[:10]
        machine = describe_machine()
        names = f"{machine['cpu']} {machine.get('gpu', '')}".lower().replace("(r)", "")
        slug = re.sub(r"[^a-z0-9]+", "-", names).strip("-")
        self.path = folder / f"{date}-{slug}-{machine['cores']}-cores.json"
        self.written: list[str] = []  # the parts that this record was given
        commit = (provenance.run_git("rev-parse", "--short", "HEAD") or "").strip()
        # Without a commit, and with uncommitted changes, the measured code is unknown.
        self.is_resumable = bool(commit) and provenance.has_uncommitted_changes() is False
        self.commit = commit if self.is_resumable else None

        versions: Json = {"python": platform.python_version()}
        for package in PACKAGES:
            versions[package] = provenance.read_package_version(package)
        self.content: Json = json.loads(self.path.read_text()) if self.path.exists() else {"parts": {}}
        self.content |= {"format": FORMAT, "date": date, "machine": machine, "versions": versions}

    def put(self, name: str, part: Json, samples: Samples, table: Table) -> None:
        """Write the measurements of a part so far. An earlier record of it of the same day is replaced."""
        shares = [max(columns["others"]) for columns in samples.values.values()]
        counts = {"rounds": samples.rounds, "undisturbed": len(samples.clean()), "others": max(shares, default=0.0)}
        measured = {"calibration": samples.calibration[: samples.rounds], "samples": samples.values}
        self.put_table(name, part | counts | measured, table)

    def find_part(self, name: str) -> Json:
        """Return a part that this process or an earlier one has measured with the same code; empty without one."""
        part: Json = self.content["parts"].get(name, {})
        is_same_code = name in self.written or (self.is_resumable and part.get("commit") == self.commit)
        return part if is_same_code else {}

    def find_samples(self, name: str) -> Samples:
        """Return the rounds of a part that have been measured with the same code."""
        part = self.find_part(name)
        if "samples" not in part:
            return Samples()
        values: dict[str, dict[str, list[float]]] = {}
        for side, columns in part["samples"].items():
            # an interrupted round may have been recorded for some sides only
            values[side] = {name: numbers[: part["rounds"]] for name, numbers in columns.items()}
        return Samples(values, calibration=part.get("calibration", [])[: part["rounds"]])

    def put_table(self, name: str, part: Json, table: Table) -> None:
        """Write a table and its origin: title, command, rounds, and the commit if it is the measured code."""
        content = {"columns": list(table.columns), "rows": [row.json() for row in table.rows]}
        if name not in self.written:
            self.written.append(name)
        self.content["parts"][name] = part | {"commit": self.commit, "table": content}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, self.content)


def describe_machine() -> Json:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0))
    machine = {"cpu": provenance.read_cpu_model() or platform.machine(), "cores": cores}
    gpu = read_gpu_name()
    return machine | {"memory_gb": round(memory / 1e9)} | ({"gpu": gpu} if gpu else {})


def read_gpu_name() -> str:
    """Return the name of the first NVIDIA GPU; empty without one. CUDA would prevent later forks from using the GPU."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        process = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return process.stdout.partition("\n")[0].strip()


# ---- reading


def recorded(folder: Path = RECORDED) -> dict[str, Json]:
    """Return the newest record of each part, with machine, versions and date. Raises ValueError for another format."""
    parts: dict[str, Json] = {}
    for path in sorted(folder.glob("20*.json")):
        content = json.loads(path.read_text())
        if content["format"] != FORMAT:
            raise ValueError(f"{path}: format {content['format']}, not {FORMAT}; record it again with make bench")
        origin = {key: content[key] for key in ("date", "machine", "versions")}
        for name, part in content["parts"].items():
            parts[name] = origin | part
    return parts


def text_of(cell: str | Json, digits: int = 3) -> str:
    """Format a cell, such as 1.34 [1.26..1.47]."""
    if isinstance(cell, str):
        return cell
    value = figure(cell["value"], digits)
    low = figure(cell["low"], digits)
    high = figure(cell["high"], digits)
    return value if low == high == value else f"{value} [{low}..{high}]"


def figure(number: float, digits: int = 3) -> str:
    """Format a number with three digits, and with all of those before the point."""
    if number == 0 or abs(number) >= 10 ** (digits - 1):
        return f"{number:,.0f}"
    text = f"{number:.{digits}g}"
    return text if "e" not in text else f"{number:.1e}"


def goal_of(row: Json, disturbed: bool = False) -> str:
    """Format a row's goal and whether it was reached: `>= 1.3, met`."""
    goal = row.get("goal")
    if not goal:
        return ""
    sign = ">=" if goal["at_least"] else "<="
    text = f"{sign} {goal['bound']:g}, {verdict(row)}"
    return f"{text} (disturbed)" if disturbed else text


def count_disturbed_rounds(part: Mapping[str, Any]) -> int:
    """Return how many rounds of a part were disturbed."""
    return part["rounds"] - part["undisturbed"] if "undisturbed" in part else 0


def is_disturbed(part: Mapping[str, Any]) -> bool:
    """Return whether so many rounds were disturbed that these had to count."""
    return count_disturbed_rounds(part) > 0 and part["undisturbed"] < ENOUGH


def verdict(row: Json) -> str:
    """Return `met` or `missed`."""
    goal = row["goal"]
    value = row["cells"][0]["value"]
    is_met = value >= goal["bound"] if goal["at_least"] else value <= goal["bound"]
    return "met" if is_met else "missed"


def lines_of(part: Mapping[str, Any]) -> list[list[str]]:
    """Return the cells of a part's table as text, its head first."""
    table = part["table"]
    disturbed = is_disturbed(part)
    has_goals = any("goal" in row for row in table["rows"])
    head = list(table["columns"])
    lines = [[*head, GOAL] if has_goals else head]
    for row in table["rows"]:
        line = [row["what"], *map(text_of, row["cells"])]
        if has_goals:
            line.append(goal_of(row, disturbed))
        lines.append(line)
    return lines


def origin_of(part: Mapping[str, Any], facts: Sequence[str], method: str) -> str:
    """Describe the origin of a table in one line: date, command, rounds, conditions, machine, versions.

    `method` is the path of the page that explains how numbers are measured.
    """
    phrases = [*count_rounds(part), *facts, describe_cores(part["machine"])]
    versions = part["versions"]
    names = {"python": "Python", "torch": "PyTorch"}
    phrases.append(", ".join(f"{names[name]} {versions[name]}" for name in versions if name in names))
    if count_disturbed_rounds(part):
        phrases.append(describe_disturbance(part))
    return f"[Measured]({method}) on {part['date']} with `{part['command']}`: {'; '.join(phrases)}."


def describe_cores(machine: Mapping[str, Any]) -> str:
    """Describe the machine of a record."""
    memory = f", {machine['memory_gb']} GB of memory" if machine.get("memory_gb") else ""
    gpu = f"{machine['gpu']}; " if machine.get("gpu") else ""
    return f"{gpu}{machine['cpu']}, {machine['cores']} cores{memory}"


def count_undisturbed_rounds(part: Mapping[str, Any]) -> int | None:
    """Return how many rounds of a part were undisturbed, or None if the part was not measured in rounds."""
    if "rounds" not in part or "runs" in part["table"]["columns"]:
        return None
    return int(part.get("undisturbed", part["rounds"]))


def count_rounds(part: Mapping[str, Any]) -> list[str]:
    """Describe how many rounds a table summarizes. A table that counts runs or kills needs no such phrase."""
    if "rounds" not in part or "runs" in part["table"]["columns"]:
        return []
    count = part["rounds"] if is_disturbed(part) or "undisturbed" not in part else part["undisturbed"]
    if count == 1:
        return ["1 round"]
    has_medians = any(not isinstance(cell, str) for row in part["table"]["rows"] for cell in row["cells"])
    return [f"medians [lowest..highest] of {count} rounds" if has_medians else f"{count} rounds"]


def describe_disturbance(part: Mapping[str, Any]) -> str:
    """Describe the disturbed rounds of a part."""
    rounds = part["rounds"]
    reasons = []
    if part["others"] > NOISY:
        reasons.append(f"other programs used up to {100 * part['others']:.0f} % of the CPU time")
    if find_slow_rounds(part.get("calibration", [])):
        reasons.append("the machine was slower")
    reason = " or ".join(reasons)
    if rounds == 1:
        return f"disturbed, because {reason}"
    count = count_disturbed_rounds(part)
    were = "was" if count == 1 else "were"
    if is_disturbed(part):
        return f"{count} of {rounds} rounds {were} disturbed, because {reason}, but {were} included"
    further = format_count(count, "further round")
    return f"{further} {were} excluded, because {reason}"
