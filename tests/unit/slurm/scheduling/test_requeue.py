"""Last line of a job script: whether the job is requeued, and the result of a run that ended."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from common.runs.failures import Failure
from common.runs.folder import RunFolder, write_json
from common.system.causes import Cause
from common.system.errors import UnreachableError, UserError
from common.system.exit_status import EXIT_FAILED, EXIT_RESUMABLE
from slurm.scheduling import requeue
from slurm.scheduling.job_failures import record_job_failure
from tests.harness.commands.exit_status import Completed
from tests.harness.environment.size_limit import limit_file_size
from tests.harness.slurm.fake_slurm import FakeSlurm, call_main, execute_module, execute_module_on_full_disk
from tests.unit.slurm.scheduling.job_states import JOB, make_state_script

SAME_START = "JobState=RUNNING Restarts=1"
STARTED_AGAIN = "JobState=RUNNING Restarts=2"
REQUEUED = "JobState=PENDING Restarts=2"
CANCELLED = "JobState=CANCELLED Restarts=1"


def answer_with_states(fake: FakeSlurm, *states: str, requeue_command: str = "exit 0") -> None:
    """Let scontrol show the states of the job in turn, and call a shell command to requeue the job."""
    fake.define_command(
        "scontrol", f'case "$1" in requeue) {requeue_command};; *) {make_state_script(fake, *states)};; esac'
    )


def end_job(fake: FakeSlurm, folder: RunFolder, status: int, *states: str, **env: str) -> Completed:
    """Call the last line of the job script after the ranks have ended with an exit status."""
    if states:
        answer_with_states(fake, *states)

    def main(arguments: list[str]) -> int:
        path, exit_status = arguments
        return requeue.main(path, int(exit_status))

    return call_main(fake, main, str(folder.path), str(status), status=None, **JOB, **env)


def count_requeues(fake: FakeSlurm) -> int:
    return fake.calls_file.read_text().count("scontrol requeue 7")


def test_only_the_task_of_an_array_is_requeued(fake: FakeSlurm, job_folder: RunFolder) -> None:
    """SLURM applies a command for the id of the array, which is also the id of one task, to all tasks."""
    write_json(job_folder.path / "meta.json", {"job": {"id": "7_3"}})
    end_job(fake, job_folder, EXIT_RESUMABLE, SAME_START, SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="3")
    calls = fake.calls_file.read_text().splitlines()
    assert calls == ["scontrol -o show job 7_3", "scontrol requeue 7_3"]


REQUEUED_STATUSES = [
    (EXIT_RESUMABLE, "the ranks stopped on request"),
    (128 + signal.SIGUSR2, "the ranks stopped on request"),
    (137, "failed with exit status 137"),
    (EXIT_FAILED, "failed with exit status 1;"),
]


@pytest.mark.parametrize("status, message", REQUEUED_STATUSES)
def test_a_job_is_requeued(fake: FakeSlurm, job_folder: RunFolder, status: int, message: str) -> None:
    process = end_job(fake, job_folder, status, SAME_START)
    assert count_requeues(fake) == 1
    assert message in process.stdout
    assert not job_folder.result


@pytest.mark.parametrize("state", [STARTED_AGAIN, REQUEUED, CANCELLED])
def test_a_job_that_has_ended_or_was_started_again_is_not_changed(
    fake: FakeSlurm, job_folder: RunFolder, state: str
) -> None:
    """This host was disconnected meanwhile. A requeue would end the new start, or restart a canceled job."""
    for status in (EXIT_RESUMABLE, 137, 2):
        assert end_job(fake, job_folder, status, state).returncode == status
    assert count_requeues(fake) == 0
    assert not job_folder.result


def test_a_requeue_by_slurm_itself_is_no_failure(fake: FakeSlurm, job_folder: RunFolder) -> None:
    answer_with_states(fake, SAME_START, REQUEUED, requeue_command="exit 1")
    assert end_job(fake, job_folder, EXIT_RESUMABLE).returncode == EXIT_RESUMABLE
    assert not job_folder.result


def test_a_job_is_requeued_after_the_controller_answers_again(
    fake: FakeSlurm, job_folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requeue, "RETRY_SECONDS", 0.0)
    was_queried = fake.bin_folder / "was_queried"
    fail_once = f"[ -e {was_queried} ] || {{ touch {was_queried}; exit 1; }}"
    fake.define_command("scontrol", f"{fail_once}; echo '{SAME_START}'")
    assert end_job(fake, job_folder, EXIT_RESUMABLE).returncode == EXIT_RESUMABLE
    show_job = "scontrol -o show job 7"
    assert fake.calls_file.read_text().splitlines() == [show_job, show_job, "scontrol requeue 7"]


def test_a_job_whose_controller_does_not_answer_is_not_changed(
    fake: FakeSlurm, job_folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requeue, "CONTROLLER_TIMEOUT", -1.0)
    fake.define_command("scontrol", "exit 1")
    assert "scontrol failed" in end_job(fake, job_folder, EXIT_RESUMABLE).stderr
    assert count_requeues(fake) == 0
    assert not job_folder.result


def test_a_stopped_run_whose_requeue_is_refused_can_be_resumed(fake: FakeSlurm, job_folder: RunFolder) -> None:
    answer_with_states(fake, SAME_START, requeue_command="echo 'requeue is disabled' >&2; exit 1")
    execute_module(
        fake, "slurm.scheduling.requeue", str(job_folder.path), str(EXIT_RESUMABLE), status=EXIT_RESUMABLE, **JOB
    )
    assert job_folder.result["state"] == "preempted", "make sweep resumes it"
    assert "the job cannot be requeued" in job_folder.result["reason"]
    assert "requeue is disabled" in job_folder.result["reason"]


def test_a_job_on_a_full_disk_is_requeued(fake: FakeSlurm, job_folder: RunFolder, tmp_path: Path) -> None:
    """Neither the log of the job nor the number of failures can be written."""
    fake.calls_file = Path(os.devnull)
    requeued = tmp_path / "requeued"
    answer_with_states(fake, SAME_START, requeue_command=f"mkdir {requeued}")
    with limit_file_size(0):
        status = execute_module_on_full_disk(fake, "slurm.scheduling.requeue", str(job_folder.path), "137", **JOB)
    assert status == EXIT_RESUMABLE
    assert requeued.is_dir()


def test_stop_requests_before_a_rank_handles_signals_are_no_failures(fake: FakeSlurm, job_folder: RunFolder) -> None:
    for _ in range(4):
        assert end_job(fake, job_folder, 128 + signal.SIGUSR2, SAME_START).returncode == EXIT_RESUMABLE
    assert count_requeues(fake) == 4
    assert not job_folder.result


def test_a_run_fails_after_too_many_starts_without_a_checkpoint(fake: FakeSlurm, job_folder: RunFolder) -> None:
    """Starts that created no attempt count, too. A checkpoint resets the count."""
    terminated_by_srun = 128 + signal.SIGTERM
    assert end_job(fake, job_folder, terminated_by_srun, SAME_START).returncode == EXIT_RESUMABLE
    attempt = job_folder.claim_attempt()
    (attempt.attempt_folder / "checkpoints" / "step-00000010").mkdir(parents=True)
    assert end_job(fake, job_folder, 1, SAME_START).returncode == EXIT_RESUMABLE  # the attempt has saved
    assert end_job(fake, job_folder, 1, SAME_START).returncode == EXIT_RESUMABLE
    assert count_requeues(fake) == 3
    process = end_job(fake, job_folder, EXIT_FAILED, SAME_START)  # greater than the status of ranks that srun kills
    assert process.returncode == 1
    assert count_requeues(fake) == 3
    assert job_folder.result["reason"].startswith("2 attempts in a row ended without a new checkpoint")


def test_failures_of_an_earlier_job_of_the_run_do_not_count(fake: FakeSlurm, job_folder: RunFolder) -> None:
    """Two failures of the same job without a checkpoint would end the run."""
    write_json(job_folder.path / "submit" / "failures.json", {"job": "6", "newest": None, "count": 1})
    assert end_job(fake, job_folder, 1, SAME_START).returncode == EXIT_RESUMABLE
    assert count_requeues(fake) == 1


@pytest.mark.usefixtures("inside_job")
@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (3, 2, 1, 0)])
def test_the_cause_is_that_of_the_first_failure_that_is_no_consequence(
    ranks: tuple[int, ...], fake: FakeSlurm, job_folder: RunFolder
) -> None:
    """The order in which the failures are written does not matter, because hosts see files late."""
    failures = {
        0: Failure(Cause.LOST_PEER, "of a rank", 1.0),
        1: Failure(Cause.SOURCE_ERROR, "of a rank", 2.0),
        2: Failure(Cause.THREAD_SHORTAGE, "of a rank", 3.0),
        3: Failure(Cause.TIMEOUT, "of a rank", 0),
    }
    for rank in ranks:
        record_job_failure(job_folder, rank, failures[rank], is_refusal=False)
    assert "failed with exit status 1;" in end_job(fake, job_folder, EXIT_RESUMABLE, SAME_START).stdout
    assert end_job(fake, job_folder, 137, SAME_START).returncode == 1
    assert job_folder.result["exit_status"] == 1
    assert job_folder.result["cause"] == "source_error", "the other ranks lost their connections because of it"


@pytest.mark.usefixtures("inside_job")
def test_the_reason_is_that_of_the_lowest_rank_that_does_not_blame_another_one(
    fake: FakeSlurm, job_folder: RunFolder
) -> None:
    refusals = {
        2: UserError("rank 1 tells"),
        1: UserError("the loss is nan", cause=Cause.DIVERGED),
        0: UnreachableError("rank 1 has not joined"),
        10: UserError("rank 1 tells"),
    }
    for rank, error in refusals.items():
        record_job_failure(job_folder, rank, Failure.from_error(error), is_refusal=True)
    assert end_job(fake, job_folder, 2, SAME_START).returncode == 2
    assert count_requeues(fake) == 0
    assert job_folder.result["reason"] == "the loss is nan"
    assert job_folder.result["cause"] == "diverged"
    assert job_folder.result["format"] == 2
    assert job_folder.result["last_step"] == 0


def test_a_run_that_has_a_result_is_not_requeued(fake: FakeSlurm, job_folder: RunFolder) -> None:
    (job_folder.path / "result.json").write_text(json.dumps({"state": "cancelled", "exit_status": 130}))
    assert end_job(fake, job_folder, EXIT_RESUMABLE, SAME_START).returncode == 130
    assert not fake.calls_file.exists()
