"""What benchmarks write and pages show: one JSON per machine and day, with every sample and the table made of them.

    {"format": 1, "date": "2026-11-22", "machine": {"cpu": ..., "cores": ..., "memory_gb": ...}, "versions": {...},
     "parts": {"ddp_multinode/step": {"title": ..., "command": ..., "commit": ..., "facts": {"threads": 1, ...},
       "rounds": 4, "samples": {side: {name: [one number a round]}}, "table": {"columns": [...], "rows": [...]}}}}

A row of a table has `what`, `cells` (text or {"value", "low", "high"}) and, where there is one, a `goal`
({"bound", "at_least"}), which its first cell is measured by.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.config.config import ROOT
from common.runs import provenance
from common.runs.folder import write_json
from tests.benchmarks.measure import ENOUGH, NOISY, Number, Samples

FORMAT = 1
RESULTS = ROOT / "tests" / "benchmarks" / "results"
RECORDED = ROOT / "tests" / "benchmarks" / "recorded"
PACKAGES = ("torch", "torchvision", "numpy", "lightning", "accelerate")
GOAL = "goal"  # head of the last column of a table in which rows have goals
NEAR = 0.05  # a goal missed by no more counts as met
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
    """Columns, of which the first is headed by what the rows are, and rows."""

    columns: Sequence[str]
    rows: Sequence[Row]


def at_least(what: str, number: Number, bound: float) -> Row:
    return Row(what, [number], bound, at_least=True)


def at_most(what: str, number: Number, bound: float) -> Row:
    return Row(what, [number], bound, at_least=False)


def rounded(number: Number) -> Json:
    return {name: float(f"{value:.6g}") for name, value in dataclasses.asdict(number).items()}


# ---- writing


class Record:
    """The JSON of this machine and day."""

    def __init__(self, folder: Path = RESULTS) -> None:
        date = provenance.format_utc_now()[:10]
        machine = describe_machine()
        slug = re.sub(r"[^a-z0-9]+", "-", f"{machine['cpu']}".lower().replace("(r)", "")).strip("-")
        self.path = folder / f"{date}-{slug}-{machine['cores']}-cores.json"
        self.content: Json = json.loads(self.path.read_text()) if self.path.exists() else {"parts": {}}
        versions = {"python": platform.python_version()} | {
            name: provenance.read_package_version(name) for name in PACKAGES
        }
        self.written: list[str] = []  # the parts that this record was given
        self.content |= {"format": FORMAT, "date": date, "machine": machine, "versions": versions}

    def put(self, name: str, part: Json, samples: Samples, table: Table) -> None:
        """Write what is known of a part so far. An earlier record of it of the same day is replaced."""
        disturbed = max((max(found["others"]) for found in samples.values.values()), default=0.0)
        counts = {"rounds": samples.rounds, "undisturbed": len(samples.clean()), "others": disturbed}
        self.put_table(name, part | counts | {"samples": samples.values}, table)

    def put_table(self, name: str, part: Json, table: Table) -> None:
        """Write a table and what is known of its origin: title, command, rounds."""
        commit = (provenance.run_git("rev-parse", "--short", "HEAD") or "").strip() or None
        shown = {"columns": list(table.columns), "rows": [row.json() for row in table.rows]}
        if name not in self.written:
            self.written.append(name)
        self.content["parts"][name] = part | {"commit": commit, "table": shown}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, self.content)


def describe_machine() -> Json:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0))
    return {"cpu": provenance.read_cpu_model() or platform.machine(), "cores": cores, "memory_gb": round(memory / 1e9)}


# ---- reading


def recorded(folder: Path = RECORDED) -> dict[str, Json]:
    """The newest record of each part, with machine, versions and date. Raises ValueError for another format."""
    parts: dict[str, Json] = {}
    for path in sorted(folder.glob("20*.json")):
        content = json.loads(path.read_text())
        if content["format"] != FORMAT:
            raise ValueError(f"{path}: format {content['format']}, not {FORMAT}; record it anew with make bench")
        about = {key: content[key] for key in ("date", "machine", "versions")}
        parts |= {name: about | part for name, part in content["parts"].items()}
    return parts


def text_of(cell: str | Json, digits: int = 3) -> str:
    """A cell as it is shown: 1.34 [1.26..1.47]."""
    if isinstance(cell, str):
        return cell
    value, low, high = (figure(cell[name], digits) for name in ("value", "low", "high"))
    return value if low == high == value else f"{value} [{low}..{high}]"


def figure(value: float, digits: int = 3) -> str:
    """A number with three digits, and with all of those before the point."""
    if value == 0 or abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    text = f"{value:.{digits}g}"
    return text if "e" not in text else f"{value:.1e}"


def goal_of(row: Json, disturbed: bool = False) -> str:
    """A row's goal and whether it was reached: `>= 1.3, met`."""
    goal = row.get("goal")
    words = verdict(row) + " (disturbed)" * disturbed if goal else ""
    return f"{'>=' if goal['at_least'] else '<='} {goal['bound']:g}, {words}" if goal else ""


def is_disturbed(part: Mapping[str, Any]) -> bool:
    """Whether other programs used the machine in so many rounds that these had to count."""
    return part.get("others", 0) > NOISY and part["undisturbed"] < ENOUGH


def verdict(row: Json) -> str:
    """`met`, `met within 5 %` or `missed`."""
    goal, value = row["goal"], row["cells"][0]["value"]
    bound, sign = goal["bound"], 1 if goal["at_least"] else -1
    if sign * value >= sign * bound:
        return "met"
    return f"met within {NEAR:.0%}".replace("%", " %") if sign * value >= sign * bound - NEAR * bound else "missed"


def lines_of(part: Mapping[str, Any]) -> list[list[str]]:
    """The cells of a part's table as text, its head first."""
    table, disturbed = part["table"], is_disturbed(part)
    goals = any("goal" in row for row in table["rows"])
    lines = [[*table["columns"], *([GOAL] if goals else [])]]
    for row in table["rows"]:
        lines.append([row["what"], *map(text_of, row["cells"]), *([goal_of(row, disturbed)] if goals else [])])
    return lines


def origin_of(part: Mapping[str, Any]) -> str:
    """Where a table comes from, in one paragraph: command, rounds, machine, versions."""
    machine, versions = part["machine"], part["versions"]
    memory = f", {machine['memory_gb']} GB" if machine.get("memory_gb") else ""
    words = [f"`{part['command']}`, {part['date']}"]
    rounds = f"{part['rounds']} round{'s' * (part['rounds'] != 1)}"
    words.append(f"{rounds}, medians [lowest..highest]" if part["rounds"] > 1 and "samples" in part else rounds)
    words += [f"{name} {value}" for name, value in part.get("facts", {}).items()]
    words.append(f"{machine['cpu']}, {machine['cores']} cores{memory}")
    words.append(", ".join(f"{name} {value}" for name, value in versions.items() if name in ("python", "torch")))
    if part.get("others", 0) > NOISY:
        count = "which count all the same" if is_disturbed(part) else "which are left out"
        words.append(
            f"disturbed: {part['rounds'] - part['undisturbed']} of {part['rounds']}, {count} "
            f"(other programs used up to {100 * part['others']:.0f} % of the machine)"
        )
    words += [part["note"]] if "note" in part else []
    return "; ".join(words) + "."
