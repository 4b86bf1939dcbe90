"""Settings that a run has measured or chosen, stored in resolved.yaml."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from common.config.changed_settings import CHANGES_FILE, read_changes
from common.runs.folder import RunFolder
from common.runs.resolved_settings import record_choice_of_attempt, record_resolved_settings, warn_of_lost_choice
from tests.harness.environment.disk_calls import record_disk_calls


def test_resolved_settings_survive_a_power_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    run.mkdir()
    calls = record_disk_calls(monkeypatch)
    record_resolved_settings(run, {"split": "3"})
    draft = f".resolved.yaml.{os.getpid()}"
    assert calls == [f"sync {draft}", f"rename {draft}", "sync run"]


def test_a_lost_choice_is_reported_if_an_attempt_has_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    warn_of_lost_choice(tmp_path, "split")
    assert not capsys.readouterr().err
    RunFolder(tmp_path).claim_attempt().record_parent_attempt(None, 0)
    warn_of_lost_choice(tmp_path, "split")
    warning = f"WARNING: {tmp_path}/resolved.yaml no longer contains split, which earlier attempts have chosen"
    assert capsys.readouterr().err.startswith(warning)


def test_the_choice_of_an_attempt_is_no_change_if_it_has_the_previous_value(tmp_path: Path) -> None:
    attempt = RunFolder(tmp_path).claim_attempt()
    changes_file = attempt.attempt_folder / CHANGES_FILE
    changes_file.write_text('{"launch.algorithm": ["ring", "auto"], "seed": ["1", "2"]}')
    record_choice_of_attempt(tmp_path, "launch.algorithm", "ring")
    assert read_changes(changes_file) == {"seed": ("1", "2")}
