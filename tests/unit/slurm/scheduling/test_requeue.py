"""A job's last line: what becomes of a run, against SLURM's commands as scripts that answer as they are told."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.config.config import ROOT
from common.ranks.rank_info import (
    COORDINATOR_VARIABLE,
    ORPHAN_COMMAND_VARIABLE,
    REPLACED_RANK_VARIABLE,
    RankInfo,
)
from common.runs.failures import Failure
from common.runs.folder import RunFolder
from common.system.causes import Cause
from common.system.errors import UnreachableError, UserError
from common.system.exit_status import EXIT_FAILED, EXIT_RESUMABLE
from common.training import entry_point
from slurm.scheduling import job, requeue
from slurm.scheduling.job import train_as_rank
from slurm.scheduling.job_failures import find_first_failure, find_refusal, read_job_failures, record_job_failure
from tests.harness.fake_slurm import Fake, call, call_here

OURS, ELSEWHERE, QUEUED = "JobState=RUNNING Restarts=1", "JobState=RUNNING Restarts=2", "JobState=PENDING Restarts=2"
PLACE: dict[str, Any] = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    return Fake(tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder.create(tmp_path / "runs", "mnist_pipeline", "")
    (made.path / "submit").mkdir()
    (made.path / "submit" / "config.yaml").write_text("checkpoint: {max_restarts: 1}\n")
    (made.path / "meta.json").write_text(
        json.dumps({"job": {"id": "7", "scheduler": "local", "profile": {"requeue": True}}})
    )
    return made


def end(
    fake: Fake, folder: RunFolder, status: int, *shown: str, on_requeue: str = "exit 0", as_command: bool = False
) -> subprocess.CompletedProcess[str]:
    """The processes have ended; `shown` is what SLURM says of the job, one look after the other, the last for ever."""
    looks = fake.bin.parent / "looks"
    looks.write_text("".join(f"{line}\n" for line in shown))
    once = f'head -1 {looks}; [ "$(wc -l <{looks})" = 1 ] || sed -i 1d {looks}'
    fake.answer("scontrol", f'case "$1" in requeue) {on_requeue};; *) {once};; esac')
    words = (str(folder.path), str(status))
    if as_command:
        return call(fake, "slurm.scheduling.requeue", *words, **PLACE)
    return call_here(fake, lambda words: requeue.main(words[0], int(words[1])), *words, **PLACE)


def requeues(fake: Fake) -> int:
    return fake.calls.read_text().count("scontrol requeue 7")


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (EXIT_RESUMABLE, "the ranks stopped on request"),
        (128 + signal.SIGUSR2, "the ranks stopped on request"),
        (137, "failed with exit status 137"),
        (EXIT_FAILED, "failed with exit status 1;"),
    ],
)
def test_a_run_goes_back_into_the_queue(fake: Fake, folder: RunFolder, status: int, words: str) -> None:
    done = end(fake, folder, status, OURS)
    assert requeues(fake) == 1 and words in done.stdout and not folder.result


@pytest.mark.parametrize("shown", [ELSEWHERE, QUEUED])
def test_a_job_that_was_started_again_is_left_alone(fake: Fake, folder: RunFolder, shown: str) -> None:
    """This host was cut off meanwhile: whatever it says would hit the new start."""
    for status in (EXIT_RESUMABLE, 137, 2):
        assert end(fake, folder, status, shown).returncode == status
    assert requeues(fake) == 0 and not folder.result


def test_a_requeue_that_slurm_made_itself_is_no_failure(fake: Fake, folder: RunFolder) -> None:
    assert end(fake, folder, EXIT_RESUMABLE, OURS, QUEUED, on_requeue="exit 1").returncode == EXIT_RESUMABLE
    assert not folder.result


def test_a_requeue_that_is_refused_is_told(fake: Fake, folder: RunFolder) -> None:
    done = end(fake, folder, EXIT_RESUMABLE, OURS, on_requeue="echo 'requeue is disabled' >&2; exit 1", as_command=True)
    assert done.returncode == EXIT_RESUMABLE and folder.result["state"] == "failed"
    assert "the job cannot be requeued" in folder.result["reason"] and "requeue is disabled" in folder.result["reason"]


def test_stop_requests_before_a_rank_could_answer_are_no_failures(fake: Fake, folder: RunFolder) -> None:
    for _ in range(4):
        assert end(fake, folder, 128 + signal.SIGUSR2, OURS).returncode == EXIT_RESUMABLE
    assert requeues(fake) == 4 and not folder.result


def test_starts_in_vain_are_counted(fake: Fake, folder: RunFolder) -> None:
    """Also those that never got as far as a folder of their own; a checkpoint begins the count anew."""
    assert end(fake, folder, 128 + signal.SIGTERM, OURS).returncode == EXIT_RESUMABLE  # by which srun ends the others
    attempt = folder.claim_attempt()
    (attempt.attempt_folder / "checkpoints" / "step-00000010").mkdir(parents=True)
    assert end(fake, folder, 1, OURS).returncode == EXIT_RESUMABLE  # it had saved
    assert end(fake, folder, 1, OURS).returncode == EXIT_RESUMABLE
    assert requeues(fake) == 3
    done = end(fake, folder, EXIT_FAILED, OURS)  # higher than that of the ranks that srun then ends
    assert done.returncode == 1 and requeues(fake) == 3
    assert folder.result["reason"].startswith("2 attempts in a row ended without a new checkpoint")


@pytest.mark.parametrize("is_reversed", [False, True])
def test_a_rank_that_failed_first_counts_before_one_that_srun_killed(
    is_reversed: bool, fake: Fake, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whatever order they write, as other hosts see their files."""
    for name, value in PLACE.items():
        monkeypatch.setenv(name, value)
    failures = list(
        enumerate([(Cause.LOST_PEER, 1.0), (Cause.SOURCE_ERROR, 2.0), (Cause.THREAD_SHORTAGE, 3.0), (Cause.TIMEOUT, 0)])
    )
    if is_reversed:
        failures.reverse()
    for rank, (cause, seconds) in failures:
        record_job_failure(folder, rank, Failure(cause, "of a rank", seconds), is_refusal=False)
    assert "failed with exit status 1;" in end(fake, folder, EXIT_RESUMABLE, OURS).stdout
    assert end(fake, folder, 137, OURS).returncode == 1 and folder.result["exit_status"] == 1
    assert folder.result["cause"] == "source_error", "the others lost their connections because of it"


