"""Who may submit a run, and whether a job still has it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.runs import claims, provenance
from common.runs.failures import Failure
from common.runs.folder import RunFolder, write_json
from common.runs.result import Result
from common.system.errors import RunTakenError
from common.system.processes import Process
from configs.mnist_pipeline import Config
from slurm.launch import submit
from slurm.reports import cancel, liveness, status
from slurm.scheduling import requeue, submission
from slurm.scheduling.job_failures import record_job_failure
from tests.harness import inside
from tests.harness.fake_slurm import Fake, call
from tests.harness.made_runs import Made


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "mnist_pipeline", "")


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """A process that may have claimed a run."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def identify(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    return provenance.identify_process() | {
        "pid": process.pid,
        "pid_started": Process.identify(process.pid).start,
    }


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    return Fake(tmp_path)


def test_a_run_is_submitted_by_one_command_at_a_time(folder: RunFolder, other: subprocess.Popen[bytes]) -> None:
    with submission.lock_run_for_submission(folder):
        assert not submission.is_being_submitted(folder), "another command is meant"
        with pytest.raises(RunTakenError, match="is being started or submitted by another command on this machine"):
            submission.lock_run_for_submission(folder).__enter__()
    assert not submission.locate_submission_file(folder).exists()
    write_json(submission.locate_submission_file(folder), identify(other))  # of another host as far as the lock goes
    assert status.read_state(folder) == ("PENDING", "being submitted")
    with pytest.raises(RunTakenError, match=f"is being submitted by process {other.pid} on "):
        submission.lock_run_for_submission(folder).__enter__()
    other.kill()
    other.wait()
    with submission.lock_run_for_submission(folder):  # the one before was given up
        assert json.loads(submission.locate_submission_file(folder).read_text())["pid"] == os.getpid()
    assert [path.name for path in (folder.path / "submit").iterdir()] == []


def test_a_run_that_another_command_has_started_is_refused_with_its_process(
    folder: RunFolder, other: subprocess.Popen[bytes]
) -> None:
    folder.claim_attempt({"process": identify(other)})
    words = rf"was just started by another command \(attempt 1, process {other.pid} on this machine\); see make status"
    with pytest.raises(RunTakenError, match=words):
        submit.check_run_has_ended(folder, Config())


def test_of_two_commands_that_resume_a_run_on_a_cluster_one_is_accepted(fake: Fake, tmp_path: Path) -> None:
    fake.answer("sbatch", 'sleep 1; cat "$1" >/dev/null; echo "Submitted batch job 4711"')
    run = Made(steps=20).write(tmp_path / "runs")
    Result("preempted", 75).write(run)
    provenance.copy_source(run)
    done: list[subprocess.CompletedProcess[str]] = []

    def resume() -> None:
        done.append(call(fake, "slurm", "exp", f"--resume={run.path}", "--nodes=1"))

    threads = [threading.Thread(target=resume) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(one.returncode for one in done) == [0, 2], [one.stderr for one in done]
    (refused,) = [one.stderr for one in done if one.returncode]
    words = ("is being s", "PENDING", "RUNNING", "was just started by another command")
    assert any(word in refused for word in words), refused
    assert fake.calls.read_text().count("sbatch") == 1


def test_a_run_that_was_taken_while_a_command_waited_is_not_started_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Made(steps=20).write(tmp_path / "runs")
    Result("cancelled", 130, "stopped").write(run)
    provenance.copy_source(run)
    started = []

    def let_another_command_start(folder: RunFolder) -> None:
        folder.claim_attempt({"process": provenance.identify_process()})
        (folder.path / "result.json").unlink()

    monkeypatch.setattr(liveness, "wait_for_earlier_attempt", let_another_command_start)
    monkeypatch.setattr(submit, "exec_script", lambda *arguments: started.append(arguments))
    done = inside.run_verb("exp", f"--resume={run.path}", "--launch=local")
    assert done.returncode == 2 and not started
    assert "was just started by another command" in done.stderr


def test_a_refused_submission_leaves_the_result(fake: Fake, tmp_path: Path) -> None:
    fake.answer("sbatch", "echo 'sbatch: error: no' >&2; exit 1")
    run = Made(steps=20).write(tmp_path / "runs")
    Result("preempted", 75).write(run)
    provenance.copy_source(run)
    done = call(fake, "slurm", "exp", f"--resume={run.path}", "--nodes=1")
    assert done.returncode == 2 and run.result["state"] == "preempted", done.stderr


@pytest.mark.parametrize("taken", ["job", "local", "note"])
def test_a_job_leaves_a_run_alone_that_is_not_its_own(
    folder: RunFolder, taken: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "23")
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "20")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    monkeypatch.setattr(submission, "UNANNOUNCED_SECONDS", 0.1)
    assert submission.describe_other_owner(folder) == "", "its job was never recorded"
    job = {"id": "20_3", "scheduler": "SLURM"}
    write_json(folder.path / "meta.json", {"job": job})
    submission.check_run_belongs_to_this_job(folder)
    (folder.path / "submit").mkdir()
    words = {"job": "job 24", "local": "an attempt that was started without SLURM", "note": "because"}[taken]
    if taken == "note":
        record_job_failure(folder, 0, Failure.from_error(RunTakenError("because")), is_refusal=True)
    else:
        write_json(folder.path / "meta.json", {"job": job | {"id": "24"} if taken == "job" else None})
        with pytest.raises(RunTakenError, match=f"job 23 cannot start {folder.path.name}: the run belongs to {words}"):
            submission.check_run_belongs_to_this_job(folder)
    assert requeue.main(str(folder.path), 0) == 1 and not folder.result
    assert f"not requeued: {'the run belongs to ' if taken != 'note' else ''}{words}" in capfd.readouterr().err


def test_a_run_that_finishes_while_it_is_cancelled_is_finished(
    folder: RunFolder, other: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    read_state = status.read_state

    def finish_meanwhile(run: RunFolder) -> tuple[str, str]:
        monkeypatch.setattr(cancel, "read_state", read_state)
        Result("finished", 0).write(run)
        return "RUNNING", ""

    folder.claim_attempt({"process": identify(other)})
    monkeypatch.setattr(cancel, "read_state", finish_meanwhile)
    answer = cancel.cancel_run(folder)
    assert f"is already FINISHED; still stopping: attempt 1, process {other.pid} on this machine" in answer
    assert other.poll() is None


def test_cancel_ends_what_only_a_claim_names(folder: RunFolder, other: subprocess.Popen[bytes]) -> None:
    """An attempt that has begun, where meta.json still names the one before it."""
    job = {"id": "7", "scheduler": "the local cluster nowhere"}
    write_json(folder.path / "meta.json", {"history": [{"pid": 1, "host": "elsewhere"}], "job": job})
    folder.claim_attempt({"process": identify(other)})
    assert status.read_state(folder)[0] == "RUNNING" and len(claims.find_live_claims(folder)) == 1
    message = f"canceled process {other.pid}; the process will save a checkpoint and stop"
    assert cancel.cancel_run(folder) == message
    assert other.wait(timeout=5) == -signal.SIGTERM and folder.result["state"] == "cancelled"
