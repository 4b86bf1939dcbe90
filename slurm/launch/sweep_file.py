"""The file of a sweep: one experiment, settings of all points, a grid or a list of what differs between them.

    experiment: mnist_pipeline
    settings: {epochs: 1}             of every point
    grid: {optim.lr: [0.01, 0.1]}     every combination
    points: [{batch: 32}]             single ones beside them
    repeats: 1                        of each point; the n-th one more has a seed higher by n
    parallel: 1                       points at once
    nodes: 1                          hosts of each point

Or a Python grid of one experiment, as configs/sweeps/amp_accum.py, whose points `sweep=true` runs on this machine.

Read as text and checked by the types of the experiment's settings, all points before the first one starts.
Imports no torch.
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
from configs.sweeps import format_settings
from slurm.arguments import check_experiment_name, parse_count, suggest_nearest

KEYS = ("experiment", "settings", "grid", "points", "repeats", "parallel", "nodes")
NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}")
MOST = 10_000  # points


@dataclasses.dataclass(frozen=True)
class Point:
    """One run of a sweep."""

    values: dict[str, str]
    repeat: int
    settings: Experiment

    @property
    def words(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.values.items())

    @property
    def key(self) -> str:
        return make_point_key(self.values, self.repeat)


@dataclasses.dataclass(frozen=True)
class Grid:
    """A sweep as its file describes it."""

    name: str
    experiment: str
    settings: dict[str, str]
    points: list[Point]
    parallel: int


def make_point_key(values: Mapping[str, str], repeat: int) -> str:
    """Write the text that tells a point from the others of its sweep."""
    return json.dumps([sorted(values.items()), repeat])


def read_sweep_file(path: str, more: list[str]) -> Grid:
    """Read the sweep of a file, with `key=value` words for all of its points on top. Raises UserError."""
    if not path:
        found = sorted(str(file.relative_to(config.ROOT)) for file in (config.ROOT / "configs/sweeps").glob("[a-z]*.*"))
        raise UserError(f"GRID is missing; write make sweep GRID=<file> (there are {', '.join(found)})")
    name = Path(path).stem
    tree = read_python_grid(name, more) if is_python_grid(Path(path)) else read_yaml_tree(Path(path))
    if not NAME.fullmatch(name):
        raise UserError(f"GRID={path}: the sweep is named after its file; use letters, digits and ._- alone")
    for key in tree:
        if key not in KEYS:
            hint = suggest_nearest(key, KEYS) or f"; there are {', '.join(KEYS)}"
            raise UserError(f"{path}: unknown key {key}{hint}")
    try:
        if not tree.get("experiment"):
            raise UserError(f"experiment is missing; write a line such as experiment: {config.list_experiments()[0]}")
        experiment = check_experiment_name(require_one_value(tree.get("experiment", ""), "experiment"))
        counts = {key: require_one_value(tree.get(key, "1"), key) for key in ("repeats", "parallel", "nodes")}
        repeats, parallel, nodes = (parse_count(key, text, MOST) for key, text in counts.items())
        common = flatten_settings(tree.get("settings") or {}, "settings") | config.parse_command_line(more).values
        cells = list_cells(tree)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    seeds = [cell.get("seed", common.get("seed")) for cell in cells] if repeats > 1 else []
    if any("seed" in cell for cell in cells) and seeds:
        raise UserError(f"{path}: repeats={repeats} chooses seeds, and so do the points; leave one of them out")
    common |= {"launch.nodes": str(nodes)} if nodes > 1 else {}
    points = [make_point(path, name, experiment, common, cell, r) for r in range(repeats) for cell in cells]
    for key, same in itertools.groupby(sorted(points, key=lambda one: one.key), lambda one: one.key):
        if len(list(same)) > 1:
            words = " ".join(f"{name}={value}" for name, value in json.loads(key)[0])
            raise UserError(f"{path}: the point {words} is there more than once")
    return Grid(name, experiment, common, points, parallel)


def is_python_grid(path: Path) -> bool:
    """Check for a file that is the grid of an experiment, configs/sweeps/NAME.py."""
    here = path.absolute().parent == config.ROOT / "configs" / "sweeps"
    return here and path.suffix == ".py" and path.stem in config.list_experiments() and path.is_file()


def read_python_grid(experiment: str, more: list[str]) -> dict[str, Any]:
    """Read the points of configs/sweeps/NAME.py as a tree of text, for a machine without GPUs."""
    cfg = config.load_config(config.import_schema(experiment), more)
    grid = importlib.import_module(f"configs.sweeps.{experiment}").GRID
    repeats = str(cfg.repeats) if grid.new_seeds else "1"  # type: ignore[attr-defined]
    points = [format_settings(cell) for cell in grid.points(cfg, 0)]
    return {"experiment": experiment, "points": points, "repeats": repeats}


def read_yaml_tree(path: Path) -> dict[str, Any]:
    """Read the file's tree, all scalars as text. Raises UserError."""
    try:
        tree = yaml.load(path.read_text(), Loader=config.LOADER)  # noqa: S506 (it builds only str, list, dict)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"GRID={path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML{config.describe_yaml_position(error)}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path}: expected `key: value` lines with experiment and grid or points")
    return tree


