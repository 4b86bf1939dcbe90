"""The fault suite (tests/cluster/faults.py), each fault once; and what must not be started again, is not.

FAULT_ROUNDS=3 goes three times round, FAULT_NOTICES=20 sends twenty notices at random moments, FAULT_SEED=... strikes
at the steps and moments of an earlier time.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.cluster import fault_kinds, fault_tables, faults
from tests.cluster.fault_kinds import Fault
from tests.cluster.lab import Lab, Running
from tests.harness import wandb_host
from tests.harness.site import until
from tests.harness.tracked_runs import chosen_rows
from tests.harness.warm import ROOT

pytestmark = pytest.mark.timeout(500)
PLAN = faults.plan(int(os.environ.get("FAULT_ROUNDS", "1")), [])
NOTICES = int(os.environ.get("FAULT_NOTICES", "3"))
FAILING = """
import time

def main(cfg, run):
    if run.world.rank == 1:
        raise ValueError("planted")
    try:
        time.sleep(60)
    finally:
        time.sleep(60)  # slower to leave than SLURM waits
"""
SMALL = ("epochs=400", "steps=0", "width=64", "data.train_limit=6400")  # minutes, if nobody ends it


@pytest.mark.parametrize(("number", "fault", "experiment"), PLAN, ids=[f"{n}-{f.name}-{e}" for n, f, e in PLAN])
def test_a_disturbed_run_ends_equal_to_the_bit(
    lab: Lab, record_property: Callable[[str, object], None], number: int, fault: Fault, experiment: str
) -> None:
    if fault.own_disk and os.getuid():
        pytest.skip(f"NOT TESTED: {faults.NO_DISK}")
    seed = os.environ["FAULT_SEED"]
    row = faults.suffer(lab, fault, experiment, f"{seed} {number}")
    record_property("fault", fault_tables.line(row))
    assert row.equal, f"FAULT_SEED={seed}: {row}"


@pytest.fixture
def small(lab: Lab) -> Lab:
    """Without what a fault has set."""
    lab.up()
    return lab


def test_a_notice_to_a_starting_run_queues_it_again(small: Lab) -> None:
    running = small.submit("mnist_pipeline")
    until("two ranks", lambda: len(running.ranks()) == 2, 30, 0.02)
    small.slurm("scancel", "--signal=USR2", running.job)
    until("the job is queued again", lambda: running.state() == "PENDING", 30)
    assert not running.folder.result
    running.finish()
    assert not faults.problems(running.folder, small.reference("mnist_pipeline"))


@pytest.mark.timeout(400 + 40 * NOTICES)
def test_notices_at_random_moments_of_jobs_lose_nothing(small: Lab) -> None:
    """From the first process of a job to its end: while it starts, trains, saves, evaluates and exports."""
    seed, left = os.environ["FAULT_SEED"], NOTICES
    chance, reference = random.Random(f"{seed} notices"), small.reference("mnist_pipeline")
    ended, made = ((reference.path / name).stat().st_mtime for name in ("result.json", "config.yaml"))
    while left:
        running = small.submit("mnist_pipeline", WANDB_MODE="offline")
        while left and not running.folder.result:
            send_notice(running, chance.uniform(0, ended - made))
            left -= 1
        running.finish()
        assert not faults.problems(running.folder, reference, followed=True), f"FAULT_SEED={seed}"


def send_notice(running: Running, moment: float) -> None:
    """So many seconds after a start of the job signal all ranks that there are, and wait until they have left."""
    until("the job runs, or is over", lambda: running.folder.result or running.state() == "RUNNING", 60, 0.1)
    time.sleep(moment)
    ranks, step, began = running.ranks(), running.step(), time.monotonic()
    if not running.folder.result:
        with contextlib.suppress(RuntimeError):  # the job has ended meanwhile
            running.lab.slurm("scancel", "--signal=USR2", running.job)
        until("the ranks have left", lambda: not set(ranks) & set(running.ranks()), 30, 0.1)
    print(f"{len(ranks)} ranks, step {step}: left within {time.monotonic() - began:.1f} s", flush=True)


# ---- what is not started again


def stays_ended(running: Running, state: str) -> None:
    """Longer than a requeue takes: the job has ended as `state` and no start follows."""
    until("the job has ended", lambda: running.state() == state, 30)
    starts = len(running.folder.list_attempts())
    time.sleep(3)
    assert running.state() == state and len(running.folder.list_attempts()) == starts


def test_wandb_gets_each_row_once_of_an_online_run_that_is_cancelled(small: Lab) -> None:
    """SLURM's SIGTERM ends W&B's client; the tracking process starts it again, and make sync sends the rest."""
    environ: dict[str, Any] = fault_kinds.start_wandb(small)
    running = small.submit("mnist_pipeline", *SMALL, **environ)
    sent = small.base / fault_kinds.RECORD
    until("W&B has rows", lambda: wandb_host.read_history(sent), 90)
    small.command("cancel", f"--runs={running.folder.path.parent}", running.folder.path.name)
    until("the job has ended", lambda: running.state() not in ("RUNNING", "COMPLETING"), 60)
    argv = [sys.executable, "-m", "slurm", "sync", f"--runs={running.folder.path.parent}"]
    command = small.cluster.build_command(argv, cwd=ROOT)
    env = small.env | environ | {"WANDB_ERROR_REPORTING": "false"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert small.wandb
    small.wandb.kill()
    small.wandb.wait()
    assert done.returncode == 0, done.stdout + done.stderr
    for path in running.folder.path.glob("attempts/*/logs/tracker.log"):
        print(path.read_text())  # whether the client was ended, and made up for in time
    steps = [row["global_step"] for _, row in wandb_host.read_history(sent)]
    assert steps == [row["global_step"] for row in chosen_rows(running.folder)]


def test_a_cancelled_run_is_not_started_again(small: Lab) -> None:
    running = small.submit("mnist_pipeline", *SMALL)
    running.wait_for_step(20)
    small.command("cancel", str(running.folder.path))
    stays_ended(running, "CANCELLED")
    assert running.folder.result["state"] == "cancelled" and len(running.folder.list_attempts()) == 1


def test_a_loss_that_is_no_number_is_not_tried_again(small: Lab) -> None:
    running = small.submit("mnist_pipeline", *SMALL, "optim.lr=100", "optim.decay=constant")
    running.finish()
    stays_ended(running, "FAILED")
    assert len(running.folder.list_attempts()) == 1
    result = running.folder.result
    assert result["state"] == "failed" and result["exit_status"] == 2
    assert "the loss of step" in result["reason"] and "positions" in result["reason"]


def test_a_run_that_crashes_at_every_start_is_given_up(small: Lab) -> None:
    """Two attempts in a row may fail in vain, the third is one too many: here by an exception before the first step.

    The exit status is that of the rank that failed, although srun has to kill the other one.
    """
    running = small.submit("mnist_pipeline", *SMALL, "checkpoint.every_steps=0", "checkpoint.max_restarts=2")
    for number in (1, 2):
        running.wait_for_start(number)
        if number == 2:
            with open(running.folder.path / "code/experiments/mnist_pipeline.py", "a") as source:
                source.write(FAILING)
        os.kill(running.ranks()[number % 2], signal.SIGKILL)
    running.finish()
    stays_ended(running, "FAILED")
    assert len(running.folder.list_attempts()) == 3
    result = running.folder.result
    assert "3 attempts in a row ended without a new checkpoint" in result["reason"] and result["exit_status"] == 1


def test_a_restart_is_shown_by_status_and_followed_by_logs_to_the_end(small: Lab) -> None:
    running = small.submit("mnist_pipeline")
    argv = [sys.executable, "-m", "slurm", "logs", str(running.folder.path), "--follow=1"]
    with subprocess.Popen(argv, cwd=ROOT, env=small.env, stdout=subprocess.PIPE, text=True) as follower:
        running.wait_for_step(30)
        seen = ["RUNNING"]
        small.slurm("scancel", "--signal=USR2", running.job)
        while not running.folder.result:
            shown = small.command("status", str(running.folder.path)).splitlines()[-1].split()[1]
            if shown != seen[-1]:
                seen.append(shown)
            assert shown not in ("LOST", "UNKNOWN")
        said, _ = follower.communicate(timeout=60)
    assert seen[:3] == ["RUNNING", "PENDING", "RUNNING"]
    assert follower.returncode == 0
    for words in ("checkpoint saved at step", "; requeueing job ", "resumed from step", "test accuracy"):
        assert words in said
