"""`make cancel`: which process or job it ends."""

from __future__ import annotations

import errno
import os
import signal
import socket
from pathlib import Path

import pytest

from common.runs import claims
from common.runs.folder import RunFolder, write_json
from common.runs.result import Result
from common.system.errors import UserError
from common.system.processes import Process
from slurm.reports import cancel, status, wandb_sync
from tests.harness.commands.processes import WAIT_TIMEOUT
from tests.harness.runs.process_records import Popen, identify_process
from tests.harness.slurm.fake_slurm import FakeSlurm, call_slurm
from tests.unit.slurm.submitted_runs import write_submitted_run


def test_a_canceled_job_is_recorded(fake: FakeSlurm, runs: Path) -> None:
    folder = str(write_submitted_run(runs, "4711").path)
    assert call_slurm(fake, "cancel", folder).stdout == "canceled job 4711\n"
    assert "scancel 4711" in fake.calls_file.read_text()
    assert "CANCELLED" in call_slurm(fake, "status", folder).stdout
    assert "is already CANCELLED" in call_slurm(fake, "cancel", folder).stdout


def test_a_run_whose_job_cannot_be_canceled_can_be_canceled_later(fake: FakeSlurm, runs: Path) -> None:
    folder = write_submitted_run(runs, "4711")
    fake.define_command("scancel", "echo 'scancel: error: Unable to contact slurm controller' >&2; exit 1")
    call_slurm(fake, "cancel", str(folder.path), status=2)
    assert not folder.result
    fake.define_command("scancel", "echo 'scancel: error: Invalid job id 4711' >&2; exit 1")  # the job has just ended
    assert call_slurm(fake, "cancel", str(folder.path)).stdout == "\n"
    (folder.path / "result.json").unlink()
    fake.define_command("scancel", "exit 0")
    assert call_slurm(fake, "cancel", str(folder.path)).stdout == "canceled job 4711\n"


def test_only_the_process_of_the_run_is_canceled(tmp_path: Path, waiting_process: Popen) -> None:
    """If the pid belongs to another process by now, that process is not signalled."""
    folder = RunFolder(tmp_path)
    started = Process.identify(waiting_process.pid).start
    record = {"host": socket.gethostname(), "pid": waiting_process.pid}
    write_json(tmp_path / "meta.json", {"history": [record | {"pid_started": started - 1}]})
    assert status.read_state(folder)[0] == "LOST"
    assert "is already LOST" in cancel.cancel_run(folder)
    assert waiting_process.poll() is None

    write_json(tmp_path / "meta.json", {"history": [record | {"pid_started": started}]})
    assert status.read_state(folder)[0] == "RUNNING"
    cancel.cancel_run(folder)
    assert waiting_process.wait(timeout=WAIT_TIMEOUT) == -signal.SIGTERM


def test_the_process_of_another_user_continues_and_the_run_can_still_be_canceled(
    tmp_path: Path, waiting_process: Popen, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)
    write_json(tmp_path / "meta.json", {"history": [identify_process(waiting_process.pid)]})

    def refuse(pid: int, number: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    with monkeypatch.context() as patch, pytest.raises(UserError, match=r"process \d+ belongs to another user"):
        patch.setattr(os, "kill", refuse)
        cancel.cancel_run(folder)
    assert not folder.result
    cancel.cancel_run(folder)
    assert waiting_process.wait(timeout=WAIT_TIMEOUT) == -signal.SIGTERM


def test_a_run_that_finishes_while_it_is_canceled_is_finished(
    folder: RunFolder, waiting_process: Popen, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_state = status.read_state

    def finish_meanwhile(run: RunFolder) -> tuple[str, str]:
        monkeypatch.setattr(cancel, "read_state", read_state)
        Result("finished", 0).write(run)
        return "RUNNING", ""

    folder.claim_attempt({"process": identify_process(waiting_process.pid)})
    monkeypatch.setattr(cancel, "read_state", finish_meanwhile)
    still_stopping = f"still stopping: attempt 1, process {waiting_process.pid} on this machine"
    assert f"is already FINISHED; {still_stopping}" in cancel.cancel_run(folder)
    assert waiting_process.poll() is None


def test_a_canceled_run_that_is_still_stopping_is_not_sent_to_wandb(folder: RunFolder, waiting_process: Popen) -> None:
    folder.claim_attempt({"process": identify_process(waiting_process.pid)})
    Result("cancelled", 130).write(folder)
    assert wandb_sync.describe_pending_writes(folder) == "the run is still stopping"
    waiting_process.kill()
    waiting_process.wait()
    assert wandb_sync.describe_pending_writes(folder) == ""


def test_a_process_that_is_recorded_only_in_a_claim_is_canceled(folder: RunFolder, waiting_process: Popen) -> None:
    """The attempt has just started, and meta.json still contains the attempt before it."""
    job = {"id": "7", "scheduler": "the local cluster nowhere"}
    write_json(folder.path / "meta.json", {"history": [{"pid": 1, "host": "elsewhere"}], "job": job})
    folder.claim_attempt({"process": identify_process(waiting_process.pid)})
    assert status.read_state(folder)[0] == "RUNNING"
    assert len(claims.find_live_claims(folder)) == 1
    message = f"canceled process {waiting_process.pid}; the process will save a checkpoint and stop"
    assert cancel.cancel_run(folder) == message
    assert waiting_process.wait(timeout=WAIT_TIMEOUT) == -signal.SIGTERM
    assert folder.result["state"] == "cancelled"
