"""Run folders of jobs that have not run."""

from __future__ import annotations

from pathlib import Path

from common.runs.folder import RunFolder, write_json
from tests.harness.runs.synthetic_runs import SyntheticRun


def write_submitted_run(runs: Path, job: str, number: int = 0) -> RunFolder:
    """Write the folder of a run that was submitted to SLURM as `job`."""
    folder = SyntheticRun(number=number, steps=0, state="lost").write(runs)
    write_json(folder.path / "meta.json", {"job": {"id": job, "scheduler": "SLURM"}})
    return folder
