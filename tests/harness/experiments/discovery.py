"""Find modules of an experiment by its name, so that no shared module lists the experiments."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from common.config import config


def import_if_exists(module: str) -> ModuleType | None:
    """Import a module, or return None if no module has this name."""
    return importlib.import_module(module) if importlib.util.find_spec(module) else None


def import_experiment_modules(pattern: str) -> dict[str, ModuleType]:
    """Import one module per experiment; experiments without this module are skipped.

    `pattern` is the name of the module, with {} instead of the name of the experiment.
    """
    modules = {name: import_if_exists(pattern.format(name)) for name in config.list_experiments()}
    return {name: module for name, module in modules.items() if module is not None}
