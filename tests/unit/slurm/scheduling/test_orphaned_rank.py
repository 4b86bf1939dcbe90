"""What a rank does that cannot reach its coordinator; SLURM's commands are scripts that answer as they are told."""

from __future__ import annotations

import json
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from common.runs.folder import RunFolder
from tests.harness.fake_slurm import Fake, call

NOBODY = "127.0.0.1:9"
RUNNING = "JobState=RUNNING Restarts=1 NodeList"


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    return Fake(tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder.create(tmp_path / "runs", "ddp_multinode", "")
    (made.path / "meta.json").write_text(json.dumps({"job": {"id": "7"}}))
    return made


def orphan(
    fake: Fake, folder: RunFolder, *shown: str, coordinator: str = NOBODY, requeue: str = "exit 0"
) -> subprocess.CompletedProcess[str]:
    """`shown` is what SLURM says of the job, one look after the other, the last for ever; a list has one host."""
    looks = fake.bin.parent / "looks"
    looks.write_text("".join(f"{line}\n" for line in shown))
    once = f'head -1 {looks}; [ "$(wc -l <{looks})" = 1 ] || sed -i 1d {looks}'
    fake.answer("scontrol", f'case "$*" in requeue*) {requeue};; "show hostnames"*) echo "$3";; *) {once};; esac')
    place: dict[str, Any] = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1", "ELASTIC_COORDINATOR": coordinator}
    return call(fake, "slurm.scheduling.orphaned_rank", str(folder.path), "node1", **place)


def count_calls(fake: Fake, words: str) -> int:
    return fake.calls.read_text().splitlines().count(words) if fake.calls.exists() else 0


def test_a_job_that_has_lost_its_first_host_is_queued_again(fake: Fake, folder: RunFolder) -> None:
    """Once SLURM has missed the host: until then it may only have been this one that was cut off."""
    done = orphan(fake, folder, f"{RUNNING}=node1", f"{RUNNING}=node2")
    assert done.returncode == 0 and "the first host is lost; requeueing job 7" in done.stdout, done.stderr
    assert count_calls(fake, "scontrol requeue 7") == 1 and not count_calls(fake, "scancel 7")
    assert count_calls(fake, "scontrol -o show job 7") == 3 and not folder.result


def test_a_rank_that_was_given_up_ends(fake: Fake, folder: RunFolder) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        done = orphan(fake, folder, f"{RUNNING}=node2", coordinator=f"127.0.0.1:{listener.getsockname()[1]}")
    assert done.returncode == 0 and not count_calls(fake, "scontrol requeue 7"), done.stderr


def test_a_job_that_another_rank_has_queued_again_is_left_alone(fake: Fake, folder: RunFolder) -> None:
    for shown in ("JobState=PENDING Restarts=2 NodeList=", "JobState=RUNNING Restarts=2 NodeList=node2"):
        assert orphan(fake, folder, shown).returncode == 0
    assert not count_calls(fake, "scontrol requeue 7") and not folder.result


def test_a_job_that_cannot_be_queued_again_is_ended(fake: Fake, folder: RunFolder) -> None:
    """Without its script nothing else would end it before its time limit."""
    done = orphan(fake, folder, f"{RUNNING}=node2", requeue="echo 'requeue is disabled' >&2; exit 1")
    assert done.returncode == 0 and count_calls(fake, "scancel 7") == 1, done.stderr
    assert folder.result["state"] == "failed" and "requeue is disabled" in folder.result["reason"]
