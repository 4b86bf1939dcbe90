"""Which command may submit a run, and whether a run belongs to a job."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from common.runs import provenance
from common.runs.failures import Failure
from common.runs.folder import RunFolder, write_json
from common.runs.result import Result
from common.system.errors import RunTakenError
from configs.mnist_pipeline import Config
from slurm.launch import submit
from slurm.reports import liveness, status
from slurm.scheduling import requeue, submission
from slurm.scheduling.job_failures import record_job_failure
from tests.harness.commands import in_process_calls
from tests.harness.commands.exit_status import Completed, check_status
from tests.harness.runs.process_records import Popen, identify_process
from tests.harness.runs.synthetic_runs import SyntheticRun
from tests.harness.slurm.fake_slurm import FakeSlurm, execute_module


def write_stopped_run(runs: Path, state: str = "preempted", status: int = 75) -> RunFolder:
    """Write the folder of a run that can be resumed."""
    folder = SyntheticRun(steps=20).write(runs)
    Result(state, status).write(folder)
    provenance.copy_source(folder)
    return folder


def test_a_run_is_submitted_by_one_command_at_a_time(folder: RunFolder, waiting_process: Popen) -> None:
    file = submission.locate_submission_file(folder)
    with submission.lock_run_for_submission(folder):
        assert not submission.is_being_submitted(folder), "only submissions by other commands count"
        with pytest.raises(RunTakenError, match="is being started or submitted by another command on this machine"):
            submission.lock_run_for_submission(folder).__enter__()
    assert not file.exists()

    write_json(file, identify_process(waiting_process.pid))  # without the lock, as from another host
    assert status.read_state(folder) == ("PENDING", "being submitted")
    with pytest.raises(RunTakenError, match=f"is being submitted by process {waiting_process.pid} on "):
        submission.lock_run_for_submission(folder).__enter__()

    waiting_process.kill()
    waiting_process.wait()
    with submission.lock_run_for_submission(folder):  # the submission before was aborted
        assert json.loads(file.read_text())["pid"] == os.getpid()
    assert not list((folder.path / "submit").iterdir())


def test_the_process_of_another_command_that_has_started_the_run_is_reported(
    folder: RunFolder, waiting_process: Popen
) -> None:
    folder.claim_attempt({"process": identify_process(waiting_process.pid)})
    process = rf"process {waiting_process.pid} on this machine"
    message = rf"was just started by another command \(attempt 1, {process}\); see make status"
    with pytest.raises(RunTakenError, match=message):
        submit.check_run_has_ended(folder, Config())


def test_of_two_commands_that_resume_a_run_on_a_cluster_one_succeeds(fake: FakeSlurm, runs: Path) -> None:
    fake.define_command("sbatch", 'sleep 1; cat "$1" >/dev/null; echo "Submitted batch job 4711"')
    folder = write_stopped_run(runs)

    def resume(_: int) -> Completed:
        return execute_module(fake, "slurm", "exp", f"--resume={folder.path}", "--nodes=1", status=None)

    with ThreadPoolExecutor(2) as pool:
        processes = list(pool.map(resume, range(2)))
    accepted, refused = sorted(processes, key=lambda process: process.returncode)
    check_status(accepted, 0)
    check_status(refused, 2)
    reasons = ("is being s", "PENDING", "RUNNING", "was just started by another command")
    assert any(reason in refused.stderr for reason in reasons), refused.stderr
    assert fake.calls_file.read_text().count("sbatch") == 1


def test_a_run_that_another_command_starts_meanwhile_is_not_started(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_stopped_run(runs, "cancelled", 130)
    started = []

    def let_another_command_start(folder: RunFolder) -> None:
        folder.claim_attempt({"process": provenance.identify_process()})
        (folder.path / "result.json").unlink()

    monkeypatch.setattr(liveness, "wait_for_earlier_attempt", let_another_command_start)
    monkeypatch.setattr(submit, "exec_script", lambda *arguments: started.append(arguments))
    process = in_process_calls.call_verb("exp", f"--resume={folder.path}", "--launch=local", status=2)
    assert not started
    assert "was just started by another command" in process.stderr


def test_a_refused_submission_does_not_change_the_result(fake: FakeSlurm, runs: Path) -> None:
    fake.define_command("sbatch", "echo 'sbatch: error: no' >&2; exit 1")
    folder = write_stopped_run(runs)
    execute_module(fake, "slurm", "exp", f"--resume={folder.path}", "--nodes=1", status=2)
    assert folder.result["state"] == "preempted"


ARRAY_TASK = {"id": "20_3", "scheduler": "SLURM"}


@pytest.fixture
def array_task(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """The folder of a run whose job is this process: task 3 of the array 20."""
    monkeypatch.setenv("SLURM_JOB_ID", "23")
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "20")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    monkeypatch.setattr(submission, "UNANNOUNCED_SECONDS", 0.1)
    (folder.path / "submit").mkdir()
    return folder


def test_a_run_belongs_to_its_job_and_to_any_job_before_its_job_is_recorded(array_task: RunFolder) -> None:
    assert submission.describe_other_owner(array_task) == ""
    write_json(array_task.path / "meta.json", {"job": ARRAY_TASK})
    submission.check_run_belongs_to_this_job(array_task)


@pytest.mark.parametrize(
    "job, owner", [(ARRAY_TASK | {"id": "24"}, "job 24"), (None, "an attempt that was started without SLURM")]
)
def test_a_job_neither_starts_nor_requeues_a_run_of_another_owner(
    array_task: RunFolder, job: dict[str, str] | None, owner: str, capfd: pytest.CaptureFixture[str]
) -> None:
    write_json(array_task.path / "meta.json", {"job": job})
    message = f"job 20_3 cannot start {array_task.path.name}: the run belongs to {owner}"
    with pytest.raises(RunTakenError, match=message):
        submission.check_run_belongs_to_this_job(array_task)
    assert requeue.main(str(array_task.path), 0) == 1
    assert not array_task.result
    assert f"not requeued: the run belongs to {owner}" in capfd.readouterr().err


def test_a_job_whose_rank_found_another_owner_is_not_requeued(
    array_task: RunFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    write_json(array_task.path / "meta.json", {"job": ARRAY_TASK})
    record_job_failure(array_task, 0, Failure.from_error(RunTakenError("because")), is_refusal=True)
    assert requeue.main(str(array_task.path), 0) == 1
    assert not array_task.result
    assert "not requeued: because" in capfd.readouterr().err
