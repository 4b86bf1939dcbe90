"""Reader of sweep files. A sweep file specifies an experiment, its settings, and a grid or a list of points.

    experiment: mnist_pipeline
    settings: {epochs: 1}             settings for all points
    grid: {optim.lr: [0.01, 0.1]}     each combination of these values is a point
    points: [{batch: 32}]             additional points
    repeats: 1                        number of runs of each point; each repeat increases the seed by 1
    parallel: 1                       maximum number of points that run at the same time
    nodes: 1                          number of hosts of each point

A sweep file can also be the Python grid of an experiment, such as configs/sweeps/amp_accum.py. `sweep=true` runs the
same grid on this machine.

Settings are read as text and checked against the types of the experiment's config. All points are checked before the
first one starts. This module does not import torch.
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

from common.config import config, custom_code, yaml_values
from common.config.command_line import parse_command_line
from common.models import initial_weights
from common.runs.tracking import wandb_account
from common.system.errors import UserError
from common.system.text import format_count
from configs.fields import find_group
from configs.shared import Experiment, Sweep
from configs.sweeps import SweepGrid, format_settings, is_sweep
from slurm.arguments import check_experiment_name, parse_count, suggest_nearest

KEYS = ("experiment", "settings", "grid", "points", "repeats", "parallel", "nodes")
NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}")
MAX_POINTS = 10_000


@dataclasses.dataclass(frozen=True)
class SweepPoint:
    """A point of a sweep, which is executed as one run."""

    values: dict[str, Any]
    """Settings that distinguish the point from other points, by dotted name."""
    repeat: int
    settings: Experiment
    title: str = ""
    """Short name of the point; if empty, its settings are its name."""

    @property
    def label(self) -> str:
        return self.title or " ".join(format_values(self.values))

    @property
    def key(self) -> str:
        return make_point_key(self.values, self.repeat)


@dataclasses.dataclass(frozen=True)
class SweepPlan:
    """Checked content of a sweep file."""

    name: str
    experiment: str
    settings: dict[str, str]
    points: list[SweepPoint]
    parallel: int
    """Maximum number of points that run at the same time."""
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Reason why the checks refuse a strategy, by its label."""
    compares_strategies: bool = False
    """Whether the points are strategies, which a table compares."""


def format_values(values: dict[str, Any]) -> list[str]:
    """Format the settings of a point as command-line arguments."""
    return [f"{key}={text}" for key, text in format_settings(values).items()]


def make_point_key(values: Mapping[str, Any], repeat: int) -> str:
    """Return a string that identifies a point within its sweep."""
    return json.dumps([sorted(values.items()), repeat])


def read_sweep_file(path: str, overrides: list[str]) -> SweepPlan:
    """Read a sweep file and apply `key=value` overrides to all of its points. Raises UserError."""
    if not path:
        raise UserError(f"GRID is missing; run make sweep GRID=<file> (available files: {list_sweep_files()})")
    name = Path(path).stem
    tree = read_python_grid(name, overrides) if is_python_grid(Path(path)) else read_yaml_tree(Path(path))
    if not NAME.fullmatch(name):
        raise UserError(f"GRID={path}: the file name is the name of the sweep; use only letters, digits, and ._-")
    for key in tree:
        if key not in KEYS:
            hint = suggest_nearest(key, KEYS) or f"; valid keys are {', '.join(KEYS)}"
            raise UserError(f"{path}: unknown key {key}{hint}")
    try:
        return build_plan(name, tree, parse_command_line(overrides).values)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def list_sweep_files() -> str:
    """Return the sweep files of this project as a comma-separated list."""
    files = sorted((config.ROOT / "configs" / "sweeps").glob("[a-z]*.*"))
    return ", ".join(str(file.relative_to(config.ROOT)) for file in files)


def build_plan(name: str, tree: Mapping[str, Any], overrides: Mapping[str, str]) -> SweepPlan:
    """Build the plan of a sweep from the parsed sweep file, and check all points. Raises UserError."""
    if not tree.get("experiment"):
        raise UserError(f"experiment is missing; add a line such as experiment: {config.list_experiments()[0]}")
    experiment = check_experiment_name(require_single_string(tree["experiment"], "experiment"))
    counts: dict[str, int] = {}
    for key in ("repeats", "parallel", "nodes"):
        counts[key] = parse_count(key, require_single_string(tree.get(key, "1"), key), MAX_POINTS)
    settings = flatten_settings(tree.get("settings") or {}, "settings")
    if "nodes" in tree and "launch.nodes" in settings:
        raise UserError("nodes and launch.nodes in settings are both given; remove one of them")
    if counts["nodes"] > 1:
        settings["launch.nodes"] = str(counts["nodes"])
    settings |= overrides

    cells = expand_grid_and_points(tree)
    repeats = counts["repeats"]
    if repeats > 1 and any("seed" in cell for cell in cells):
        raise UserError(f"repeats={repeats} cannot be combined with points that set seed; omit repeats or seed")
    points: list[SweepPoint] = []
    for repeat in range(repeats):
        points += [make_point(name, experiment, settings, cell, repeat) for cell in cells]
    keys: set[str] = set()
    for point in points:
        if point.key in keys:
            raise UserError(f"the point {point.label} is listed more than once; remove the duplicate")
        keys.add(point.key)
    return SweepPlan(name, experiment, settings, points, counts["parallel"])


