"""`sweep=true`: one experiment run with a grid of settings, each a run of its own, and what comes out side by side.

The grid of an experiment is configs/sweeps/NAME.py. One process imports torch for all runs.

runs/sweeps/<name>-<time>-<4 hex>/
  sweep.json     the group in W&B and, for each run, its settings, its folder's name, and how it ended
  table.csv      one line a run: its settings and the numbers of its result
  ...            the plots of the grid
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
import itertools
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from common.core import config
from common.core.errors import UserError
from common.core.signals import STOP_SIGNALS, STOPPED_STATUSES
from common.measure import plots
from common.runs import provenance
from common.runs import result as results
from common.runs.folder import Folder, write_atomic, write_json
from configs.shared import Experiment
from configs.sweeps import Bars, Grid, Row, Summary, format_settings

T = TypeVar("T", bound=Experiment)
QUIET = ("log.level=warning", "log.progress=none")


def load_grid(name: str) -> Grid[Experiment]:
    """Load the grid of an experiment, configs/sweeps/NAME.py."""
    grid: Grid[Experiment] = importlib.import_module(f"configs.sweeps.{name}").GRID
    return grid


def format_point(cell: dict[str, object]) -> str:
    """Return the settings of a point as they stand on a command line."""
    return " ".join(f"{name}={value}" for name, value in format_settings(cell).items())


def run_sweep(cfg: T, arguments: Sequence[str], start: Callable[[T], tuple[Folder | None, int]]) -> int:
    """Run all points with `start`, which returns a run's folder and exit status; return the sweep's exit status.

    The settings of every point are checked before the first one starts. Raises UserError.
    """
    name, gpus = config.get_experiment_name(type(cfg)), provenance.count_visible_gpus()
    grid = load_grid(name)
    planned = plan_runs(grid, cfg, arguments, gpus)
    folder = Folder.create(Path(cfg.runs) / "sweeps", name, config.format_yaml(cfg)).path
    print(f"{name}: a sweep of {len(planned)} runs, folder {folder}", flush=True)
    rows: list[Row] = []
    for number, (row, chosen) in enumerate(planned, 1):
        chosen.wandb.group = folder.name
        print(f"{number:>4} of {len(planned)}  {format_point(row['cell'])}", end="", flush=True)
        try:
            with (
                open(os.devnull, "w") as nowhere,
                contextlib.redirect_stdout(nowhere),  # its logs have it
                keep_signal_handlers() as stops,
            ):
                made, status = start(chosen)
        except UserError:
            if not rows:
                shutil.rmtree(folder)
            raise
        assert made is not None
        for other, later in planned[number:]:
            if other["cell"] == row["cell"]:
                copy_measured_settings(grid.measured, made, later)
        found = results.parse_result(made.result)
        values = found.flatten_values() | found.list_columns()
        rows.append(row | {"run": made.path.name, "exit_status": status} | values)
        print(f"  {rows[-1].get('state', 'failed')}", flush=True)
        write_tables(folder, name, rows)
        if status in STOPPED_STATUSES:
            return status  # the stop request was for the sweep
        if stops:  # too late for a run that was at its end, which counts as finished
            return 128 + stops[0]
    done = [row for row in rows if row.get("state") == "finished"]
    if done:
        report_sweep(grid.summarise(cfg, gpus, done), folder)
    failed = [row for row in rows if row.get("state") != "finished"]
    for row in failed:
        print(f"error: {row['run']} ({format_point(row['cell'])}) did not finish; see its logs", file=sys.stderr)
    return 1 if failed else 0


def report_sweep(summary: Summary, folder: Path) -> None:
    """Draw the plots of a sweep into its folder, and print its table."""
    files = []
    for plot in summary.plots:
        files.append((folder / plot.file).absolute().as_uri())
        if isinstance(plot, Bars):
            plots.draw_bars(folder / plot.file, plot.heights, plot.y, title=plot.title)
        else:
            more: Any = {"levels": plot.levels, "computed": plot.computed, "title": plot.title}
            plots.draw_curves(folder / plot.file, plot.series, plot.x, plot.y, log=True, **more)
    ends = {"plots" if len(files) > 1 else "plot": ", ".join(files), "sweep": str(folder)}
    for title, line in (dict(summary.lines) | ends).items():
        print(f"  {title}  {line}" if "\n" not in line else f"  {title}\n{line}", flush=True)


def plan_runs(grid: Grid[Experiment], cfg: T, arguments: Sequence[str], gpus: int) -> list[tuple[Row, T]]:
    """Return each run's cell of the grid and its config. Raises UserError where settings do not fit together."""
    planned = []
    for repeat, cell in itertools.product(range(cfg.repeats), grid.points(cfg, gpus)):  # type: ignore[attr-defined]
        values = cell | ({"seed": cfg.seed + repeat} if grid.new_seeds else {})
        own = [f"{key}={text}" for key, text in format_settings(values).items()]
        try:
            chosen = config.load_config(type(cfg), [*QUIET, *arguments, "sweep=false", *own])
        except UserError as error:
            raise UserError(f"sweep, at {' '.join(own)}: {error}") from None
        planned.append(({"cell": values, "repeat": repeat}, chosen))
    return planned


def copy_measured_settings(names: Sequence[str], made: Folder, later: Experiment) -> None:
    """Copy settings that a run has measured for itself into the config of one that comes after it."""
    found = config.read_config_file(made.path / "config.yaml")
    for name in names:
        setattr(later, name, getattr(later, name) or found.get(name) or [])


@contextlib.contextmanager
def keep_signal_handlers() -> Iterator[list[int]]:
    """Restore the signal handlers at the end of the block; the list that is yielded then holds its stop signals."""
    before, received = {number: signal.getsignal(number) for number in STOP_SIGNALS}, list[int]()
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    earlier = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield received
    finally:
        signal.set_wakeup_fd(earlier)
        for number, handler in before.items():
            signal.signal(number, handler)
        with contextlib.suppress(BlockingIOError):
            received += [number for number in os.read(reader, 4096) if number in STOP_SIGNALS]
        os.close(reader)
        os.close(writer)


def write_tables(folder: Path, name: str, rows: Sequence[Row]) -> None:
    """Write sweep.json and table.csv of the runs so far, so that a sweep that is ended early leaves them."""
    cells = [{"values": r["cell"]} | {k: r.get(k) for k in ("repeat", "run", "state")} for r in rows]
    write_json(folder / "sweep.json", {"experiment": name, "group": folder.name, "cells": cells})
    flat = [{k: v for k, v in (row["cell"] | row).items() if isinstance(v, str | int | float)} for row in rows]
    text = io.StringIO()
    table = csv.DictWriter(text, list(dict.fromkeys(itertools.chain.from_iterable(flat))))
    table.writeheader()
    table.writerows(flat)
    write_atomic(folder / "table.csv", text.getvalue())
