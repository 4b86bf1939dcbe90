"""Diagnosis of a run that failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm.reports import diagnosis
from slurm.reports.diagnosis import RankFacts
from slurm.reports.heartbeats import Heartbeat
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


def test_a_run_that_hangs_is_not_explained_by_a_rank_that_it_has_lost() -> None:
    remaining = Heartbeat(0, "host0", step=9, time=1.0, before_backward=None)
    lost = Heartbeat(1, "host1", step=3, time=1.0, before_backward=None, is_lost=True)
    ranks = [RankFacts(heartbeat, last_sign=1.0, error_time="", error="", stack="") for heartbeat in (remaining, lost)]
    assert "rank 0 on host0" in diagnosis.diagnose_running_run(ranks, last_step=9, max_silence=60)