def is_python_grid(path: Path) -> bool:
    """Return whether a file is the Python grid of an experiment, configs/sweeps/NAME.py."""
    is_in_sweeps = path.absolute().parent == config.ROOT / "configs" / "sweeps"
    return is_in_sweeps and path.suffix == ".py" and path.stem in config.list_experiments() and path.is_file()


def load_grid(experiment: str) -> SweepGrid[Experiment]:
    """Import the grid of an experiment from configs/sweeps/NAME.py."""
    grid: SweepGrid[Experiment] = importlib.import_module(f"configs.sweeps.{experiment}").GRID
    return grid


def get_repeats(cfg: Experiment) -> int:
    """Return the number of runs per point of an experiment's Python grid."""
    settings = find_group(cfg, Sweep)
    assert settings is not None, "an experiment with a Python grid has sweep settings"
    return settings.repeats


def read_python_grid(experiment: str, overrides: list[str]) -> dict[str, Any]:
    """Return the Python grid of an experiment in the form of a parsed sweep file.

    The grid is expanded as for a machine without GPUs. Raises UserError for invalid settings.
    """
    cfg = config.load_config(config.import_schema(experiment), overrides)
    grid = load_grid(experiment)
    if not grid.new_seeds and any(override.startswith("repeats=") for override in overrides):
        raise UserError("repeats applies to sweep=true only, because make sweep runs each point once; omit repeats")
    repeats = str(get_repeats(cfg)) if grid.new_seeds else "1"
    points = [format_settings(cell) for cell in grid.points(cfg, 0)]
    return {"experiment": experiment, "points": points, "repeats": repeats}


def read_yaml_tree(path: Path) -> dict[str, Any]:
    """Parse a YAML file and keep all scalars as text. Raises UserError."""
    try:
        tree = yaml_values.load_yaml(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        remedy = f"name a readable sweep file (available files: {list_sweep_files()})"
        raise UserError(f"GRID={path} cannot be read ({reason}); {remedy}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML{yaml_values.describe_yaml_error(error)}; correct the file") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path}: expected `key: value` lines, including experiment and either grid or points")
    return tree


def require_single_string(value: Any, key: str) -> str:
    """Return `value` if it is a single string. Raises UserError for any other value."""
    if not isinstance(value, str):
        raise UserError(f"{key}: expected a single value")
    return value


def flatten_settings(tree: Any, key: str) -> dict[str, str]:
    """Flatten nested settings into text values by dotted name. Raises UserError.

    Lists are formatted as on the command line.
    """
    if not isinstance(tree, dict):
        raise UserError(f"{key}: expected `key: value` pairs")
    return format_settings(yaml_values.flatten_mapping(tree))


def expand_grid_and_points(tree: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return each combination of the values under `grid`, then the items of `points`. Raises UserError."""
    grid = tree.get("grid") or {}
    single_points = tree.get("points") or []
    if not isinstance(grid, dict) or not isinstance(single_points, list):
        raise UserError("grid must contain `key: [values]` pairs, and points must be a list of `{key: value}` items")
    axes = yaml_values.flatten_mapping(grid)
    for key, values in axes.items():
        if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
            raise UserError(f"grid: {key}: expected a list of values, such as [1, 2]")
    cells: list[dict[str, str]] = []
    for combination in itertools.product(*axes.values()) if axes else ():
        cells.append(dict(zip(axes, combination, strict=True)))
    cells += [flatten_settings(point, "points") for point in single_points]
    if not cells or len(cells) > MAX_POINTS:
        size = format_count(len(cells), "point")
        raise UserError(f"the sweep has {size}; specify 1 to {MAX_POINTS:,} points under grid or points")
    return cells


def make_point(
    name: str, experiment: str, common_settings: dict[str, str], cell: dict[str, str], repeat: int
) -> SweepPoint:
    """Create a point, and check its settings in the same way as the settings of a single run.

    Raises UserError, which names the point, if a setting is invalid.
    """
    values: dict[str, Any] = {"wandb.group": name} | common_settings | cell
    try:
        settings = config.load_config(config.import_schema(experiment), format_values(values))
        if repeat:
            settings = dataclasses.replace(settings, seed=settings.seed + repeat)
            cell = cell | {"seed": str(settings.seed)}
        if is_sweep(settings):
            raise UserError("sweep=true would start another sweep; omit sweep")
        if "runs" in cell:
            raise UserError("runs must be the same for all points; set it under settings")
        custom_code.check_custom_settings(settings)
        initial_weights.check_weights_of_config(settings)
        wandb_account.read_requested_mode(settings)
    except UserError as error:
        raise UserError(f"point {' '.join(format_values(cell))}: {error}") from None
    return SweepPoint(cell, repeat, settings)
