"""Source files that a run keeps."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from common.runs import provenance


def test_a_file_whose_name_is_not_utf8_prevents_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "api.py").touch()
    (tmp_path / os.fsdecode(b"Erl\xe4uterung.txt")).touch()
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    assert provenance.list_source_files() == [Path("common/api.py")]
