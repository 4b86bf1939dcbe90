"""A sweep: one experiment run with a grid of settings, each a run of its own, and what comes out side by side.

runs/sweeps/<name>-<time>-<4 hex>/
  sweep.json     the group in W&B and, for each run, its settings, its folder's name, and how it ended
  table.csv      one line a run: its settings and the numbers of its result
  ...            what the experiment draws
"""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import math
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Generic, TypeVar

from common.core import config
from common.core.errors import EXIT_RESUMABLE, UserError
from common.core.signals import STOP_SIGNALS
from common.runs import result as results
from common.runs.folder import Folder, write_atomic, write_json
from configs.shared import Experiment

T = TypeVar("T", bound=Experiment)
Cell = dict[str, Any]
Row = dict[str, Any]
QUIET = ("log.level=warning", "log.progress=none")


@dataclass(frozen=True)
class Sweep(Generic[T]):
    """What an experiment knows of its sweep."""

    cells: Callable[[T], list[Cell]]
    """The grid, in the order it runs: for each cell the settings, by dotted name, that differ from the others'."""
    show: Callable[[T, list[Row], Path], dict[str, str]]
    """From the finished runs (a row has `cell`, `repeat`, `run` and what the result holds) to the lines of the table on
    the screen; writes its plots into the folder."""
    new_seeds: bool = False
    """Whether each repeat has a seed of its own: right for accuracies; times are repeated with the same."""
    measured: tuple[str, ...] = ()
    """Settings that a run may find out for itself: what a cell's first run finds holds for its repeats, too."""


def words(cell: Cell) -> list[str]:
    """The settings of a cell as they stand on a command line."""

    def text(value: Any) -> str:
        if isinstance(value, bool):
            return str(value).lower()
        return f"[{','.join(map(str, value))}]" if isinstance(value, list | tuple) else str(value)

    return [f"{name}={text(value)}" for name, value in cell.items()]


def run(sweep: Sweep[T], settings: T, arguments: Sequence[str], start: Callable[[T], tuple[Folder | None, int]]) -> int:
    """Run all cells with `start`, which returns a run's folder and exit status; returns the sweep's exit status.

    Every cell's settings are checked before the first one starts. Raises UserError.
    """
    name = config.experiment_name(type(settings))
    planned = plan(sweep, settings, arguments)
    folder = Folder.create(Path(settings.runs) / "sweeps", name, config.to_yaml(settings)).path
    print(f"{name}: a sweep of {len(planned)} runs, folder {folder}", flush=True)
    rows: list[Row] = []
    for number, (row, chosen) in enumerate(planned, 1):
        chosen.wandb.group = folder.name
        print(f"{number:>4} of {len(planned)}  {' '.join(words(row['cell']))}", end="", flush=True)
        try:
            with silenced(), dispositions():
                made, status = start(chosen)
            assert made is not None
        except UserError:
            if not rows:
                shutil.rmtree(folder)
            raise
        for other, later in planned[number:]:
            if other["cell"] == row["cell"]:
                pass_on(sweep.measured, made, later)
        found = results.parse(made.result)
        rows.append(row | {"run": made.path.name, "exit_status": status} | found.values() | found.columns())
        print(f"  {rows[-1].get('state', 'failed')}", flush=True)
        keep(folder, name, rows)
        if status in (EXIT_RESUMABLE, *(128 + number for number in STOP_SIGNALS)):
            return status  # it was the sweep that was told to stop
    done = [row for row in rows if row.get("state") == "finished"]
    if done:
        for title, line in (sweep.show(settings, done, folder) | {"sweep": str(folder)}).items():
            print(f"  {title}  {line}" if "\n" not in line else f"  {title}\n{line}", flush=True)
    failed = [row for row in rows if row.get("state") != "finished"]
    for row in failed:
        print(f"error: {row['run']} ({' '.join(words(row['cell']))}) did not finish; see its logs", file=sys.stderr)
    return 1 if failed else 0


def plan(sweep: Sweep[T], settings: T, arguments: Sequence[str]) -> list[tuple[Row, T]]:
    """Every run's place in the grid and its settings. Raises UserError where they do not fit together."""
    planned = []
    for repeat, cell in itertools.product(range(settings.repeats), sweep.cells(settings)):  # type: ignore[attr-defined]
        values = cell | ({"seed": settings.seed + repeat} if sweep.new_seeds else {})
        try:
            chosen = config.load_config(type(settings), [*QUIET, *arguments, "sweep=false", *words(values)])
        except UserError as error:
            raise UserError(f"sweep, at {' '.join(words(values))}: {error}") from None
        planned.append(({"cell": values, "repeat": repeat}, chosen))
    return planned


def pass_on(names: Sequence[str], made: Folder, later: Experiment) -> None:
    """What a run has found out for itself, into the settings of one that comes after it."""
    found = config.read_config_file(made.path / "config.yaml")
    for name in names:
        setattr(later, name, getattr(later, name) or found.get(name) or [])


def only_here(ok: bool) -> None:
    """Raises UserError where a sweep was started by somebody who has started processes already, or is to go on."""
    if not ok:
        raise UserError(
            "sweep=true starts its runs itself, one after the other: start it without srun, torchrun, "
            "RESUME and --resume; make sweep runs a grid on a cluster"
        )


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """What each run says on the screen stands in its logs."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


@contextlib.contextmanager
def dispositions() -> Iterator[None]:
    """Leave the signals to the next run as this one found them."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def keep(folder: Path, name: str, rows: Sequence[Row]) -> None:
    """Write what is known so far, so that a sweep that is ended early leaves it."""
    cells = [{"values": r["cell"]} | {k: r.get(k) for k in ("repeat", "run", "state")} for r in rows]
    write_json(folder / "sweep.json", {"experiment": name, "group": folder.name, "cells": cells})
    flat = [{k: v for k, v in (row["cell"] | row).items() if isinstance(v, str | int | float)} for row in rows]
    text = io.StringIO()
    table = csv.DictWriter(text, list(dict.fromkeys(itertools.chain.from_iterable(flat))))
    table.writeheader()
    table.writerows(flat)
    write_atomic(folder / "table.csv", text.getvalue())


def gather(rows: Sequence[Row], by: Sequence[str], value: str) -> dict[tuple[Any, ...], tuple[float, float, int]]:
    """Mean, standard deviation (0 of a single one) and count of a number, by the settings that tell cells apart.

    A number that a result does not hold, such as a loss that was none, counts as nan.
    """
    groups: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        number = math.nan if row[value] is None else float(row[value])
        groups.setdefault(tuple(row["cell"].get(key) for key in by), []).append(number)
    return {key: (fmean(v), stdev(v) if len(v) > 1 else 0.0, len(v)) for key, v in groups.items()}
