"""An attempt is refused while another attempt of the run is alive, and stops if it is superseded or moved."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from common.runs import claims
from common.runs.claims import AttemptWatch, Claim, ProcessState
from common.runs.folder import RunFolder, write_json
from common.runs.result import Result
from common.runs.run_lock import lock_run, try_to_lock
from common.runs.tracking.wandb_rows import TrackingNote, write_note
from common.system.errors import RunTakenError
from common.system.processes import Process
from tests.harness.runs.process_records import Popen, identify_process


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    return RunFolder.create(tmp_path, "mnist_pipeline", "")


def kill(process: Popen) -> None:
    process.kill()
    process.wait()


def test_an_attempt_is_refused_while_another_one_is_alive(folder: RunFolder, waiting_process: Popen) -> None:
    folder.claim_attempt({"process": identify_process(waiting_process.pid)})
    process = rf"\(attempt 1, process {waiting_process.pid} on this machine\)"
    message = f"{folder.path.name} is already running {process}; wait for it or"
    with pytest.raises(RunTakenError, match=message):
        claims.claim_next_attempt(folder)
    with pytest.raises(RunTakenError, match=message):
        lock_run(folder)
    assert len(folder.list_attempts()) == 1
    assert len(list((folder.path / "attempts").iterdir())) == 1

    kill(waiting_process)
    second = claims.claim_next_attempt(folder)
    assert second.number == 2
    claim = Claim.read(second)
    assert claim is not None
    assert claim.check_process() is ProcessState.ALIVE
    assert claim.process["pid"] == os.getpid()


def test_an_attempt_of_an_older_version_without_a_claim_is_respected(folder: RunFolder, waiting_process: Popen) -> None:
    folder.claim_attempt()
    history = identify_process(waiting_process.pid) | {"attempt": 1, "state": "running"}
    write_json(folder.path / "meta.json", {"history": [history]})
    message = rf"is already running \(attempt 1, process {waiting_process.pid} on this machine\)"
    with pytest.raises(RunTakenError, match=message):
        claims.claim_next_attempt(folder)

    history["pid_started"] = 1  # another process had this pid
    write_json(folder.path / "meta.json", {"history": [history]})
    assert claims.claim_next_attempt(folder).number == 2


def test_only_one_of_several_concurrent_starts_gets_the_run(folder: RunFolder) -> None:
    barrier = threading.Barrier(8)

    def claim(_: int) -> bool:
        barrier.wait()
        try:
            claims.claim_next_attempt(folder)
        except RunTakenError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        claimed = list(pool.map(claim, range(8)))
    assert sorted(claimed) == [False] * 7 + [True]
    assert len(folder.list_attempts()) == 1


def test_only_one_process_can_lock_a_run(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.runs.run_lock.LOCK_SECONDS", 0.1)
    message = "already running or being started on this machine; wait for it or stop it: make cancel"
    lock = try_to_lock(folder)
    assert lock is not None
    with lock, pytest.raises(RunTakenError, match=message):
        lock_run(folder)
    lock_run(folder).close()


def test_a_new_attempt_waits_for_one_that_is_stopping(folder: RunFolder, waiting_process: Popen) -> None:
    folder.claim_attempt({"process": identify_process(waiting_process.pid)})
    Result("cancelled", 130).write(folder)
    threading.Timer(0.5, kill, [waiting_process]).start()
    assert claims.claim_next_attempt(folder).number == 2


def test_a_process_on_another_host_is_alive_if_it_was_active_recently(
    folder: RunFolder, waiting_process: Popen
) -> None:
    process = identify_process(waiting_process.pid, host="elsewhere", boot="another")
    first = folder.claim_attempt({"process": process})
    message = r"the process still exists\. The last activity was 0 s ago.* after 60 s"
    with pytest.raises(RunTakenError, match=message):
        claims.claim_next_attempt(folder)
    claims.mark_ended(first)
    second = claims.claim_next_attempt(folder)
    assert second.number == 2

    write_json(second.attempt_folder / "claim.json", {"process": process})
    last_activity = time.time() - 61
    for path in [second.attempt_folder, *second.attempt_folder.rglob("*")]:
        os.utime(path, (last_activity, last_activity))
    # `make sync` and reports write to the folder, too. That is no activity of the process.
    write_note(second, TrackingNote())
    (second.attempt_folder / "logs" / "tracker.log").touch()
    assert claims.compute_seconds_since_last_write(second) >= 61
    assert claims.claim_next_attempt(folder).number == 3


def test_a_process_on_another_host_that_is_stopping_is_alive_for_a_shorter_time(
    folder: RunFolder, waiting_process: Popen
) -> None:
    """`make cancel` writes the result before the attempt ends."""
    process = identify_process(waiting_process.pid, host="elsewhere", boot="another")
    first = folder.claim_attempt({"process": process})
    Result("cancelled", 130).write(folder)
    with pytest.raises(RunTakenError, match=r"is stopping .* after 15 s without activity"):
        claims.raise_if_attempt_is_alive(folder)
    last_activity = time.time() - 16
    os.utime(first.attempt_folder / "claim.json", (last_activity, last_activity))
    assert claims.claim_next_attempt(folder).number == 2


def test_a_process_on_another_host_has_ended_if_its_result_has_a_reason(
    folder: RunFolder, waiting_process: Popen
) -> None:
    process = identify_process(waiting_process.pid, host="elsewhere", boot="another")
    folder.claim_attempt({"process": process})
    Result("cancelled", 130, "stopped by Ctrl-C").write(folder)
    claims.raise_if_attempt_is_alive(folder)
    assert claims.claim_next_attempt(folder).number == 2


def test_a_restart_of_the_same_job_gets_its_run(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert claims.claim_next_attempt(folder).number == 1
    with pytest.raises(RunTakenError, match=r"\(attempt 1, job 17, process"):
        claims.claim_next_attempt(folder)

    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert claims.claim_next_attempt(folder).number == 2

    monkeypatch.setenv("SLURM_JOB_ID", "18")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    with pytest.raises(RunTakenError, match=r"\(attempt 2, job 17, process"):
        claims.claim_next_attempt(folder)


def test_only_a_torchrun_launch_with_the_same_name_takes_over_a_run(
    folder: RunFolder, waiting_process: Popen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    agent = f"torchrun none {socket.gethostname()} {waiting_process.pid} {Process.identify(waiting_process.pid).start}"
    first = folder.claim_attempt({"process": identify_process(waiting_process.pid), "starter": agent})
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(RunTakenError, match="is already running"):
        claims.claim_next_attempt(folder)

    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    agent_elsewhere = f"torchrun mine elsewhere {waiting_process.pid} 1"
    claim = {"process": identify_process(1, host="elsewhere"), "starter": agent_elsewhere}
    write_json(first.attempt_folder / "claim.json", claim)
    assert claims.claim_next_attempt(folder).number == 2


def test_an_elastic_job_may_continue_without_the_rank_that_claimed_its_attempt(
    folder: RunFolder, waiting_process: Popen
) -> None:
    process = identify_process(waiting_process.pid)
    kill(waiting_process)
    folder.claim_attempt({"process": process, "starter": "slurm cluster 17"})
    with pytest.raises(RunTakenError, match="this host cannot check whether the process still exists"):
        claims.claim_next_attempt(folder)


def test_a_process_of_another_pid_namespace_is_alive_if_it_was_active_recently(
    folder: RunFolder, waiting_process: Popen
) -> None:
    process = identify_process(waiting_process.pid, pid_namespace="pid:[1]")
    kill(waiting_process)
    attempt = folder.claim_attempt({"process": process})
    (folder.path / "config.yaml").write_text("launch:\n  step_timeout: 300\n")
    with pytest.raises(RunTakenError, match="considered ended after 300 s"):
        claims.claim_next_attempt(folder)
    claims.mark_ended(attempt)
    assert claims.claim_next_attempt(folder).number == 2


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"process": 3}', '{"process": {"pid": "1"}}'])
def test_a_damaged_claim_is_ignored(folder: RunFolder, text: str) -> None:
    attempt = folder.claim_attempt()
    (attempt.attempt_folder / "claim.json").write_text(text)
    assert Claim.read(attempt) is None
    assert claims.claim_next_attempt(folder).number == 2


@pytest.fixture
def attempt(folder: RunFolder) -> RunFolder:
    return claims.claim_next_attempt(folder)


@pytest.fixture
def watch(attempt: RunFolder, monkeypatch: pytest.MonkeyPatch) -> Iterator[AttemptWatch]:
    """The watch of an attempt, which gives a moved folder half a second to return."""
    monkeypatch.setattr(AttemptWatch, "RETURN_SECONDS", 0.5)
    attempt_watch = AttemptWatch(attempt)
    assert attempt_watch.find_stop_reason(7) == ""
    yield attempt_watch
    attempt_watch.close()


def test_a_run_whose_folder_was_moved_stops(folder: RunFolder, watch: AttemptWatch) -> None:
    moved_folder = folder.path.with_name("moved")
    folder.path.rename(moved_folder)
    remedy = f"move it back, then resume with: make exp RESUME={folder.path}"
    reason = f"{folder.path} was moved or deleted, so training stopped after step 7; {remedy}"
    assert watch.find_stop_reason(7) == reason

    threading.Timer(0.2, moved_folder.rename, [folder.path]).start()
    assert watch.find_stop_reason(7) == "", "the folder was moved back"


def test_a_run_whose_attempt_folder_was_replaced_stops(attempt: RunFolder, watch: AttemptWatch) -> None:
    attempt.attempt_folder.rename(attempt.path.with_name("moved"))
    attempt.attempt_folder.mkdir()
    reason = "attempts/0001 was moved or deleted, so training stopped after step 7"
    assert reason in watch.find_stop_reason(7)


def test_a_superseded_attempt_stops(folder: RunFolder, watch: AttemptWatch) -> None:
    folder.claim_attempt({"process": identify_process(os.getpid(), host="elsewhere")})
    reason = f"attempt 1 of {folder.path.name} was superseded by attempt 2 on host elsewhere; stopping without saving"
    assert watch.find_stop_reason(7) == reason
