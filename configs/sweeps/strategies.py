"""Grid of `make sweep GRID=configs/sweeps/strategies.py NAME=<experiment> RANKS=4`: every strategy of an experiment.

The strategies are those of the config of the experiment (`Strategies`). The first point is one process, with which the
others are compared.
"""

from __future__ import annotations

from configs.shared import Experiment
from configs.strategies import Settings, Strategies

SETTINGS: Settings = {"log.memory": "1", "wandb.model": "false"}
"""Settings of every run, in addition to those of the experiment. The trained models are not needed in W&B."""
MAIN_SETTINGS = ("model", "batch", "steps")
"""Settings that a caption names also if they have their default values."""
HIDDEN_PREFIXES = ("runs", "log.", "wandb.", "data.cache", "data.test_limit", "evaluate_every", "plot", "prompt")
"""Starts of the names of settings that a caption omits, because they do not affect a training step."""


def list_points(strategies: Strategies, ranks: int, nodes: int = 1) -> list[dict[str, str]]:
    """Return the settings of each strategy: first one process, then all divisions among `ranks` ranks on `nodes` hosts.

    The checks of the config may refuse some of them.
    """
    host = {"launch.nodes": "1"} if nodes > 1 else {}
    points = [settings | host for settings in strategies.list_candidates(1)]
    return points + strategies.list_candidates(ranks, nodes) if ranks > 1 else points


def format_fixed_settings(cfg: Experiment, settings: Settings) -> str:
    """Return the model, the batch and the steps of all runs, and other settings that affect the measurements.

    `cfg` is the config of one of the runs, and `settings` contains the settings of all runs.
    """
    shown = {name: str(getattr(cfg, name)) for name in MAIN_SETTINGS if hasattr(cfg, name)}
    for name, value in settings.items():
        if not name.startswith(HIDDEN_PREFIXES):
            shown[name] = value
    return " ".join(f"{name}={value}" for name, value in shown.items())