def require_one_value(value: Any, key: str) -> str:
    """Return a value that is one text. Raises UserError."""
    if not isinstance(value, str):
        raise UserError(f"{key}: expected one value")
    return value


def flatten_settings(tree: Any, key: str) -> dict[str, str]:
    """Flatten nested settings, each one value; a list is written as on the command line. Raises UserError."""
    if not isinstance(tree, dict):
        raise UserError(f"{key}: expected `key: value`")
    flat = config.flatten_mapping(tree)
    return {name: f"[{','.join(value)}]" if isinstance(value, list) else str(value) for name, value in flat.items()}


def list_cells(tree: Mapping[str, Any]) -> list[dict[str, str]]:
    """List every combination of the grid, and the single points after them. Raises UserError."""
    axes, listed = tree.get("grid") or {}, tree.get("points") or []
    if not isinstance(axes, dict) or not isinstance(listed, list):
        raise UserError("grid is `key: [values]`, and points a list of `{key: value}`")
    flat = config.flatten_mapping(axes)
    for key, values in flat.items():
        if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
            raise UserError(f"grid: {key}: expected a list of values, as in [1, 2]")
    product = itertools.product(*([(key, value) for value in values] for key, values in flat.items()))
    cells = [dict(cell) for cell in product] if flat else []
    cells += [flatten_settings(one, "points") for one in listed]
    if not cells or len(cells) > MOST:
        raise UserError(f"{format_count(len(cells), 'point')}; name some in grid or points, at most {MOST:,}")
    return cells


def make_point(
    path: str, name: str, experiment: str, common: dict[str, str], cell: dict[str, str], repeat: int
) -> Point:
    """Make one point, its settings checked as those of a run are. Raises UserError that says where."""
    grouped = {"wandb.group": name} | common
    schema = config.import_schema(experiment)
    try:
        settings = config.load_config(schema, [f"{key}={value}" for key, value in (grouped | cell).items()])
        if repeat:
            cell = cell | {"seed": str(settings.seed + repeat)}
            settings.seed += repeat
        if getattr(settings, "sweep", False):
            raise UserError("sweep=true runs a grid of its own; leave it out")
        if settings.runs != common.get("runs", settings.runs):
            raise UserError("runs is the same for all points; write it under settings")
        schedules.check_schedule_of_config(settings)
        algorithms.check_algorithm_of_config(settings)
        own_files.check_files_of_config(settings.optim)
        initial_weights.check_weights_of_config(settings)
        wandb_account.read_requested_mode(settings)
    except UserError as error:
        where = " ".join(f"{key}={value}" for key, value in cell.items())
        raise UserError(f"{path}, at {where}: {error}") from None
    return Point(cell, repeat, settings)
