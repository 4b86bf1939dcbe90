"""Claims: an attempt is refused while another one of the run is alive, and stops when it is superseded or moved."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.runs import claims, provenance
from common.runs.claims import AttemptWatch, Claim, ProcessState
from common.runs.folder import RunFolder, write_json
from common.runs.result import Result
from common.runs.run_lock import lock_run, try_to_lock
from common.runs.tracking.wandb_rows import TrackingNote, write_note
from common.system.errors import RunTakenError
from common.system.processes import Process


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    return RunFolder.create(tmp_path, "mnist_pipeline", "")


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def identify(pid: int, **changed: Any) -> dict[str, Any]:
    return provenance.identify_process() | {"pid": pid, "pid_started": Process.identify(pid).start} | changed


def test_an_attempt_is_refused_while_another_one_is_alive(folder: RunFolder, other: subprocess.Popen[bytes]) -> None:
    folder.claim_attempt({"process": identify(other.pid)})
    words = rf"{folder.path.name} is already running \(attempt 1, process {other.pid} on this machine\); wait for it or"
    with pytest.raises(RunTakenError, match=words):
        claims.claim_next_attempt(folder)
    with pytest.raises(RunTakenError, match=words):
        lock_run(folder)
    assert len(folder.list_attempts()) == 1 and len(list((folder.path / "attempts").iterdir())) == 1
    other.kill()
    other.wait()
    assert claims.claim_next_attempt(folder).number == 2
    claim = Claim.read(folder.list_attempts()[-1])
    assert claim is not None and claim.check_process() is ProcessState.ALIVE and claim.process["pid"] == os.getpid()


def test_a_process_that_only_meta_json_names_is_respected(folder: RunFolder, other: subprocess.Popen[bytes]) -> None:
    """Of an attempt of older source."""
    folder.claim_attempt()
    entry = identify(other.pid) | {"attempt": 1, "state": "running"}
    write_json(folder.path / "meta.json", {"history": [entry]})
    with pytest.raises(RunTakenError, match=rf"is already running \(attempt 1, process {other.pid} on this machine\)"):
        claims.claim_next_attempt(folder)
    write_json(folder.path / "meta.json", {"history": [entry | {"pid_started": 1}]})
    assert claims.claim_next_attempt(folder).number == 2


def test_of_many_starts_at_once_one_gets_the_run(folder: RunFolder) -> None:
    gate, ends = threading.Barrier(8), list[int]()

    def claim() -> None:
        gate.wait()
        try:
            ends.append(claims.claim_next_attempt(folder).number)
        except RunTakenError:
            ends.append(0)

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = [number for number in ends if number]
    assert [attempt.number for attempt in folder.list_attempts()] == [winner] and len(ends) == 8


def test_the_lock_is_for_one_process(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.runs.run_lock.LOCK_SECONDS", 0.1)
    words = "already running or being started on this machine; wait for it or stop it: make cancel"
    lock = try_to_lock(folder)
    assert lock is not None
    with lock, pytest.raises(RunTakenError, match=words):
        lock_run(folder)
    lock_run(folder).close()


def test_an_attempt_that_was_told_to_stop_is_waited_for(folder: RunFolder, other: subprocess.Popen[bytes]) -> None:
    folder.claim_attempt({"process": identify(other.pid)})
    Result("cancelled", 130).write(folder)
    threading.Timer(0.5, other.kill).start()
    threading.Timer(0.5, other.wait).start()
    assert claims.claim_next_attempt(folder).number == 2


def test_a_process_of_another_host_is_judged_by_its_signs_of_life(
    folder: RunFolder, other: subprocess.Popen[bytes]
) -> None:
    elsewhere = identify(other.pid, host="elsewhere", boot="another")
    attempt = folder.claim_attempt({"process": elsewhere})
    told = r"the process still exists\. The last activity was 0 s ago.* after 60 s"
    with pytest.raises(RunTakenError, match=told):
        claims.claim_next_attempt(folder)
    claims.mark_ended(attempt)
    second = claims.claim_next_attempt(folder)
    write_json(second.attempt_folder / "claim.json", {"process": elsewhere})
    before = time.time() - 61
    for path in [second.attempt_folder, *second.attempt_folder.rglob("*")]:
        os.utime(path, (before, before))
    # `make sync` and reports write there, too.
    write_note(second, TrackingNote())
    (second.attempt_folder / "logs" / "tracker.log").touch()
    assert claims.compute_seconds_since_last_write(second) >= 61
    assert claims.claim_next_attempt(folder).number == 3


def test_a_restart_of_the_same_job_takes_its_run(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_another_torchrun_without_a_name_does_not_take_the_run(
    folder: RunFolder, other: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    agent = f"torchrun none {socket.gethostname()} {other.pid} {Process.identify(other.pid).start}"
    folder.claim_attempt({"process": identify(other.pid), "starter": agent})
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(RunTakenError, match="is already running"):
        claims.claim_next_attempt(folder)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    named = f"torchrun mine elsewhere {other.pid} 1"
    write_json(folder.path / "attempts/0001/claim.json", {"process": identify(1, host="elsewhere"), "starter": named})
    assert claims.claim_next_attempt(folder).number == 2, "an agent on another host takes over a launch with a name"


def test_a_process_that_cannot_be_judged_by_its_pid_counts_by_its_signs_of_life(
    folder: RunFolder, other: subprocess.Popen[bytes]
) -> None:
    process = identify(other.pid)
    other.kill()
    other.wait()
    folder.claim_attempt({"process": process, "starter": "slurm cluster 17"})
    with pytest.raises(RunTakenError, match="this host cannot check whether the process still exists"):
        claims.claim_next_attempt(folder)  # an elastic job continues without the rank that claimed the attempt
    (folder.path / "attempts/0001/claim.json").unlink()
    write_json(folder.path / "attempts/0001/claim.json", {"process": process | {"pid_namespace": "pid:[1]"}})
    (folder.path / "config.yaml").write_text("launch:\n  step_timeout: 300\n")
    with pytest.raises(RunTakenError, match="considered ended after 300 s"):
        claims.claim_next_attempt(folder)
    claims.mark_ended(folder.list_attempts()[0])
    assert claims.claim_next_attempt(folder).number == 2


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"process": 3}', '{"process": {"pid": "1"}}'])
def test_a_damaged_claim_counts_as_none(folder: RunFolder, text: str) -> None:
    attempt = folder.claim_attempt()
    (attempt.attempt_folder / "claim.json").write_text(text)
    assert Claim.read(attempt) is None and claims.claim_next_attempt(folder).number == 2


def test_an_attempt_notices_that_its_folder_is_gone_or_a_newer_one_is_there(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AttemptWatch, "RETURN_SECONDS", 0.5)
    attempt = claims.claim_next_attempt(folder)
    watch = AttemptWatch(attempt)
    assert watch.find_stop_reason(7) == ""
    away = folder.path.with_name("away")
    folder.path.rename(away)
    remedy = f"move it back, then resume with: make exp RESUME={folder.path}"
    words = f"{folder.path} was moved or deleted, so training stopped after step 7; {remedy}"
    assert watch.find_stop_reason(7) == words
    threading.Timer(0.2, away.rename, [folder.path]).start()
    assert watch.find_stop_reason(7) == "", "it came back"
    attempt.attempt_folder.rename(away)
    attempt.attempt_folder.mkdir()
    assert "attempts/0001 was moved or deleted, so training stopped after step 7" in watch.find_stop_reason(7), (
        "it is another folder"
    )
    attempt.attempt_folder.rmdir()
    away.rename(attempt.attempt_folder)
    folder.claim_attempt({"process": identify(os.getpid(), host="elsewhere")})
    words = f"attempt 1 of {folder.path.name} was superseded by attempt 2 on host elsewhere; stopping without saving"
    assert watch.find_stop_reason(7) == words
    watch.close()


def test_a_result_that_is_there_is_not_overwritten(folder: RunFolder) -> None:
    assert Result("finished", 0).write_once(folder)
    assert not Result("cancelled", 130).write_once(folder)
    assert folder.result["state"] == "finished"
    assert sorted(path.name for path in folder.path.iterdir()) == ["config.yaml", "result.json"]
