"""Selection of runs by folder, id, or the end of an id."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurm.reports.selection import RunFilter, select_runs
from tests.harness.commands import in_process_calls
from tests.harness.runs.synthetic_runs import SyntheticRun
from tests.harness.slurm.fake_slurm import FakeSlurm, call_slurm
from tests.unit.slurm.submitted_runs import write_submitted_run


@pytest.mark.parametrize("verb, run", [("status", "../x"), ("logs", "nothing"), ("cancel", "x")])
def test_unknown_runs_are_refused(fake: FakeSlurm, verb: str, run: str) -> None:
    process = in_process_calls.call_verb(verb, run, status=2, **fake.make_environment())  # type: ignore[arg-type]
    assert "no such run folder" in process.stderr
    assert "for a run in another folder, pass its path" in process.stderr


def test_the_end_of_an_id_selects_a_run(fake: FakeSlurm, runs: Path) -> None:
    path = write_submitted_run(runs, "4711").path
    process = call_slurm(fake, "status", "--runs-folder", str(runs), path.name[-4:])
    assert path.name in process.stdout, process.stderr


def test_a_run_folder_without_config_is_reported(fake: FakeSlurm, runs: Path) -> None:
    complete = SyntheticRun(number=1, steps=20).write(runs)
    broken = SyntheticRun(number=2, steps=20).write(runs)
    (broken.path / "config.yaml").unlink()
    (runs / "sweeps").mkdir()
    process = call_slurm(fake, "status", f"--runs-folder={runs}")
    assert complete.path.name in process.stdout
    assert broken.path.name not in process.stdout
    assert process.stderr == f"not listed because config.yaml is missing: {broken.path.name}\n"


def test_last_selects_the_newest_of_the_named_runs_in_the_given_order(runs: Path) -> None:
    folders = [SyntheticRun(number=number, steps=4).write(runs) for number in range(3)]
    criteria = RunFilter(runs="0002 0000 0001", last="2")
    assert [folder.path.name[-4:] for folder in select_runs(criteria, runs)] == ["0002", "0001"]

    (runs / "sweeps" / "grid").mkdir(parents=True)
    cells = [{"values": {}, "run": folders[number].path.name} for number in (2, 1, 0)]
    (runs / "sweeps" / "grid" / "sweep.json").write_text(json.dumps({"cells": cells}))
    selected = select_runs(RunFilter(sweep="grid", last="1"), runs)
    assert [folder.path.name[-4:] for folder in selected] == ["0002"]
