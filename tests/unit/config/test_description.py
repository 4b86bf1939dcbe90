"""The settings run.name and run.notes: any printable text survives config.yaml."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.config import config
from configs.mnist_pipeline import Config

NAMES = (
    "yes",
    "null",
    "1e3",
    "0x1f",
    "???",
    "- a: b",
    "#x",
    "'",
    '"',
    "[a]",
    "{a}",
    "a/../b",
    "-n",
    "$(id)",
    "é 🏖",
    "",
)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_stored_unchanged(name: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    settings = config.load_config(Config, [f"run.name={name}", f"run.notes={name}"], {})
    file.write_text(config.format_yaml(settings))
    loaded = config.load_config(Config, ["--config", str(file)], {})
    assert loaded.run.name == loaded.run.notes == name


def test_a_resumed_run_may_get_another_name(tmp_path: Path) -> None:
    """The change is recorded, and has no effect on results."""
    settings = config.load_config(Config, ["run.name=a"], {})
    (tmp_path / "config.yaml").write_text(config.format_yaml(settings))
    renamed = config.load_config(Config, ["run.name=b"], {})
    assert config.find_changes(tmp_path, renamed) == {"run.name": ("a", "b")}
