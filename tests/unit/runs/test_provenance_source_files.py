"""Source files that a run keeps."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from common.runs import provenance
from common.runs.folder import RunFolder


def test_a_file_whose_name_is_not_utf8_prevents_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "api.py").touch()
    (tmp_path / os.fsdecode(b"Erl\xe4uterung.txt")).touch()
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    assert provenance.list_source_files() == [Path("common/api.py")]


def test_hidden_files_are_not_copied_if_git_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (".env", ".git/config", "Makefile", "common/api.py", "common/.env"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("WANDB_API_KEY=secret")
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    folder = RunFolder(tmp_path / "runs")
    provenance.copy_source(folder)
    copied = [str(path.relative_to(folder.path / "code")) for path in (folder.path / "code").rglob("*")]
    assert sorted(copied) == ["Makefile", provenance.CHECKSUMS, "common", "common/api.py"]
