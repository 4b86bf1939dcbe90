"""Only one attempt of a run trains at a time, and a run whose folder is moved stops.

At random moments: tests/harness/runs/claims_campaign.py; on a cluster: tests/cluster/test_claims.py.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from common.checkpoint import storage
from tests.harness.commands.processes import WAIT_TIMEOUT, Settings, find_processes, get_only_run, wait_until
from tests.harness.environment.randomness import draw_seed
from tests.harness.experiments.registry import REPLICATED_ENTRY, STAGED_ENTRY
from tests.harness.runs import claims_campaign
from tests.harness.runs.claims_campaign import LocalRuns
from tests.harness.runs.long_runs import ENDLESS_SETTINGS, start_long_run
from tests.harness.runs.resuming import resume_run

PAIRS = [("running", "resume", "cancel"), ("running", "cancel", "resume"), ("stopped", "resume", "resume")]


@pytest.mark.drawn
def test_pairs_of_resume_and_cancel_leave_one_attempt_that_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims_campaign, "TOTAL_STEPS", 800)
    monkeypatch.setattr(claims_campaign, "MAX_FIRST_DELAY", 0.5)
    draw = random.Random(draw_seed("claims"))
    place = LocalRuns(tmp_path)
    cases = [claims_campaign.execute_case(place, draw, pair) for pair in PAIRS]
    assert not [case.describe() for case in cases if case.problems]


def test_a_training_run_is_not_resumed_and_a_superseded_attempt_stops(tmp_path: Path, quick: Settings) -> None:
    with start_long_run(STAGED_ENTRY.name, *quick, *ENDLESS_SETTINGS, runs=tmp_path) as process:
        folder = get_only_run(tmp_path)
        refused = resume_run(STAGED_ENTRY, folder, status=2)
        owner = f"attempt 1, process {process.pid} on this machine"
        assert f"{folder.path.name} is already running ({owner}); wait for it" in refused.stderr, refused
        assert len(folder.list_attempts()) == 1
        folder.claim_attempt()  # as older versions do, or a host that sees neither lock nor process
        out, err = process.communicate(WAIT_TIMEOUT)
    assert process.returncode == 2, out
    assert "test accuracy" not in out, out
    assert f"attempt 1 of {folder.path.name} was superseded by attempt 2; stopping without saving" in err
    assert not folder.result
    assert not storage.list_resumable_checkpoints(folder)
    assert "Traceback" not in err


def test_a_run_whose_folder_was_moved_stops_within_seconds(tmp_path: Path, quick: Settings) -> None:
    runs = tmp_path / "runs"
    away = tmp_path / "away"
    settings = (*quick, *REPLICATED_ENTRY.make_rank_settings(2), *ENDLESS_SETTINGS, "checkpoint.every_seconds=1")
    with start_long_run(REPLICATED_ENTRY.name, *settings, runs=runs, WANDB_MODE="offline") as process:
        folder = get_only_run(runs)
        wait_until(lambda: storage.list_resumable_checkpoints(folder), "there is a checkpoint")
        folder.path.rename(away)
        out, err = process.communicate(WAIT_TIMEOUT)
    assert process.returncode == 2, out + err
    (line,) = err.strip().splitlines()
    assert line.startswith(f"error: {folder.path} was moved or deleted, so training stopped after step ")
    assert line.endswith(f"; move it back, then resume with: make exp RESUME={folder.path}")
    assert list(runs.iterdir()) == []
    assert "WARNING" not in out
    away.rename(folder.path)
    assert "WARNING" not in folder.list_attempts()[0].log_file(0).read_text()
    assert storage.list_resumable_checkpoints(folder)
    assert not find_processes(str(tmp_path))
