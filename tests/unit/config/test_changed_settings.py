"""Settings that an attempt has changed, as read from its changed.json."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.config.changed_settings import read_last_changes
from common.system.errors import UserError


@pytest.fixture
def changes_file(tmp_path: Path) -> Path:
    file = tmp_path / "attempts/0001/changed.json"
    file.parent.mkdir(parents=True)
    return file


def test_changed_settings_are_read_as_they_were_written(changes_file: Path, tmp_path: Path) -> None:
    changes_file.write_text('{"devices": [["auto"], ["cpu", "cpu"]], "optim.lr": ["0.1", "0.2"]}')
    changes = read_last_changes(tmp_path)
    assert changes == {"devices": (["auto"], ["cpu", "cpu"]), "optim.lr": ("0.1", "0.2")}


@pytest.mark.parametrize(
    "text", ["", "[1]", '{"optim.lr": "0.1"}', '{"optim.lr": ["0.1"]}', '{"optim.lr": ["0.1", null]}']
)
def test_a_damaged_file_is_refused(text: str, changes_file: Path, tmp_path: Path) -> None:
    changes_file.write_text(text)
    with pytest.raises(UserError, match=r"changed.json is damaged"):
        read_last_changes(tmp_path)
