"""Temporary folders in which forked ranks meet."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest

from common.ranks.rendezvous_dir import create_rendezvous_dir
from tests.harness.ranks.folder_rendezvous import fork


def create_folder_and_die() -> None:
    create_rendezvous_dir()
    os.kill(os.getpid(), signal.SIGKILL)


def test_only_folders_of_killed_launchers_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    fork(create_folder_and_die).join()
    (abandoned,) = tmp_path.iterdir()
    locked, lock = create_rendezvous_dir()
    for folder in (abandoned, locked):
        os.utime(folder, (0, 0))
    recent = tmp_path / "rendezvous-1-new"  # its launcher has not locked it yet
    recent.mkdir()

    created, lock_of_created = create_rendezvous_dir()
    assert set(tmp_path.iterdir()) == {locked, recent, created}
    os.close(lock)
    os.close(lock_of_created)
