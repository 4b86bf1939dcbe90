"""Records of jobs and processes that have not run."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from common.runs import provenance
from common.runs.folder import RunFolder, write_json
from common.system.processes import Process
from tests.harness.runs.synthetic_runs import SyntheticRun


def write_submitted_run(runs: Path, job: str, number: int = 0) -> RunFolder:
    """Write the folder of a run that was submitted to SLURM as `job`."""
    folder = SyntheticRun(number=number, steps=0, state="lost").write(runs)
    write_json(folder.path / "meta.json", {"job": {"id": job, "scheduler": "SLURM"}})
    return folder


def identify_process(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Return the record by which claims identify a process."""
    start = Process.identify(process.pid).start
    return provenance.identify_process() | {"pid": process.pid, "pid_started": start}
