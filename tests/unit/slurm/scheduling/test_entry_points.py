"""Old runs are called by the names that their own source has."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from common.core.errors import UserError
from common.runs import provenance
from common.runs.folder import Folder, write_json
from slurm.scheduling import entry_points
from slurm.scheduling.entry_points import CURRENT, VERSIONS, JobReference, find_entry_points
from tests.harness.warm import ROOT


def test_a_new_run_folder_carries_the_version_of_its_source(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    provenance.copy_source(folder)
    assert find_entry_points(folder) == CURRENT


def test_a_source_without_a_version_has_the_first_one(tmp_path: Path) -> None:
    assert find_entry_points(Folder(tmp_path)) == VERSIONS[1]


def test_a_newer_source_is_refused(tmp_path: Path) -> None:
    (tmp_path / "code" / "slurm").mkdir(parents=True)
    write_json(tmp_path / "code" / "slurm" / "entry_points.json", {"version": max(VERSIONS) + 1})
    with pytest.raises(UserError, match="newer version of this project"):
        find_entry_points(Folder(tmp_path))


def test_the_entry_points_of_today_exist() -> None:
    for module in (CURRENT.job, CURRENT.requeue, ".".join([CURRENT.submit[0], "__main__"])):
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), module


@pytest.mark.parametrize("points", VERSIONS.values(), ids=[f"version {number}" for number in VERSIONS])
def test_a_job_is_that_of_the_source_on_the_path(points: entry_points.EntryPoints, tmp_path: Path) -> None:
    """Unpickled where only the run's source is on the path, and it knows nothing of today's modules."""
    module = tmp_path / "code" / f"{points.job.replace('.', '/')}.py"
    module.parent.mkdir(parents=True)
    module.write_text("class Job:\n    def __init__(self, folder):\n        self.folder = folder\n")
    (tmp_path / "job.pkl").write_bytes(pickle.dumps(JobReference(points.job, "/runs/one")))
    program = "import pickle, sys; job = pickle.load(open('job.pkl', 'rb')); print(type(job).__module__, job.folder)"
    env = {"PYTHONPATH": str(tmp_path / "code"), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.stdout.split() == [points.job, "/runs/one"], done.stderr
