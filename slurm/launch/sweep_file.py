"""The file of a sweep: an experiment, settings of all points, and a grid or list of points.

    experiment: mnist_pipeline
    settings: {epochs: 1}             of every point
    grid: {optim.lr: [0.01, 0.1]}     every combination
    points: [{batch: 32}]             further points
    repeats: 1                        of each point; each repeat has a seed higher by 1
    parallel: 1                       points that run at a time
    nodes: 1                          hosts of each point

Or the Python grid of an experiment, such as configs/sweeps/amp_accum.py, which `sweep=true` runs on this machine.

Settings are read as text and checked against the types of the experiment's settings, all points before the first one
starts. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from common.core import config
from common.core.errors import UserError
from common.core.text import format_count
from common.distributed.transport import algorithms
from common.models import initial_weights
from common.pipeline import schedules
from common.runs import wandb_account
from common.training.optimization import own_files
from configs.shared import Experiment
from configs.sweeps import SweepGrid, format_settings
from slurm.arguments import check_experiment_name, parse_count, suggest_nearest

KEYS = ("experiment", "settings", "grid", "points", "repeats", "parallel", "nodes")
NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}")
MAX_POINTS = 10_000


@dataclasses.dataclass(frozen=True)
class SweepPoint:
    """One run of a sweep."""

    values: dict[str, Any]
    """Settings in which it differs from other points, by dotted name."""
    repeat: int
    settings: Experiment

    @property
    def label(self) -> str:
        return " ".join(format_values(self.values))

    @property
    def key(self) -> str:
        return make_point_key(self.values, self.repeat)


@dataclasses.dataclass(frozen=True)
class SweepPlan:
    """The content of a sweep's file."""

    name: str
    experiment: str
    settings: dict[str, str]
    points: list[SweepPoint]
    parallel: int
    """Points that run at a time."""


def format_values(values: dict[str, Any]) -> list[str]:
    """Format the settings of a point as arguments of a command line."""
    return [f"{key}={text}" for key, text in format_settings(values).items()]


def make_point_key(values: Mapping[str, Any], repeat: int) -> str:
    """Return a text that identifies a point of a sweep."""
    return json.dumps([sorted(values.items()), repeat])


def read_sweep_file(path: str, overrides: list[str]) -> SweepPlan:
    """Read the plan of a sweep; `key=value` overrides apply to all its points. Raises UserError."""
    if not path:
        files = sorted((config.ROOT / "configs" / "sweeps").glob("[a-z]*.*"))
        names = ", ".join(str(file.relative_to(config.ROOT)) for file in files)
        raise UserError(f"GRID is missing; write make sweep GRID=<file> (there are {names})")
    name = Path(path).stem
    tree = read_python_grid(name, overrides) if is_python_grid(Path(path)) else read_yaml_tree(Path(path))
    if not NAME.fullmatch(name):
        raise UserError(f"GRID={path}: the sweep is named after its file; use only letters, digits and ._-")
    for key in tree:
        if key not in KEYS:
            hint = suggest_nearest(key, KEYS) or f"; there are {', '.join(KEYS)}"
            raise UserError(f"{path}: unknown key {key}{hint}")
    try:
        return build_plan(name, tree, config.parse_command_line(overrides).values)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def build_plan(name: str, tree: Mapping[str, Any], overrides: Mapping[str, str]) -> SweepPlan:
    """Build the plan of a sweep from its file's tree and check all points. Raises UserError."""
    if not tree.get("experiment"):
        raise UserError(f"experiment is missing; write a line such as experiment: {config.list_experiments()[0]}")
    experiment = check_experiment_name(require_one_value(tree["experiment"], "experiment"))
    counts: dict[str, int] = {}
    for key in ("repeats", "parallel", "nodes"):
        counts[key] = parse_count(key, require_one_value(tree.get(key, "1"), key), MAX_POINTS)
    settings = flatten_settings(tree.get("settings") or {}, "settings") | dict(overrides)
    if counts["nodes"] > 1:
        settings["launch.nodes"] = str(counts["nodes"])

    cells = list_cells(tree)
    repeats = counts["repeats"]
    if repeats > 1 and any("seed" in cell for cell in cells):
        raise UserError(f"repeats={repeats} chooses seeds, and so do the points; leave one of them out")
    points: list[SweepPoint] = []
    for repeat in range(repeats):
        points += [make_point(name, experiment, settings, cell, repeat) for cell in cells]
    keys: set[str] = set()
    for point in points:
        if point.key in keys:
            raise UserError(f"the point {point.label} is there more than once")
        keys.add(point.key)
    return SweepPlan(name, experiment, settings, points, counts["parallel"])


