"""Temporary state of a tracking process."""

from __future__ import annotations

import errno
import fcntl
from pathlib import Path

import pytest

from common.runs.folder import RunFolder
from common.runs.tracking.wandb_scratch import hold_tracking_lock


def test_a_run_on_a_disk_without_locks_is_tracked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    (tmp_path / "wandb").mkdir()
    with hold_tracking_lock(RunFolder(tmp_path), wait=False) as is_held:
        assert is_held
