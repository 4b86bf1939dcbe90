"""Sweep over the strategies of an experiment: which strategies are legal, and the table of their runs.

This module does not import torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.config import config
from common.config.command_line import parse_command_line
from common.runs import provenance
from common.system.errors import UserError
from common.system.text import format_count
from configs.shared import Experiment, Launch
from configs.strategies import Settings, Strategies
from configs.sweeps import strategies as strategy_grid
from slurm.arguments import check_experiment_name, parse_count
from slurm.launch.sweep_file import SweepPlan, SweepPoint, make_point
from slurm.launch.sweep_folder import DEVICE_KEY, REFUSED, SweepFolder, format_settings
from slurm.reports import strategies as strategy_report

GRID_FILE = Path("configs", "sweeps", "strategies.py")
MAX_RANKS = 1024
MAX_ROUNDS = 100
MAX_MISSING_NAMES = 5


@dataclasses.dataclass(frozen=True)
class StrategyRequest:
    """The experiment, the number of ranks, and the number of runs of each strategy, as text. Empty if not given."""

    experiment: str
    ranks: str
    rounds: str

    @property
    def given_variables(self) -> list[str]:
        """Names of the make variables that are given."""
        values = {"NAME": self.experiment, "RANKS": self.ranks, "ROUNDS": self.rounds}
        return [name for name, value in values.items() if value]


def is_strategy_grid(path: str) -> bool:
    """Return whether a path is the grid of strategies."""
    return Path(path).resolve() == config.ROOT / GRID_FILE


def plan_strategies(request: StrategyRequest, overrides: Sequence[str], *, runs_here: bool = True) -> SweepPlan:
    """Return the sweep over all legal strategies of an experiment. Raises UserError for invalid arguments.

    If the runs are executed on this machine (`runs_here`), all of them use the same type of device.
    """
    if not request.experiment or not request.ranks:
        example = f"make sweep GRID={GRID_FILE} NAME=ddp_multinode RANKS=4"
        raise UserError(f"GRID={GRID_FILE} needs the experiment and the number of ranks, such as {example}")
    experiment = check_experiment_name(request.experiment)
    ranks = parse_count("RANKS", request.ranks, MAX_RANKS)
    rounds = parse_count("ROUNDS", request.rounds or "1", MAX_ROUNDS)
    strategies = find_strategies(experiment)
    given_settings = parse_command_line(overrides).values
    check_overrides(experiment, given_settings, strategies)

    schema = config.import_schema(experiment)
    settings = {**strategy_grid.SETTINGS, **strategies.run, **given_settings}
    reference, *others = strategy_grid.list_points(strategies, ranks, parse_nodes(given_settings))
    try:
        cfg = load_strategy(schema, settings, reference)
    except UserError as error:
        raise explain_error(error, strategies, given_settings) from None
    if runs_here:
        settings |= choose_device(cfg.launch, ranks)
    legal = [reference]
    refused: dict[str, str] = {}
    for point in others:
        try:
            load_strategy(schema, settings, point)
            legal.append(point)
        except UserError as error:
            refused[strategies.format_label(point)] = str(error)

    name = make_sweep_name(experiment, ranks, given_settings)
    points: list[SweepPoint] = []
    for repeat in range(rounds):
        for values in legal:
            checked = make_point(name, experiment, settings, values, repeat)
            points.append(dataclasses.replace(checked, title=strategies.format_label(values)))
    return SweepPlan(name, experiment, settings, points, parallel=1, refused=refused, compares_strategies=True)


def explain_error(error: UserError, strategies: Strategies, given_settings: Settings) -> UserError:
    """Return an error about settings of all strategies. It says which of the settings it names the sweep has set."""
    message = str(error)
    named_settings = re.split(r"[\s,:;]+", message)
    sweep_settings = {}
    for key, text in strategies.run.items():
        if key not in given_settings and f"{key}={text}" in named_settings:
            sweep_settings[key] = text
    if sweep_settings:
        message += f". The sweep sets {format_settings(sweep_settings)}; set another value in ARGS"
    return UserError(message)


def find_strategies(experiment: str) -> Strategies:
    """Return the strategies of an experiment. Raises UserError if it has none."""
    strategies = config.import_schema(experiment).strategies
    if strategies is None:
        names = [name for name in config.list_experiments() if config.import_schema(name).strategies is not None]
        raise UserError(f"NAME={experiment}: this experiment has no strategies to compare; use {', '.join(names)}")
    return strategies


def check_overrides(experiment: str, given_settings: Settings, strategies: Strategies) -> None:
    """Raise UserError if ARGS sets a setting in which the strategies differ, or too few steps."""
    varied = sorted(given_settings.keys() & strategies.varied_settings)
    if varied:
        names = " and ".join(varied)
        command = f"make exp NAME={experiment} ARGS={shlex.quote(format_settings(given_settings))}"
        raise UserError(
            f"ARGS sets {names}, but the sweep compares all values; omit {names}, or start one run: {command}"
        )
    if given_settings.get("steps") == "1":
        raise UserError("steps=1: the first step of a run is not timed; use steps=2 or more, such as steps=20")


def choose_device(launch: Launch, ranks: int) -> dict[str, str]:
    """Return the setting with which all strategies use the same type of device on this machine."""
    gpus = provenance.count_visible_gpus()
    if not gpus or launch.device != "auto" or launch.mixed or launch.excludes_gpus:
        return {}
    return {DEVICE_KEY: "cuda" if gpus >= ranks else "cpu"}


def parse_nodes(given_settings: Settings) -> int:
    """Return the number of hosts. An invalid number is refused later."""
    text = given_settings.get("launch.nodes", "1")
    return max(1, int(text)) if text.isdecimal() else 1


def load_strategy(schema: type[Experiment], settings: Settings, point: Settings) -> Experiment:
    """Return the config of a strategy. Raises UserError if its checks refuse the strategy."""
    return config.load_config(schema, [f"{name}={value}" for name, value in {**settings, **point}.items()])


def make_sweep_name(experiment: str, ranks: int, given_settings: Mapping[str, Any]) -> str:
    """Return the name of the sweep. Sweeps with different settings have different names."""
    name = f"strategies-{experiment}-{ranks}"
    relevant = {key: value for key, value in given_settings.items() if key != "runs"}
    if not relevant:
        return name
    digest = hashlib.sha256(json.dumps(sorted(relevant.items())).encode()).hexdigest()
    return f"{name}-{digest[:4]}"


def print_refused(refused: Mapping[str, str]) -> None:
    """Print the strategies that are refused, with the reasons, which are given by label."""
    labels: dict[str, list[str]] = {}
    for label, reason in refused.items():
        labels.setdefault(reason, []).append(label)
    for reason, members in labels.items():
        omitted = f" and {len(members) - 1} more" if len(members) > 1 else ""
        print(f"  not available: {members[0]}{omitted}: {reason}", flush=True)


def format_settings_of_all_runs(plan: SweepPlan) -> str:
    """Return the settings of all runs that affect the measurements."""
    return strategy_grid.format_fixed_settings(plan.points[0].settings, plan.settings)


def report_strategies(sweep: SweepFolder) -> None:
    """Print the table of the strategies, and draw time against memory, as far as their runs have finished."""
    runs: dict[str, list[strategy_report.StrategyRun]] = {}
    missing = []
    refused = {}
    for point in sweep.plan.points:
        folder = sweep.find_run_folder(point)
        run = strategy_report.read_run(folder, point.repeat) if folder is not None else None
        state = sweep.read_state(point)
        if run is not None:
            runs.setdefault(point.label, []).append(run)
        elif state == REFUSED:
            refused[point.label] = sweep.read_reason(point)
        elif state == "FINISHED":
            missing.append(f"{point.label} (no timed step; use steps=2 or more)")
        else:
            missing.append(f"{point.label} ({state.lower()})")
    print_refused(refused)
    if missing:
        names = ", ".join(missing[:MAX_MISSING_NAMES])
        omitted = f" and {len(missing) - MAX_MISSING_NAMES} more" if len(missing) > MAX_MISSING_NAMES else ""
        print(f"not in the table: {format_count(len(missing), 'run')}: {names}{omitted}")
    if len(runs) < 2:
        remedy = "repeat the command (FAILED=1 also repeats failed runs)"
        print(f"no table: fewer than two strategies have finished; {remedy}", flush=True)
        return
    settings = format_settings_of_all_runs(sweep.plan)
    process = sweep.plan.points[0].label
    strategy_report.print_report(sweep.plan.experiment, runs, sweep.path, settings, process)
    print(f"to measure again, delete {sweep.path / 'sweep.json'} and repeat the command", flush=True)
