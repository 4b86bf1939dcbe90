"""The status of ended runs is stored, until the run changes."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.runs import description
from common.runs.folder import RunFolder, write_json
from slurm.reports.status_cache import FILE_NAME, list_watched_paths
from tests.harness.commands import in_process_calls
from tests.harness.runs.synthetic_runs import SyntheticRun

HOUR = 3600


def write_old_run(runs: Path, *, age: float = HOUR, **options: Any) -> RunFolder:
    """Write a run whose files last changed `age` seconds ago."""
    folder = SyntheticRun(**options).write(runs)
    set_age(folder, age)
    return folder


def set_age(folder: RunFolder, age: float) -> None:
    for path in list_watched_paths(folder.path, len(folder.list_attempts())):
        if Path(path).exists():
            os.utime(path, (time.time() - age, time.time() - age))


def list_statuses(runs: Path) -> list[dict[str, Any]]:
    """Return the output of `make status JSON=1`, without the ages of heartbeats."""
    statuses = json.loads(in_process_calls.call_verb("status", f"--runs-folder={runs}", "--json=1").stdout)
    for status in statuses:
        status.pop("heartbeat")
    return statuses


def list_stored_runs(runs: Path) -> list[str]:
    return list(json.loads((runs / FILE_NAME).read_text())["runs"])


def test_the_status_of_an_ended_run_is_read_once(tmp_path: Path) -> None:
    folder = write_old_run(tmp_path, settings={"run.name": "wide"})
    before = list_statuses(tmp_path)
    assert list_stored_runs(tmp_path) == [folder.path.name]
    config = folder.path / "config.yaml"
    config.write_text(config.read_text().replace("wide", "narrow"))  # changes the name, but no watched path
    assert list_statuses(tmp_path) == before
    (tmp_path / FILE_NAME).unlink()
    assert list_statuses(tmp_path) != before


def test_the_age_of_a_stored_heartbeat_increases(tmp_path: Path) -> None:
    write_old_run(tmp_path)
    ages = []
    for _ in range(2):
        (row,) = json.loads(in_process_calls.call_verb("status", f"--runs-folder={tmp_path}", "--json=1").stdout)
        ages.append(row["heartbeat"])
    assert ages[1] > ages[0] > HOUR


CHANGES: dict[str, Callable[[RunFolder], object]] = {
    "notes": lambda folder: description.write_notes(folder, "a note"),
    "archived": lambda folder: description.set_archived(folder, archived=True),
    "a new attempt": lambda folder: folder.claim_attempt(),
    "a new result": lambda folder: write_json(folder.path / "result.json", {"format": 2, "state": "cancelled"}),
    "metrics lost": lambda folder: folder.list_attempts()[-1].metrics_file.unlink(),
    "result moved": lambda folder: folder.move_result_of_previous_attempt(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_of_a_run_is_noticed(tmp_path: Path, change: Callable[[RunFolder], object]) -> None:
    folder = write_old_run(tmp_path)
    before = list_statuses(tmp_path)
    change(folder)
    after = list_statuses(tmp_path)
    assert after != before
    (tmp_path / FILE_NAME).unlink()
    assert list_statuses(tmp_path) == after


def test_only_ended_runs_that_changed_long_ago_are_stored(tmp_path: Path) -> None:
    write_old_run(tmp_path, age=-HOUR, number=0)
    write_old_run(tmp_path, number=1, state="running")
    write_old_run(tmp_path, number=2, state="lost")
    failed = write_old_run(tmp_path, number=3, state="failed")
    list_statuses(tmp_path)
    assert list_stored_runs(tmp_path) == [failed.path.name]


def test_a_damaged_result_is_read_each_time(tmp_path: Path) -> None:
    folder = write_old_run(tmp_path)
    (folder.path / "result.json").write_text("{")
    set_age(folder, HOUR)
    (status,) = list_statuses(tmp_path)
    assert status["detail"].startswith("result.json is damaged")
    assert not (tmp_path / FILE_NAME).exists()


def test_the_status_of_a_deleted_run_is_forgotten(tmp_path: Path) -> None:
    deleted, kept = (write_old_run(tmp_path, number=number) for number in range(2))
    list_statuses(tmp_path)
    shutil.rmtree(deleted.path)
    list_statuses(tmp_path)
    assert list_stored_runs(tmp_path) == [kept.path.name]


DAMAGED_FILES = [
    "",
    "[]",
    '{"format": 1}',
    '{"format": 1, "runs"',
    '{"format": 1, "runs": []}',
    '{"format": 1, "runs": {"RUN": []}}',
    '{"format": 1, "runs": {"RUN": {"times": [], "status": {}}}}',
    '{"format": 99, "runs": {}}',
    "[" * 100_000,
]


@pytest.mark.parametrize("content", DAMAGED_FILES)
def test_a_damaged_file_is_replaced(tmp_path: Path, content: str) -> None:
    folder = write_old_run(tmp_path)
    before = list_statuses(tmp_path)
    (tmp_path / FILE_NAME).write_text(content.replace("RUN", folder.path.name))
    assert list_statuses(tmp_path) == before
    assert list_stored_runs(tmp_path) == [folder.path.name]


@pytest.mark.parametrize("create", [Path.mkdir, os.mkfifo])
def test_runs_are_listed_if_the_file_of_statuses_is_something_else(tmp_path: Path, create: Callable[..., None]) -> None:
    write_old_run(tmp_path)
    create(tmp_path / FILE_NAME)
    (row,) = list_statuses(tmp_path)
    assert row["state"] == "finished"


DAMAGED_VALUES = {"detail": "\033[2J", "heartbeat": "now", "loss": "low", "state": None, "step": "7", "attempts": "1"}


@pytest.mark.parametrize("name, value", DAMAGED_VALUES.items(), ids=DAMAGED_VALUES)
def test_a_stored_value_that_cannot_be_printed_is_replaced(tmp_path: Path, name: str, value: Any) -> None:
    write_old_run(tmp_path)
    before = list_statuses(tmp_path)
    content = json.loads((tmp_path / FILE_NAME).read_text())
    (entry,) = content["runs"].values()
    entry["status"][name] = value
    write_json(tmp_path / FILE_NAME, content)
    assert list_statuses(tmp_path) == before
