"""A rank of a job: the notes that it leaves after a failure, and what it does if it meets no other rank."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from common.config.config import ROOT
from common.ranks.rank_info import COORDINATOR_VARIABLE, ORPHAN_COMMAND_VARIABLE, REPLACED_RANK_VARIABLE, RankInfo
from common.runs.folder import RunFolder
from common.system.causes import Cause
from common.system.errors import UnreachableError, UserError
from common.system.exit_status import EXIT_FAILED, EXIT_RESUMABLE
from common.training import entry_point
from slurm.scheduling import job
from slurm.scheduling.job import train_as_rank
from slurm.scheduling.job_failures import find_first_failure, find_refusal, read_job_failures
from tests.harness.commands.processes import WAIT_TIMEOUT

pytestmark = pytest.mark.usefixtures("inside_job")

PROGRAM = "from slurm.scheduling.job import *; train_as_rank(RunFolder(Path(sys.argv[1])))"


def test_a_rank_that_fails_before_training_leaves_a_note(job_folder: RunFolder) -> None:
    assert train_as_rank(job_folder) == EXIT_FAILED, "srun has not started this process"
    assert find_first_failure(job_folder)
    assert not find_refusal(job_folder)
    (job_folder.path / "submit" / "config.yaml").write_text("epoch: 1\n")
    with pytest.raises(UserError, match="unknown key epoch"):
        train_as_rank(job_folder)
    refusal = find_refusal(job_folder)
    assert refusal
    assert "did you mean epochs?" in refusal.message


@pytest.mark.slow
def test_a_rank_without_its_launcher_executes_the_command_for_orphans(
    job_folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first host had the script of the job and the coordinator, and is lost before the ranks have met."""
    with socket.socket() as coordinator:
        coordinator.bind(("127.0.0.1", 0))
        monkeypatch.setenv(COORDINATOR_VARIABLE, f"127.0.0.1:{coordinator.getsockname()[1]}")
        monkeypatch.setenv(ORPHAN_COMMAND_VARIABLE, json.dumps(["echo", "orphaned"]))
        command = [sys.executable, "-c", PROGRAM, str(job_folder.path)]
        process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_TIMEOUT, check=False)
        assert process.stdout == "orphaned\n", process.stderr
        assert "this rank is leaving the run: the coordinator is unreachable (" in process.stderr
        assert not find_first_failure(job_folder)

        coordinator.listen()
        assert train_as_rank(job_folder) == EXIT_FAILED, "the launcher answers, and ends the job"


ENDING_RANK = """
import atexit
from slurm.scheduling import job
atexit.register(print, "library threads are ended")
job.train_as_rank = lambda folder: 0
job.Job(__import__("sys").argv[1])()
"""


@pytest.mark.parametrize("end, status", [("print('saved')", 0), ("raise OSError('the disk is full')", 1)])
def test_a_rank_that_has_finished_exits_without_cleanup(
    end: str, status: int, job_folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Library threads could abort the exit, and the job would be requeued."""
    for name in ("NODEID", "PROCID", "LOCALID"):
        monkeypatch.setenv(f"SLURM_{name}", "0")
    for name in ("JOB_NUM_NODES", "NTASKS"):
        monkeypatch.setenv(f"SLURM_{name}", "1")
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    monkeypatch.setenv("SUBMITIT_FOLDER", str(job_folder.path / "submit"))
    command = [sys.executable, "-c", f"{ENDING_RANK}{end}", str(job_folder.path)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_TIMEOUT, check=False)
    assert process.returncode == status, process.stderr
    assert process.stdout == ("" if status else "saved\n")


def replace_experiment(monkeypatch: pytest.MonkeyPatch, error: BaseException, stop_signal: int = 0) -> None:
    """Let the experiment of the rank end with an error, after a stop request if there is a signal."""

    def run_experiment(*_: Any, **__: Any) -> NoReturn:
        raise error

    def launch_rank(info: RankInfo, cfg: Any) -> SimpleNamespace:
        stop = SimpleNamespace(signal_number=stop_signal, wait_for_request=lambda: bool(stop_signal))
        return SimpleNamespace(rank_info=info, stop=stop, cfg=cfg)

    monkeypatch.setattr(job, "read_rank_info", lambda environ: RankInfo())
    monkeypatch.setattr(entry_point, "LaunchedRank", launch_rank)
    monkeypatch.setattr(entry_point, "run_experiment", run_experiment)


UNREACHABLE = UnreachableError("rank 1 did not join within 60 s")


def test_a_rank_that_meets_no_other_rank_at_the_first_start_refuses(
    job_folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_experiment(monkeypatch, UNREACHABLE)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    with pytest.raises(UnreachableError):
        train_as_rank(job_folder)
    assert find_refusal(job_folder)
    assert not find_first_failure(job_folder)


@pytest.mark.parametrize(
    "stop_signal, restarts, status", [(signal.SIGUSR2, "0", 1), (0, "1", EXIT_FAILED), (signal.SIGUSR2, "1", 1)]
)
def test_a_rank_that_meets_no_other_rank_fails_after_a_restart_or_a_stop_request(
    stop_signal: int, restarts: str, status: int, job_folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks leave when they are asked to stop, so that ranks that wait for them do not find them."""
    replace_experiment(monkeypatch, UNREACHABLE, stop_signal)
    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    assert train_as_rank(job_folder) == status
    assert not find_refusal(job_folder)
    assert bool(find_first_failure(job_folder)) == (status == EXIT_FAILED)


@pytest.mark.parametrize("status", [3, EXIT_RESUMABLE])
def test_an_experiment_that_calls_exit_leaves_a_note_of_its_rank(
    status: int, job_folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a process that replaces another one. A stop request is no failure."""
    replace_experiment(monkeypatch, SystemExit(status))
    monkeypatch.setenv(REPLACED_RANK_VARIABLE, "2")
    with pytest.raises(SystemExit) as caught:
        train_as_rank(job_folder)
    assert caught.value.code == status
    failures = [note.failure for note in read_job_failures(job_folder, rank=2)]
    if status == EXIT_RESUMABLE:
        assert not failures
        return
    (failure,) = failures
    assert failure.cause is Cause.EXITED
    assert failure.message == "exited with status 3 without an error message"
