"""Program behind `sweep=true`: run the grid of an experiment on this machine, then summarize the results.

    python -m slurm.launch.experiment_sweep NAME [KEY=VALUE ...]

The grid is defined in configs/sweeps/NAME.py. `make sweep` skips points that have been run. In contrast, this program
always runs all points of the grid. This module does not import torch.

runs/sweeps/<name>-<time>-<4 hex>/
  sweep.json     W&B group, and the settings, folder name, and state of each run
  table.csv      settings and numeric results of each run, one line per run
  ...            plots that the grid defines
"""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.config import config, config_keys
from common.config.command_line import parse_command_line
from common.measure import plots
from common.ranks.rank_info import read_rank_info
from common.runs import provenance, result
from common.runs.folder import RunFolder, write_atomic
from common.runs.result_columns import list_columns
from common.system.causes import Cause
from common.system.errors import UserError, exit_on_user_error
from common.system.output import discard_unwritable_output
from common.system.signals import STOPPED_STATUSES
from common.training import attempt
from configs.shared import Experiment
from configs.sweeps import Bars, RunRow, Summary, SweepGrid
from slurm.launch import sweep
from slurm.launch.sweep_file import SweepPlan, SweepPoint, format_values, get_repeats, load_grid
from slurm.launch.sweep_folder import SweepFolder

QUIET = ("log.level=warning", "log.progress=none")


def plan_points(
    grid: SweepGrid[Experiment], name: str, cfg: Experiment, arguments: Sequence[str], gpus: int
) -> list[SweepPoint]:
    """Check the settings of each point in all repeats, and return the points.

    Raises UserError, which names the point, if the settings of a point are invalid.
    """
    points: list[SweepPoint] = []
    for repeat, cell in itertools.product(range(get_repeats(cfg)), grid.points(cfg, gpus)):
        values = cell | ({"seed": cfg.seed + repeat} if grid.new_seeds else {})
        overrides = format_values(values)
        try:
            settings = config.load_config(config.import_schema(name), [*QUIET, *arguments, "sweep=false", *overrides])
        except UserError as error:
            raise UserError(f"sweep point {' '.join(overrides)}: {error}") from None
        points.append(SweepPoint(values, repeat, settings.adapt_to_gpus(gpus)))
    return points


def set_wandb_group(point: SweepPoint, group: str) -> SweepPoint:
    """Return a point whose run belongs to a W&B group."""
    settings = config_keys.replace_values(point.settings, {"wandb.group": group})
    return dataclasses.replace(point, settings=settings)


class ResultTable:
    """Table of a sweep's results. The table is written to table.csv in the folder of the sweep."""

    def __init__(self, sweep_folder: SweepFolder) -> None:
        self.sweep = sweep_folder
        self.path = sweep_folder.path
        self.rows: list[RunRow] = []

    def add_run(self, point: SweepPoint, folder: RunFolder, status: int) -> None:
        """Add the result of a run and write the table, so that even an interrupted sweep has a table.

        `status` is the exit status of the run. If the run was refused before its first attempt, the run folder is
        removed. The error that the run printed is then raised as a UserError.
        """
        refusal = self.sweep.remove_refused_run(point, folder, status)
        if refusal is not None:
            raise UserError(refusal)
        parsed = result.parse_result(folder.result)
        row: RunRow = {"cell": point.values, "repeat": point.repeat, "run": folder.path.name}
        row["exit_status"] = folder.result.get("exit_status")
        self.rows.append(row | parsed.flatten_values() | list_columns(parsed))
        self.write_csv()

    def write_csv(self) -> None:
        """Write the table. A result with the name of a setting, such as `sparsity`, is named `result.sparsity`."""
        setting_names = set[str]().union(*(row["cell"] for row in self.rows))
        lines: list[dict[str, Any]] = []
        for row in self.rows:
            values = dict(row["cell"])
            for name, value in row.items():
                column = f"result.{name}" if name in setting_names else name
                values[column] = value
            lines.append({name: value for name, value in values.items() if isinstance(value, str | int | float)})
        text = io.StringIO()
        table = csv.DictWriter(text, list(dict.fromkeys(itertools.chain.from_iterable(lines))))
        table.writeheader()
        table.writerows(lines)
        write_atomic(self.path / "table.csv", text.getvalue())


def report_summary(summary: Summary, folder: Path) -> None:
    """Draw the plots of a sweep in the folder of the sweep, and print the summary."""
    links: list[str] = []
    for plot in summary.plots:
        path = folder / plot.file
        links.append(path.absolute().as_uri())
        if isinstance(plot, Bars):
            plots.draw_bar_chart(path, plot.heights, plot.y, title=plot.title)
        else:
            plots.draw_curves(
                path, plot.series, plot.x, plot.y, plot.levels, computed=plot.computed, log=True, title=plot.title
            )
    lines = dict(summary.lines)
    lines["plots" if len(links) > 1 else "plot"] = ", ".join(links)
    lines["sweep"] = str(folder)
    for title, text in lines.items():
        separator = "\n" if "\n" in text else "  "
        print(f"  {title}{separator}{text}", flush=True)


def report_stop(table: ResultTable, cfg: Experiment, number_of_points: int) -> None:
    """Print what a stopped sweep has measured, and how to resume a run that was stopped."""
    finished = [row for row in table.rows if row.get("state") == "finished"]
    stopped = [row for row in table.rows if row["exit_status"] in STOPPED_STATUSES]
    text = f"the sweep was stopped after {len(finished)} of {number_of_points} runs; a new sweep runs all points again"
    print(text, file=sys.stderr)
    for row in stopped:
        folder = RunFolder(table.sweep.runs / row["run"])
        print(f"{row['run']}: {attempt.describe_continuation(folder, cfg, Cause.OTHER)}", file=sys.stderr)


def main(name: str, arguments: Sequence[str]) -> int:
    """Run all points of an experiment's grid and return the exit status. Raises UserError."""
    if parse_command_line(arguments).resume or read_rank_info(os.environ) is not None:
        raise UserError("sweep=true starts its own runs; do not combine it with srun, torchrun, RESUME, or --resume")
    cfg = config.load_config(config.import_schema(name), arguments)
    gpus = provenance.count_visible_gpus()
    grid = load_grid(name)
    points = plan_points(grid, name, cfg, arguments, gpus)
    folder = RunFolder.create(Path(cfg.runs).absolute() / "sweeps", name, config.format_yaml(cfg)).path
    points = [set_wandb_group(point, folder.name) for point in points]
    print(f"{name}: sweep of {len(points)} runs in {folder}", flush=True)

    plan = SweepPlan(folder.name, name, {}, points, parallel=1)
    sweep_folder = SweepFolder(folder, plan)
    table = ResultTable(sweep_folder)
    try:
        status = sweep.run_points_locally(
            sweep_folder, [(point, None) for point in points], table.add_run, stops_with_run=True
        )
    except UserError:
        if not table.rows:
            shutil.rmtree(folder)
        raise
    if status in STOPPED_STATUSES:
        report_stop(table, cfg, len(points))
        return status
    finished = [row for row in table.rows if row.get("state") == "finished"]
    if finished:
        report_summary(grid.summarize(cfg, gpus, finished), folder)
    for row in table.rows:
        if row.get("state") != "finished":
            label = " ".join(format_values(row["cell"]))
            print(f"error: {row['run']} ({label}) did not finish; see its screen.log", file=sys.stderr)
    return 0 if len(finished) == len(points) else 1


if __name__ == "__main__":
    discard_unwritable_output()
    with exit_on_user_error():
        sys.exit(main(sys.argv[1], sys.argv[2:]))
