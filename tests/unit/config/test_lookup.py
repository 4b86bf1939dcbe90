"""Objects that are imported by name: checkers of settings, setups of backends, and hooks of techniques."""

from __future__ import annotations

import inspect
import re

import pytest

from common.config import config, custom_code, lookup
from common.ranks import backend_setup
from common.training.hooks import RecoveryHook
from configs.dataparallel import RECOVERY, SUPERVISOR
from configs.launch_rules import BACKEND_SETUPS
from configs.shared import TrainingExperiment


def list_parameters(function: object) -> list[str]:
    assert callable(function)
    return list(inspect.signature(function).parameters)


@pytest.mark.parametrize("name", config.list_experiments())
def test_each_declared_checker_exists_and_accepts_a_config(name: str) -> None:
    schema = config.import_schema(name)
    custom_settings = list(custom_code.list_custom_settings(schema()))
    keys = {setting.key for setting in custom_settings}
    assert "launch.algorithm" in keys
    if issubclass(schema, TrainingExperiment):
        assert {"optim.name", "optim.decay"} <= keys
    for setting in custom_settings:
        assert len(list_parameters(lookup.import_object(setting.checker))) == 1, setting.key


@pytest.mark.parametrize("backend", BACKEND_SETUPS)
def test_each_backend_setup_has_the_documented_functions(backend: str) -> None:
    module = backend_setup.import_backend_setup(backend)
    documented_functions = re.findall(r"`(\w+)\(([^)]*)\)`", str(backend_setup.__doc__))
    assert documented_functions
    for name, parameters in documented_functions:
        assert len(list_parameters(getattr(module, name))) == len(parameters.split(",")), name


def test_a_backend_of_torch_has_no_setup() -> None:
    assert backend_setup.import_backend_setup("gloo") is None


def test_the_supervisor_and_the_recovery_hook_exist() -> None:
    parameters = ["address", "size", "settings", "kill", "start", "start_timeout"]
    assert list_parameters(lookup.import_object(SUPERVISOR)) == parameters
    assert issubclass(lookup.import_object(RECOVERY), RecoveryHook)
