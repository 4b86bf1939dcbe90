"""Helpers of the config tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.config import config
from common.system.errors import UserError
from configs.mnist_pipeline import Config
from configs.shared import Experiment


def get_refusal(*arguments: str) -> str:
    """Return the message with which arguments of mnist_pipeline are refused."""
    with pytest.raises(UserError) as caught:
        config.load_config(Config, list(arguments), {})
    return str(caught.value)


def create_run(runs: Path, settings: Experiment) -> Path:
    """Create the folder of a run with its config.yaml, and return the folder."""
    name = config.get_experiment_name(type(settings))
    run = runs / f"{name}-1-2-3"
    run.mkdir()
    (run / "config.yaml").write_text(config.format_yaml(settings))
    return run
