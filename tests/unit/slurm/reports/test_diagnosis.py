"""Diagnosis of a run that failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm.reports import diagnosis
from tests.harness.slurm.fake_slurm import FakeSlurm
from tests.unit.slurm.submitted_runs import write_submitted_run

CAUSES = {
    "JobState=TIMEOUT": "job_time_limit",
    "JobState=NODE_FAIL": "host_failed",
    "JobState=OUT_OF_MEMORY": "job_out_of_memory",
    "JobState=FAILED Reason=JobLaunchFailure BatchHost=TIMEOUT": "other",
}


@pytest.mark.parametrize("fields, cause", CAUSES.items())
def test_the_cause_follows_from_the_state_of_the_job_and_not_from_other_fields(
    fake_here: FakeSlurm, runs: Path, fields: str, cause: str
) -> None:
    folder = write_submitted_run(runs, "4711")
    fake_here.define_command("squeue", "true")
    fake_here.define_command("scontrol", f"echo {fields}")
    assert diagnosis.collect_diagnosis(folder)["cause_kind"] == cause
