"""Settings that may name custom code: all checkers exist, files of a run replace the originals."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from common.config import config, custom_code, lookup
from common.ranks import backend_setup
from common.runs import provenance
from common.system.errors import UserError
from common.training.hooks import RecoveryHook
from configs import mnist_pipeline
from configs.dataparallel import RECOVERY, SUPERVISOR
from configs.shared import BACKEND_SETUPS, TrainingExperiment


@pytest.mark.parametrize("name", config.list_experiments())
def test_every_declared_checker_exists_and_takes_a_config(name: str) -> None:
    schema = config.import_schema(name)
    settings = list(custom_code.list_custom_settings(schema()))
    of_training = {"optim.name", "optim.decay"} if issubclass(schema, TrainingExperiment) else set()
    assert {setting.key for setting in settings} >= {"launch.algorithm"} | of_training
    for setting in settings:
        assert len(inspect.signature(lookup.import_object(setting.checker)).parameters) == 1, setting.key


def test_what_the_core_looks_up_exists_and_has_the_documented_functions() -> None:
    for backend in BACKEND_SETUPS:
        module = backend_setup.import_backend_setup(backend)
        for name, parameters in re.findall(r"`(\w+)\(([^)]*)\)`", str(backend_setup.__doc__)):
            assert len(inspect.signature(getattr(module, name)).parameters) == len(parameters.split(",")), name
    names = ["address", "size", "settings", "kill", "start", "start_timeout"]
    assert list(inspect.signature(lookup.import_object(SUPERVISOR)).parameters) == names
    assert backend_setup.import_backend_setup("gloo") is None
    assert issubclass(lookup.import_object(RECOVERY), RecoveryHook)


def test_the_copy_in_a_run_replaces_the_file_unless_its_key_is_new(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def halve(step, total):\n    return 0.5\n")
    settings = config.load_config(mnist_pipeline.Config, [f"optim.decay={file}:halve"], {})
    code = tmp_path / "code"
    provenance.copy_custom_files(settings, code)
    file.write_text("def halve(step, total):\n    return -1\n")

    resolved = custom_code.use_file_copies(settings, code)
    assert Path(resolved.optim.decay.partition(":")[0]).is_relative_to(code)
    assert settings.optim.decay == f"{file}:halve", "the config itself stays as it was checked"
    assert custom_code.use_file_copies(settings, code, ["optim.decay"]).optim.decay == settings.optim.decay

    custom_code.check_custom_settings(settings, code)
    with pytest.raises(UserError, match=r"optim.decay=.* returned -1"):
        custom_code.check_custom_settings(settings, code, ["optim.decay"])


def test_only_rank_0_needs_the_file_of_an_algorithm(tmp_path: Path) -> None:
    words = ["launch.backend=builtin", f"launch.algorithm={tmp_path / 'missing.py'}:f"]
    settings = config.load_config(mnist_pipeline.Config, words, {})
    custom_code.check_custom_settings(settings, is_main=False)
    with pytest.raises(UserError, match=r"missing\.py"):
        custom_code.check_custom_settings(settings)
