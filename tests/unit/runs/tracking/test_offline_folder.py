"""Folders of offline W&B runs."""

from __future__ import annotations

from pathlib import Path

from common.runs.tracking.offline_folder import choose_offline_path


def test_runs_of_the_same_second_get_different_folders(tmp_path: Path) -> None:
    name = "offline-run-20261231_235959-abc"
    assert choose_offline_path(tmp_path, name) == tmp_path / name
    (tmp_path / name).mkdir()
    assert choose_offline_path(tmp_path, name) == tmp_path / "offline-run-20270101_000000-abc"
