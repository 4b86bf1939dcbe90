"""End of an attempt that another attempt has superseded."""

from __future__ import annotations

import dataclasses

import pytest

from common.runs.tracking.wandb_tracker import Tracker
from common.system.exit_status import EXIT_REFUSED
from common.training.attempt import Attempt, TrainingOutcome
from common.training.run import Run
from configs.shared import Wandb


def test_a_superseded_attempt_only_ends_its_tracking(
    run: Run, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The newer attempt converts the rows, and writes result and history."""
    cfg = dataclasses.replace(run.cfg, wandb=Wandb(mode="offline"))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr("common.runs.claims.WITHDRAWAL_SECONDS", 0.1)
    tracker = Tracker.start(cfg, run.folder)
    attempt = Attempt(run.folder, run.prepared, is_new=False, tracker=tracker)
    run.folder.claim_attempt()
    capfd.readouterr()
    attempt.record_end(TrainingOutcome(EXIT_REFUSED), cfg, submitted=False)
    assert capfd.readouterr() == ("", "")
    assert not run.folder.result
    assert not (run.folder.attempt_folder / "logs" / "tracker.log").exists(), "nothing was converted"
