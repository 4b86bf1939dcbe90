"""Settings that name files with custom code: copies in a run replace the original files."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.config import config, custom_code
from common.runs import provenance
from common.system.errors import UserError
from configs.mnist_pipeline import Config


def test_the_copy_in_a_run_replaces_the_file_unless_its_key_is_new(tmp_path: Path) -> None:
    file = tmp_path / "custom.py"
    file.write_text("def halve(step, total):\n    return 0.5\n")
    settings = config.load_config(Config, [f"optim.decay={file}:halve"], {})
    code_folder = tmp_path / "code"
    provenance.copy_custom_files(settings, code_folder)
    file.write_text("def halve(step, total):\n    return -1\n")

    resolved_settings = custom_code.use_file_copies(settings, code_folder)
    path, _, _ = resolved_settings.optim.decay.partition(":")
    assert Path(path).is_relative_to(code_folder)
    assert settings.optim.decay == f"{file}:halve", "the original config must not change"
    new_settings = custom_code.use_file_copies(settings, code_folder, ["optim.decay"])
    assert new_settings.optim.decay == settings.optim.decay

    custom_code.check_custom_settings(settings, code_folder)
    with pytest.raises(UserError, match=r"optim.decay=.* returned -1"):
        custom_code.check_custom_settings(settings, code_folder, ["optim.decay"])


def test_only_rank_0_needs_the_file_of_an_algorithm(tmp_path: Path) -> None:
    arguments = ["launch.backend=builtin", f"launch.algorithm={tmp_path / 'missing.py'}:f"]
    settings = config.load_config(Config, arguments, {})
    custom_code.check_custom_settings(settings, is_main=False)
    with pytest.raises(UserError, match=r"missing\.py"):
        custom_code.check_custom_settings(settings)