def is_python_grid(path: Path) -> bool:
    """Check for a file that is the grid of an experiment, configs/sweeps/NAME.py."""
    is_in_sweeps = path.absolute().parent == config.ROOT / "configs" / "sweeps"
    return is_in_sweeps and path.suffix == ".py" and path.stem in config.list_experiments() and path.is_file()


def load_grid(experiment: str) -> SweepGrid[Experiment]:
    """Load the grid of an experiment, configs/sweeps/NAME.py."""
    grid: SweepGrid[Experiment] = importlib.import_module(f"configs.sweeps.{experiment}").GRID
    return grid


def read_python_grid(experiment: str, overrides: list[str]) -> dict[str, Any]:
    """Read the points of configs/sweeps/NAME.py as a tree of text, for a machine without GPUs."""
    cfg = config.load_config(config.import_schema(experiment), overrides)
    grid = load_grid(experiment)
    repeats = str(cfg.repeats) if grid.new_seeds else "1"  # type: ignore[attr-defined]
    points = [format_settings(cell) for cell in grid.points(cfg, 0)]
    return {"experiment": experiment, "points": points, "repeats": repeats}


def read_yaml_tree(path: Path) -> dict[str, Any]:
    """Read the file's tree, all scalars as text. Raises UserError."""
    try:
        tree = yaml.load(path.read_text(), Loader=config.YAML_LOADER)  # noqa: S506 (it builds only str, list, dict)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"GRID={path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML{config.describe_yaml_position(error)}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path}: expected `key: value` lines with experiment and grid or points")
    return tree


def require_one_value(value: Any, key: str) -> str:
    """Return a value that is a single text. Raises UserError."""
    if not isinstance(value, str):
        raise UserError(f"{key}: expected one value")
    return value


def flatten_settings(tree: Any, key: str) -> dict[str, str]:
    """Flatten nested settings to texts by dotted name, lists as on the command line. Raises UserError."""
    if not isinstance(tree, dict):
        raise UserError(f"{key}: expected `key: value`")
    return format_settings(config.flatten_mapping(tree))


def list_cells(tree: Mapping[str, Any]) -> list[dict[str, str]]:
    """List every combination of the grid, then the single points. Raises UserError."""
    grid = tree.get("grid") or {}
    single_points = tree.get("points") or []
    if not isinstance(grid, dict) or not isinstance(single_points, list):
        raise UserError("grid must be `key: [values]`, and points a list of `{key: value}`")
    axes = config.flatten_mapping(grid)
    for key, values in axes.items():
        if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
            raise UserError(f"grid: {key}: expected a list of values, as in [1, 2]")
    cells: list[dict[str, str]] = []
    for combination in itertools.product(*axes.values()) if axes else ():
        cells.append(dict(zip(axes, combination, strict=True)))
    cells += [flatten_settings(point, "points") for point in single_points]
    if not cells or len(cells) > MAX_POINTS:
        size = format_count(len(cells), "point")
        raise UserError(f"{size}; name some in grid or points, at most {MAX_POINTS:,}")
    return cells


def make_point(
    name: str, experiment: str, common_settings: dict[str, str], cell: dict[str, str], repeat: int
) -> SweepPoint:
    """Make a point and check its settings like those of a run. Raises UserError that names the point."""
    values: dict[str, Any] = {"wandb.group": name} | common_settings | cell
    try:
        settings = config.load_config(config.import_schema(experiment), format_values(values))
        if repeat:
            settings.seed += repeat
            cell = cell | {"seed": str(settings.seed)}
        if getattr(settings, "sweep", False):
            raise UserError("sweep=true runs another grid; leave it out")
        if settings.runs != common_settings.get("runs", settings.runs):
            raise UserError("runs is the same for all points; write it under settings")
        schedules.check_schedule_of_config(settings)
        algorithms.check_algorithm_of_config(settings)
        own_files.check_files_of_config(settings.optim)
        initial_weights.check_weights_of_config(settings)
        wandb_account.read_requested_mode(settings)
    except UserError as error:
        raise UserError(f"at {' '.join(format_values(cell))}: {error}") from None
    return SweepPoint(cell, repeat, settings)
