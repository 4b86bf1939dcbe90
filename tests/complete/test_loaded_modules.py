"""An experiment loads the core and its own technique, but no other technique, no backend, and no TLS.

The modules are loaded without garbage collection.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean

import pytest

from common.config import config
from tests.harness.commands import execution
from tests.harness.commands.processes import make_environment
from tests.harness.environment.shared_results import create_folder_once
from tests.harness.experiments.loaded_modules import count_tokens
from tests.harness.experiments.registry import ENTRIES

TRAINED = {entry.name: entry.allowed_techniques for entry in ENTRIES if entry.allowed_techniques is not None}
"""For each experiment that is trained, the techniques that it may load."""
SHARED = [entry.name for entry in ENTRIES if not entry.own_technique]
"""Experiments whose technique cannot be deleted, so that a deletion does not change the mean."""
MAX_MEAN_TOKENS = 92_400  # 75 % of the tokens that these scripts loaded when the core imported every technique


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> dict[str, dict[str, int]]:
    """The loaded modules of each experiment, with their tokens."""
    settings = f"data.name=digits data.cache={cache} data.test_limit=100 steps=20 log.progress=none launch.threads=1"
    names = config.list_experiments()
    arguments = [f"{name}={settings}" if name in TRAINED else name for name in names]

    def list_modules(folder: Path) -> None:
        command = [sys.executable, "-m", "tests.harness.experiments.loaded_modules", str(folder), *arguments]
        execution.execute_command(command, env=make_environment(), timeout=300, real_process=True, status=0)

    folder = create_folder_once(tmp_path_factory, "modules", list_modules)
    files = {name: json.loads((folder / f"{name}.json").read_text()) for name in names}
    tokens: dict[str, dict[str, int]] = {}
    for name, modules in files.items():
        tokens[name] = {module: count_tokens(file) for module, file in modules.items()}
    return tokens


@pytest.mark.parametrize("name", TRAINED)
def test_an_experiment_loads_no_other_technique(loaded: dict[str, dict[str, int]], name: str) -> None:
    packages = [module.split(".") for module in loaded[name]]
    techniques = {package[2] for package in packages if package[:2] == ["common", "techniques"] and len(package) > 2}
    assert techniques <= TRAINED[name]
    assert not [module for module in loaded[name] if module.startswith("common.backend")]


def test_scripts_load_three_quarters_of_what_they_loaded(loaded: dict[str, dict[str, int]]) -> None:
    for name, modules in loaded.items():
        print(f"{name:20} {len(modules):4} modules of common, {sum(modules.values()):8,} tokens")
    assert fmean(sum(loaded[name].values()) for name in SHARED) <= MAX_MEAN_TOKENS


def test_common_api_is_imported_without_garbage_collection() -> None:
    program = "import gc, common.api; print(gc.isenabled(), gc.get_freeze_count() > 100_000)"
    command = [sys.executable, "-c", program]
    completed = execution.execute_command(command, env=make_environment(), real_process=True, status=0)
    assert completed.stdout.split() == ["True", "True"]
