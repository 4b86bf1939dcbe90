"""The source of a run is called by the names that it has; a source of another version is refused."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from common.runs import provenance
from common.runs.folder import RunFolder, write_json
from common.system.errors import UserError
from slurm.scheduling import entry_points
from slurm.scheduling.entry_points import JobReference, check_source_version
from tests.harness.warm import ROOT


def test_a_new_run_folder_carries_the_version_of_its_source(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    provenance.copy_source(folder)
    check_source_version(folder)


@pytest.mark.parametrize("content", [{}, {"version": 3}, {"version": entry_points.VERSION + 1}])
def test_a_source_of_another_version_is_refused(tmp_path: Path, content: dict[str, int]) -> None:
    (tmp_path / "code" / "slurm").mkdir(parents=True)
    write_json(tmp_path / "code" / "slurm" / "entry_points.json", content)
    with pytest.raises(UserError, match="another version of this project"):
        check_source_version(RunFolder(tmp_path))


def test_the_entry_points_of_today_exist() -> None:
    modules = (entry_points.JOB_MODULE, entry_points.REQUEUE_MODULE, entry_points.ELASTIC_LAUNCHER_MODULE)
    for module in (*modules, f"{entry_points.CHECK_COMMAND[0]}.__main__"):
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), module


def test_a_job_is_that_of_the_source_on_the_path(tmp_path: Path) -> None:
    """Unpickled where only the run's source is on the path, and it knows nothing of today's modules."""
    module = tmp_path / "code" / f"{entry_points.JOB_MODULE.replace('.', '/')}.py"
    module.parent.mkdir(parents=True)
    module.write_text("class Job:\n    def __init__(self, folder):\n        self.folder = folder\n")
    (tmp_path / "job.pkl").write_bytes(pickle.dumps(JobReference("/runs/one")))
    program = "import pickle, sys; job = pickle.load(open('job.pkl', 'rb')); print(type(job).__module__, job.folder)"
    env = {"PYTHONPATH": str(tmp_path / "code"), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.stdout.split() == [entry_points.JOB_MODULE, "/runs/one"], done.stderr
