"""Messages of the tracker: runs that were not tracked, and tracking that Ctrl-C ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.runs.folder import RunFolder, write_json
from common.runs.tracking import wandb_tracker
from common.runs.tracking.wandb_tracker import Tracker


def test_a_run_that_was_not_tracked_names_the_log(tmp_path: Path) -> None:
    attempt = RunFolder(tmp_path).claim_attempt()
    log = tmp_path / "attempts" / "0001" / "logs" / "tracker.log"
    assert Tracker(attempt, None).describe("") == f"W&B: nothing was tracked; see {log}"


def test_ctrl_c_ends_tracking_with_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user presses Ctrl-C while the tracking process of an offline run writes the W&B run."""
    attempt = RunFolder(tmp_path).claim_attempt()
    (tmp_path / "wandb").mkdir()
    write_json(tmp_path / "wandb" / "status.json", {"mode": "offline"})

    def press_ctrl_c(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(wandb_tracker, "wait_for_tracking_process", press_ctrl_c)
    message = Tracker(attempt, None).finish(timeout=60)
    assert "W&B: offline; upload the run with: make sync RUNS=" in message
    assert "tracking is incomplete: stopped by Ctrl-C" in message
