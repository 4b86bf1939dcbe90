"""The list of runs: order, length, ages, and settings that do not fit together."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from slurm.reports import status
from tests.harness import inside
from tests.harness.made_runs import Made


def test_the_newest_runs_come_first_and_older_ones_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [Made(("mnist_pipeline", "ddp_multinode")[n % 2], n, steps=1).write(tmp_path).path.name for n in range(3)]
    monkeypatch.setattr(status, "MAX_LISTED_RUNS", 2)

    def listed(*words: str) -> list[str]:
        done = inside.run_verb("status", f"--runs-folder={tmp_path}", *words)
        return [line.split()[0] if "FINISHED" in line else line for line in done.stdout.splitlines()[1:]]

    assert listed() == [names[2], names[1], "not listed: 1 older run; to list all runs: make status ALL=1"]
    assert listed("--all=1") == names[::-1]
    assert sum("samples_per_second" in line for line in listed("--json=1")) == 3, "programs get all"


def test_the_shards_of_a_run_are_shown(tmp_path: Path) -> None:
    folder = Made("ddp_multinode", state="running", steps=200).write(tmp_path)
    assert "shards" not in inside.run_verb("status", f"--runs-folder={tmp_path}").stdout
    for rank, samples in ((0, 96), (1, 32)):
        folder.list_attempts()[-1].write_heartbeat(rank, 100, time.time(), samples=samples)
    assert "shards 96+32" in inside.run_verb("status", f"--runs-folder={tmp_path}").stdout


def test_waiting_needs_a_run(tmp_path: Path) -> None:
    done = inside.run_verb("status", f"--runs-folder={tmp_path}", "--wait=abc")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "error: WAIT requires RUN=<id>" in done.stderr


@pytest.mark.parametrize(("state", "failed"), [("failed", 1), ("lost", 1), ("finished", 0)])
def test_only_scripts_get_a_failing_status_for_a_run_that_failed(tmp_path: Path, state: str, failed: int) -> None:
    run = str(Made(state=state).write(tmp_path).path)
    asked = {"status": ["--", run], "doctor": [f"--run={run}"]}
    for verb, words in asked.items():
        assert [inside.run_verb(verb, *more, *words).returncode for more in ([], ["--json=1"])] == [0, failed], verb
    assert inside.run_verb("status", "--wait=1", "--", run).returncode == failed
