"""Stop requests at random moments, with a small set of images.

tests/harness/runs/random_stops.py does the same with 60,000 images.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest

from common.runs.folder import RunFolder
from tests.harness.commands import execution
from tests.harness.commands.processes import find_processes, make_environment
from tests.harness.environment.randomness import create_random
from tests.harness.runs import random_stops
from tests.harness.runs.random_stops import Trial, execute_trials


def test_a_run_that_is_stopped_at_any_moment_loses_nothing(tmp_path: Path) -> None:
    finished_trials = execute_trials(
        image_count=600, moments=1, random_stream=create_random("moments"), scratch=tmp_path
    )
    assert not [trial.format_line() for trial in finished_trials if trial.problem]


def test_a_failed_trial_does_not_affect_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(images: Path, folder: Path) -> execution.Command:
        return execution.Command(["sleep", "60"], env=make_environment(MARK=str(folder)), real_process=True)

    def stop(process: execution.Command, trial: Trial) -> None:
        raise OSError("of the run\nno space left")

    monkeypatch.setattr(random_stops, "start_run", start)
    monkeypatch.setattr(random_stops, "stop_run", stop)
    monkeypatch.setattr(random_stops, "run_uninterrupted", lambda images, folder: (RunFolder(folder), 0.01))
    monkeypatch.setattr(tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["random_moments", "--images=12", "--moments=1"])
    assert random_stops.main() == 1
    lines = capsys.readouterr().out.splitlines()
    reports_failure = ["FAILED: OSError: no space left" in line for line in lines]
    assert reports_failure == [False, True, True, False, False]
    assert lines[3].startswith("2 trials: 2 different or failed")
    assert str(tmp_path) in lines[4]
    assert not find_processes(str(tmp_path)), "a process of a failed trial is left"