def test_a_rank_that_fails_before_it_trains_leaves_a_note(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in PLACE.items():
        monkeypatch.setenv(name, value)
    assert train_as_rank(folder) == EXIT_FAILED, "it is no task of srun"
    assert find_first_failure(folder) and not find_refusal(folder)
    (folder.path / "submit" / "config.yaml").write_text("epoch: 1\n")
    with pytest.raises(UserError, match="unknown key epoch"):
        train_as_rank(folder)
    refusal = find_refusal(folder)
    assert refusal and "did you mean epochs?" in refusal.message


def test_a_rank_that_fails_without_its_launcher_becomes_what_queues_the_job_again(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the first host are gone the script of the job and all that ranks meet through, also before they have met."""
    with socket.socket() as coordinator:
        coordinator.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{coordinator.getsockname()[1]}"
        for name, value in (
            PLACE | {COORDINATOR_VARIABLE: address, ORPHAN_COMMAND_VARIABLE: json.dumps(["echo", "orphaned"])}
        ).items():
            monkeypatch.setenv(name, value)
        source = "from slurm.scheduling.job import *; train_as_rank(RunFolder(Path(sys.argv[1])))"
        argv = [sys.executable, "-c", source, str(folder.path)]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        assert done.stdout == "orphaned\n", done.stderr
        assert "this rank is leaving the run: the coordinator is unreachable (" in done.stderr
        assert not find_first_failure(folder)
        coordinator.listen()
        assert train_as_rank(folder) == EXIT_FAILED, "the launcher is there, and ends the job"


@pytest.mark.parametrize(
    ("number", "restarts", "status"),
    [(0, "0", None), (signal.SIGUSR2, "0", 1), (0, "1", EXIT_FAILED), (signal.SIGUSR2, "1", 1)],
)
def test_a_rank_that_meets_nobody_refuses_only_at_a_first_start_without_a_stop_request(
    number: int, restarts: str, status: int | None, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others leave when they are asked to stop, and those who wait for them then do not find them."""

    def run_experiment(*_: object, **__: object) -> None:
        raise UnreachableError("rank 1 did not join within 60 s")

    stop = SimpleNamespace(signal_number=number, wait_for_request=lambda: bool(number))
    monkeypatch.setattr(job, "read_rank_info", lambda environ: RankInfo())
    monkeypatch.setattr(
        entry_point, "LaunchedRank", lambda info, cfg: SimpleNamespace(rank_info=info, stop=stop, cfg=cfg)
    )
    monkeypatch.setattr(entry_point, "run_experiment", run_experiment)
    for name, value in (PLACE | {"SLURM_RESTART_COUNT": restarts}).items():
        monkeypatch.setenv(name, value)
    if status is None:
        with pytest.raises(UnreachableError):
            train_as_rank(folder)
    else:
        assert train_as_rank(folder) == status
    assert bool(find_refusal(folder)) == (status is None)
    assert bool(find_first_failure(folder)) == (status == EXIT_FAILED)


@pytest.mark.parametrize("code", [3, EXIT_RESUMABLE])
def test_an_experiment_that_exits_leaves_a_note_of_its_rank(
    code: int, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a process that has replaced another one; a stop request is no failure."""

    def run_experiment(*_: object, **__: object) -> None:
        sys.exit(code)

    stop = SimpleNamespace(signal_number=0, wait_for_request=lambda: False)
    monkeypatch.setattr(job, "read_rank_info", lambda environ: RankInfo())
    monkeypatch.setattr(entry_point, "LaunchedRank", lambda info, cfg: SimpleNamespace(rank_info=info, stop=stop))
    monkeypatch.setattr(entry_point, "run_experiment", run_experiment)
    for name, value in (PLACE | {REPLACED_RANK_VARIABLE: "2"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as exited:
        train_as_rank(folder)
    assert exited.value.code == code
    noted = [(each.failure.cause, each.failure.message) for each in read_job_failures(folder, rank=2)]
    assert noted == ([(Cause.EXITED, "exited with status 3 without an error message")] if code == 3 else [])


def test_the_reason_is_that_of_the_lowest_rank_that_does_not_blame_another_one(
    fake: Fake, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in PLACE.items():
        monkeypatch.setenv(name, value)
    refusals = {
        2: UserError("rank 1 tells"),
        1: UserError("the loss is nan", cause=Cause.DIVERGED),
        0: UnreachableError("rank 1 has not joined"),
        10: UserError("rank 1 tells"),
    }
    for rank, error in refusals.items():
        record_job_failure(folder, rank, Failure.from_error(error), is_refusal=True)
    assert end(fake, folder, 2, OURS).returncode == 2
    assert folder.result["reason"] == "the loss is nan" and requeues(fake) == 0
    assert folder.result["cause"] == "diverged"
    assert folder.result["format"] == 2 and folder.result["last_step"] == 0


def test_a_run_that_has_a_result_is_over(fake: Fake, folder: RunFolder) -> None:
    (folder.path / "result.json").write_text(json.dumps({"state": "cancelled", "exit_status": 130}))
    assert end(fake, folder, EXIT_RESUMABLE, OURS).returncode == 130
    assert not fake.calls.exists()
