"""Names by which jobs call the source of their run; a source of another version is refused."""

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
from tests.harness.repository import ROOT


def test_the_copied_source_contains_its_version(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    provenance.copy_source(folder)
    check_source_version(folder)


@pytest.mark.parametrize("content", [{}, {"version": 3}, {"version": entry_points.VERSION + 1}])
def test_a_source_of_another_version_is_refused(tmp_path: Path, content: dict[str, int]) -> None:
    (tmp_path / "code" / "slurm").mkdir(parents=True)
    write_json(tmp_path / "code" / "slurm" / "entry_points.json", content)
    with pytest.raises(UserError, match="another version of this project"):
        check_source_version(RunFolder(tmp_path))


MODULES = [
    entry_points.JOB_MODULE,
    entry_points.REQUEUE_MODULE,
    entry_points.ELASTIC_LAUNCHER_MODULE,
    f"{entry_points.CHECK_COMMAND[0]}.__main__",
]


@pytest.mark.parametrize("module", MODULES)
def test_the_modules_of_all_entry_points_exist(module: str) -> None:
    assert (ROOT / f"{module.replace('.', '/')}.py").is_file()


def test_a_job_is_loaded_from_the_source_of_its_run(tmp_path: Path) -> None:
    """Only that source is on the path, and it may lack modules of the present source."""
    module = tmp_path / "code" / f"{entry_points.JOB_MODULE.replace('.', '/')}.py"
    module.parent.mkdir(parents=True)
    module.write_text("class Job:\n    def __init__(self, folder):\n        self.folder = folder\n")
    (tmp_path / "job.pkl").write_bytes(pickle.dumps(JobReference("/runs/one")))
    program = "import pickle, sys; job = pickle.load(open('job.pkl', 'rb')); print(type(job).__module__, job.folder)"
    command = [sys.executable, "-c", program]
    env = {"PYTHONPATH": str(tmp_path / "code"), "PYTHONSAFEPATH": "1"}
    process = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert process.stdout.split() == [entry_points.JOB_MODULE, "/runs/one"], process.stderr
