"""The fault suite (tests/cluster/faults.py), each fault once, and runs that must not be started again.

FAULT_ROUNDS=3 makes three rounds, FAULT_NOTICES=20 sends twenty notices at random moments, and FAULT_SEED=... repeats
the steps and moments of an earlier test run.
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

from common.system.errors import UserError
from tests.cluster import fault_kinds, fault_tables, faults
from tests.cluster.fault_kinds import Fault
from tests.cluster.lab import Lab, Running
from tests.harness.repository import ROOT
from tests.harness.runs import wandb_host
from tests.harness.runs.tracked_runs import list_expected_rows
from tests.harness.slurm.cluster_site import wait_on_cluster

pytestmark = pytest.mark.timeout(500)
CASES = faults.plan_cases(int(os.environ.get("FAULT_ROUNDS", "1")), [])
CASE_IDS = [f"{number}-{fault.name}-{experiment}" for number, fault, experiment in CASES]
NOTICES = int(os.environ.get("FAULT_NOTICES", "3"))
FAILING = """
import time

def main(cfg, run):
    if run.world.rank == 1:
        raise ValueError("planted")
    try:
        time.sleep(60)
    finally:
        time.sleep(60)  # longer than SLURM waits
"""
LONG_RUN = ("epochs=400", "steps=0", "width=64", "data.train_limit=6400")  # minutes, unless the test ends it


@pytest.mark.parametrize("number, fault, experiment", CASES, ids=CASE_IDS)
def test_a_disturbed_run_equals_an_undisturbed_one_to_the_bit(
    lab: Lab, record_property: Callable[[str, object], None], number: int, fault: Fault, experiment: str
) -> None:
    if fault.own_disk and os.getuid():
        pytest.skip(f"NOT TESTED: {faults.NO_DISK}")
    seed = os.environ["FAULT_SEED"]
    row = faults.disturb_run(lab, fault, experiment, f"{seed} {number}")
    record_property("fault", fault_tables.line(row))
    assert row.equal, f"FAULT_SEED={seed}: {row}"


@pytest.fixture
def small(lab: Lab) -> Lab:
    """A lab without the settings of a fault."""
    lab.up()
    return lab


def test_a_notice_to_a_starting_run_requeues_it(small: Lab) -> None:
    running = small.submit("mnist_pipeline")
    wait_on_cluster("two ranks", lambda: len(running.ranks()) == 2, 30, 0.02)
    small.slurm("scancel", "--signal=USR2", running.job)
    wait_on_cluster("the job is requeued", lambda: running.state() == "PENDING")
    assert not running.folder.result
    running.finish()
    assert not faults.list_problems(running.folder, small.reference("mnist_pipeline"))


@pytest.mark.timeout(400 + 40 * NOTICES)
def test_notices_at_random_moments_of_jobs_lose_nothing(small: Lab) -> None:
    """Send notices while a job starts, trains, saves, evaluates and exports."""
    seed = os.environ["FAULT_SEED"]
    chance = random.Random(f"{seed} notices")
    reference = small.reference("mnist_pipeline")
    start_time = (reference.path / "config.yaml").stat().st_mtime
    end_time = (reference.path / "result.json").stat().st_mtime
    notices = 0
    while notices < NOTICES:
        running = small.submit("mnist_pipeline", WANDB_MODE="offline")
        while notices < NOTICES and not running.folder.result:
            send_notice(running, chance.uniform(0, end_time - start_time))
            notices += 1
        running.finish()
        problems = faults.list_problems(running.folder, reference, tracked=True)
        if was_tracking_cut_short(running):
            problems = [problem for problem in problems if not problem.startswith("W&B")]
        assert not problems, f"FAULT_SEED={seed}"


def was_tracking_cut_short(running: Running) -> bool:
    """Return whether a notice left W&B too little time; make sync then sends the rest."""
    logs = (running.folder.path / "submit").glob("*.out")
    return any("tracking did not complete" in log.read_text(errors="replace") for log in logs)


def send_notice(running: Running, delay: float) -> None:
    """Signal all ranks `delay` seconds after the job starts, and wait until they have exited."""
    wait_on_cluster("the job runs or is over", lambda: running.folder.result or running.state() == "RUNNING", 60, 0.1)
    time.sleep(delay)
    ranks = running.ranks()
    step = running.step()
    signal_time = time.monotonic()
    if not running.folder.result:
        with contextlib.suppress(UserError):  # the job has ended meanwhile
            running.lab.slurm("scancel", "--signal=USR2", running.job)
        wait_on_cluster("the ranks have exited", lambda: not set(ranks) & set(running.ranks()), 30, 0.1)
    print(f"{len(ranks)} ranks, step {step}: exited within {time.monotonic() - signal_time:.1f} s", flush=True)


# ---- runs that are not started again


def check_not_restarted(running: Running, state: str) -> None:
    """Check that the job ends as `state`, and that no attempt follows within the time of a requeue."""
    wait_on_cluster("the job has ended", lambda: running.state() == state)
    attempts = len(running.folder.list_attempts())
    time.sleep(3)
    assert running.state() == state
    assert len(running.folder.list_attempts()) == attempts


def test_wandb_gets_each_row_of_a_cancelled_online_run_once(small: Lab) -> None:
    """SLURM's SIGTERM ends W&B's client; the tracking process starts it again, and make sync sends the rest."""
    environ: dict[str, Any] = fault_kinds.start_wandb_host(small)
    running = small.submit("mnist_pipeline", *LONG_RUN, **environ)
    record = small.base / fault_kinds.WANDB_RECORD
    wait_on_cluster("W&B has rows", lambda: wandb_host.read_received_metrics(record))
    small.command("cancel", f"--runs={running.folder.path.parent}", running.folder.path.name)
    wait_on_cluster("the job has ended", lambda: running.state() not in faults.ACTIVE_STATES)
    argv = [sys.executable, "-m", "slurm", "sync", f"--runs={running.folder.path.parent}"]
    command = small.cluster.build_command(argv, cwd=ROOT)
    env = small.env | environ | {"WANDB_ERROR_REPORTING": "false"}

    def has_synced() -> bool:
        sync = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
        assert sync.returncode == 0, sync.stdout + sync.stderr
        return "skipped" not in sync.stdout  # the tracking process may exit after the job has ended

    wait_on_cluster("make sync does not skip the run", has_synced)
    assert small.wandb
    small.wandb.kill()
    small.wandb.wait()
    for path in running.folder.path.glob("attempts/*/logs/tracker.log"):
        print(path.read_text())  # shows whether the client was killed and restarted in time
    steps = [row["global_step"] for _, row in wandb_host.read_received_metrics(record)]
    assert steps == [row["global_step"] for row in list_expected_rows(running.folder)]


def test_a_cancelled_run_is_not_started_again(small: Lab) -> None:
    running = small.submit("mnist_pipeline", *LONG_RUN)
    running.wait_for_step(20)
    small.command("cancel", str(running.folder.path))
    check_not_restarted(running, "CANCELLED")
    assert running.folder.result["state"] == "cancelled"
    assert len(running.folder.list_attempts()) == 1


def test_a_run_whose_loss_is_not_finite_is_not_restarted(small: Lab) -> None:
    running = small.submit("mnist_pipeline", *LONG_RUN, "optim.lr=100", "optim.decay=constant")
    running.finish()
    check_not_restarted(running, "FAILED")
    assert len(running.folder.list_attempts()) == 1
    result = running.folder.result
    assert result["state"] == "failed"
    assert result["exit_status"] == 2
    assert "the loss of step" in result["reason"]
    assert "positions" in result["reason"]


def test_a_run_that_crashes_at_every_start_is_abandoned(small: Lab) -> None:
    """Two attempts in a row may fail without a new checkpoint, the third may not; here, it fails before the first step.

    The exit status is that of the failed rank, although srun kills the other one.
    """
    running = small.submit("mnist_pipeline", *LONG_RUN, "checkpoint.every_steps=0", "checkpoint.max_restarts=2")
    for number in (1, 2):
        running.wait_for_start(number)
        if number == 2:
            with open(running.folder.path / "code/experiments/mnist_pipeline.py", "a") as source:
                source.write(FAILING)
        os.kill(running.ranks()[number % 2], signal.SIGKILL)
    running.finish()
    check_not_restarted(running, "FAILED")
    assert len(running.folder.list_attempts()) == 3
    result = running.folder.result
    assert "3 attempts in a row ended without a new checkpoint" in result["reason"]
    assert result["exit_status"] == 1


def test_a_restart_is_shown_by_status_and_followed_by_logs_to_the_end(small: Lab) -> None:
    running = small.submit("mnist_pipeline")
    argv = [sys.executable, "-m", "slurm", "logs", str(running.folder.path), "--follow=1"]
    with subprocess.Popen(argv, cwd=ROOT, env=small.env, stdout=subprocess.PIPE, text=True) as follower:
        running.wait_for_step(30)
        states = ["RUNNING"]
        small.slurm("scancel", "--signal=USR2", running.job)
        while not running.folder.result:
            state = small.command("status", str(running.folder.path)).splitlines()[-1].split()[1]
            if state != states[-1]:
                states.append(state)
            assert state not in ("LOST", "UNKNOWN")
        output, _ = follower.communicate(timeout=60)
    assert states[:3] == ["RUNNING", "PENDING", "RUNNING"]
    assert follower.returncode == 0
    for message in ("checkpoint saved at step", "; requeueing job ", "resumed from step", "test accuracy"):
        assert message in output
