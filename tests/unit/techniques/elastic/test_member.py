"""Member of an elastic run: a lost connection to the coordinator, and waits in which a rank is not stuck."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from common.checkpoint.checkpointer import Checkpointer
from common.checkpoint.rank_file import write_rank_file
from common.data.workers import Samples, WorkerPool
from common.ranks.rank_info import ORPHAN_COMMAND_VARIABLE
from common.ranks.ranks import Ranks
from common.ranks.rendezvous import World
from common.runs.folder import RunFolder
from common.techniques.elastic.member import STUCK_REASON
from configs.shared import Checkpoint
from tests.harness.commands.processes import make_environment, wait_until
from tests.harness.repository import ROOT
from tests.unit.techniques.elastic.elastic_run import RecordingMember, StartRun

PROGRAM = """
import socket, sys, time
from common.techniques.elastic.member import Member
member = Member(sys.argv[1], 0, 1.5, "", joins=False)
print(member.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT), flush=True)
time.sleep(60)
"""


def test_a_rank_that_cannot_reach_its_coordinator_executes_the_command_for_orphans() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = [sys.executable, "-c", PROGRAM, f"127.0.0.1:{listener.getsockname()[1]}"]
        env = make_environment(**{ORPHAN_COMMAND_VARIABLE: json.dumps(["echo", "orphaned"])})
        with subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True) as rank:
            assert rank.stdout
            connection, _ = listener.accept()
            assert rank.stdout.readline() == "1500\n", "milliseconds until a lost host is noticed"
            connection.close()
            output, _ = rank.communicate(timeout=30)
            assert output == "orphaned\n"
    assert rank.returncode == 0


Stall = Callable[[], None]


def wait_for_data_worker(stall: Stall, folder: Path) -> None:
    def load_forever(_: np.ndarray) -> Samples:
        threading.Event().wait()
        return None, None

    def stop_requested() -> bool:
        stall()
        return True

    pool = WorkerPool(load_forever, [np.zeros((2, 1, 1))], 1, (None, None), timeout=0.01)
    assert not list(pool.iterate_blocks(torch.device("cpu"), stop_requested))


def write_checkpoint(stall: Stall, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: stall())
        write_rank_file(folder / "rank-0.pt", {})


def wait_for_deletions(stall: Stall, folder: Path) -> None:
    class SlowDeletion(threading.Thread):
        def join(self, timeout: float | None = None) -> None:
            stall()

    world = World(hosts=("here",), device=torch.device("cpu"), backend="gloo", threads=1)
    checkpointer = Checkpointer(RunFolder(folder), Ranks(world), Checkpoint(), print)
    checkpointer.deletion = SlowDeletion()
    checkpointer.wait_for_deletions()


def wait_for_check(member: RecordingMember) -> None:
    """Wait until the member has checked once more whether its main thread is stuck."""
    previous = member.last_busy
    wait_until(lambda: member.leave_reason or member.last_busy > previous, "the member checks")


@pytest.mark.parametrize("wait", [wait_for_data_worker, write_checkpoint, wait_for_deletions])
def test_a_rank_that_waits_for_its_data_or_its_disk_is_not_stuck(
    wait: Callable[[Stall, Path], None], start_run: StartRun, tmp_path: Path
) -> None:
    run = start_run(2, timeout=2)
    member = run.members[0]
    member.max_sleep_seconds = 3600
    member.heartbeat_seconds = 0.02
    run.kill(1)
    wait_until(lambda: member.generation_ended, "rank 0 knows of the loss")

    calls: list[str] = []

    def stall() -> None:
        calls.append("stall")
        member.max_sleep_seconds = 0
        for _ in range(3):
            wait_for_check(member)
        member.max_sleep_seconds = 3600

    wait(stall, tmp_path)
    assert calls, "the rank did not wait"
    assert STUCK_REASON not in member.leave_reason
