"""The kinds of faults that disturb runs on a cluster, and how each is caused."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from common.checkpoint import storage
from common.checkpoint.storage import CheckpointPath
from common.runs.folder import RunFolder, read_json
from slurm.local_cluster import daemons
from slurm.local_cluster.slurm_conf import CONTROLLER_ADDRESS
from tests.cluster.lab import (
    CHECKPOINT_STEPS,
    DISK_BYTES,
    SLOW_RATE,
    USUAL_RATE,
    VERY_SLOW_RATE,
    Lab,
    Running,
    last_step,
)
from tests.harness.repository import ROOT
from tests.harness.slurm.cluster_site import wait_on_cluster

Repair = Callable[[], object]


@dataclasses.dataclass(frozen=True)
class Fault:
    """One way to disturb a run. `strike` may return a function that repairs the damage once the run has continued."""

    name: str
    strike: Callable[[Running, random.Random], Repair | None]
    notice: bool = False
    """Whether the run gets a notice before: then no step is lost."""
    starts: int = 2
    """Minimum number of attempts; 1 means that the run continues without another attempt."""
    intervals: int | None = 1
    """Maximum number of lost checkpoint intervals; with None, all steps are lost."""
    unusable: int = 0
    """Number of the newest checkpoints that are unusable: at least as many intervals are lost."""
    only: str = ""
    """The only experiment to which the fault applies."""
    own_disk: bool = False
    """Whether the run folder lies on the lab's own disk, which only root can mount."""
    settings: tuple[str, ...] = ()
    """Additional settings."""
    conf: tuple[str, ...] = ()
    """Additional lines of slurm.conf."""
    environ: Callable[[Lab], dict[str, str]] = lambda lab: {}
    """Additional environment variables, such as those that enable W&B for faults that could damage its record."""


# ---- SLURM takes the hosts away


def signal_job(running: Running, chance: random.Random) -> None:
    running.lab.slurm("scancel", "--signal=USR2", running.job)


def requeue(running: Running, chance: random.Random) -> None:
    running.lab.tool("requeue", running.job)


def preempt(running: Running, chance: random.Random) -> None:
    running.lab.tool("preempt", running.job)


def preempt_encrypted(running: Running, chance: random.Random) -> Repair:
    """Check encryption before and after: the next attempt creates another certificate."""
    check_encrypted(running)
    preempt(running, chance)
    return lambda: check_encrypted(running)


def check_encrypted(running: Running) -> None:
    """Raise RuntimeError if the newest attempt is not encrypted, or if the run folder contains a key."""
    if not read_json(running.newest().attempt_folder / "world.json").get("tls"):
        raise RuntimeError("the attempt is not encrypted")
    keys = list(running.folder.path.glob(".private-*/*.pem"))
    if keys:
        raise RuntimeError(f"{keys[0]} is left")


def reach_time_limit(running: Running, chance: random.Random) -> None:
    """Slow down the run, which would otherwise end within its minute, until SLURM announces the limit.

    The next attempt gets a longer limit, as a busy machine may need it.
    """
    running.lab.limit_cables(VERY_SLOW_RATE)
    wait_on_cluster("SLURM announces the limit", lambda: running.state() != "RUNNING")
    running.lab.slurm("scontrol", "update", f"jobid={running.job}", "timelimit=10")


# ---- processes end or stop


def kill(rank: int) -> Callable[[Running, random.Random], None]:
    def strike(running: Running, chance: random.Random) -> None:
        os.kill(running.ranks()[rank], signal.SIGKILL)

    return strike


def kill_any(running: Running, chance: random.Random) -> None:
    kill(chance.randrange(2))(running, chance)


def kill_twice(running: Running, chance: random.Random) -> None:
    """Kill a rank, and again once the next attempt has trained a step or two."""
    starts = len(running.folder.list_attempts())
    kill_any(running, chance)
    running.wait_for_start(starts + 1)
    kill_any(running, chance)


def kill_resuming(running: Running, chance: random.Random) -> None:
    """Kill a rank, and again when the next attempt has a folder but no recorded parent yet."""
    starts = len(running.folder.list_attempts())
    kill_any(running, chance)
    running.wait_until_queued()

    def find_both_ranks() -> list[int]:
        pids = running.ranks()
        return pids if len(pids) == 2 else []

    ranks = wait_on_cluster("both ranks of the next attempt", find_both_ranks, 120, 0.02)
    wait_on_cluster("the next attempt begins", lambda: len(running.folder.list_attempts()) > starts, 120, 0.001)
    os.kill(chance.choice(ranks), signal.SIGKILL)


def kill_worker(running: Running, chance: random.Random) -> None:
    """Kill a data worker; between two epochs a rank has none for a moment."""
    workers = wait_on_cluster("data workers", lambda: running.workers(chance.randrange(2)), pause=0.01)
    os.kill(chance.choice(workers), signal.SIGKILL)


def stop_forever(running: Running, chance: random.Random) -> None:
    os.kill(running.ranks()[chance.randrange(2)], signal.SIGSTOP)


# ---- hosts, cables and daemons


def power_off(*positions: int) -> Callable[[Running, random.Random], Repair]:
    """Restore one host after the run has continued elsewhere; restore two at once, as one is not enough."""

    def strike(running: Running, chance: random.Random) -> Repair:
        all_hosts = running.hosts()
        hosts = [all_hosts[position] for position in positions]
        for host in hosts:
            running.lab.tool("power-off", host)

        def restore_hosts() -> None:
            for host in hosts:
                restore_host(running.lab, "power-on", host)

        if len(hosts) == 1:
            return restore_hosts
        restore_hosts()
        return lambda: None

    return strike


def cut(position: int) -> Callable[[Running, random.Random], Repair]:
    def strike(running: Running, chance: random.Random) -> Repair:
        host = running.hosts()[position]
        running.lab.tool("cut", host)
        return lambda: restore_host(running.lab, "join", host)

    return strike


def cut_briefly(running: Running, chance: random.Random) -> None:
    """Cut a cable for less than any timeout: TCP sends lost packets again."""
    plan = running.lab.cluster.plan
    number = int(chance.choice(running.hosts()).removeprefix("node"))

    def cut_and_reconnect() -> None:
        daemons.cut_cable(plan, number)
        time.sleep(4)
        daemons.reconnect_cable(plan, number)

    running.lab.as_root(cut_and_reconnect)


def restore_host(lab: Lab, verb: str, host: str) -> None:
    """Restore a host, and let SLURM use it at once."""
    lab.tool(verb, host)
    with contextlib.suppress(Exception):  # SLURM may use it already
        lab.slurm("scontrol", "update", f"nodename={host}", "state=resume")


def kill_slurmd(running: Running, chance: random.Random) -> Repair:
    """Slow down training so that it lasts until SLURM misses the host; an elastic run may continue even then."""
    lab = running.lab
    host = chance.choice(running.hosts())
    lab.limit_cables(SLOW_RATE)
    lab.on_host(host, "kill", "-KILL", lab.daemon(f"slurmd-{host}"))
    wait_on_cluster("SLURM misses the host", lambda: "down" in lab.slurm("sinfo", "-h", "-n", host, "-o", "%t"))
    lab.limit_cables(USUAL_RATE)
    return lambda: lab.on_host(host, "slurmd", "-N", host)


def kill_slurmctld(running: Running, chance: random.Random) -> None:
    """Slow down training so that it lasts until the controller has been restarted."""
    lab = running.lab
    lab.limit_cables(SLOW_RATE)
    lab.slurm("kill", "-KILL", lab.daemon("slurmctld"))
    time.sleep(5)
    lab.slurm("slurmctld")
    wait_on_cluster("the controller answers", lambda: running.state() == "RUNNING")


# ---- files


def damage(harm: Callable[[RunFolder], object]) -> Callable[[Running, random.Random], None]:
    """Kill a rank, and damage files of its attempt while the job is queued."""

    def strike(running: Running, chance: random.Random) -> None:
        kill_any(running, chance)
        running.wait_until_queued()
        harm(running.newest())

    return strike


def find_newest_checkpoint(attempt: RunFolder) -> CheckpointPath:
    return storage.list_checkpoints(attempt)[-1]


def halve(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip_bit(file: Path) -> None:
    """Flip a bit of a tensor, which torch.load does not notice."""
    middle = file.stat().st_size // 2
    with open(file, "r+b") as stream:
        stream.seek(middle)
        byte = stream.read(1)[0]
        stream.seek(middle)
        stream.write(bytes([byte ^ 1]))


def make_latest_dangle(attempt: RunFolder) -> None:
    find_newest_checkpoint(attempt).path.with_name("latest").write_text("step-99999999\n")


def write_half_a_checkpoint(attempt: RunFolder) -> None:
    newest = find_newest_checkpoint(attempt)
    unfinished = newest.path.with_name(f".{CheckpointPath(attempt, newest.step + CHECKPOINT_STEPS).name}.new")
    shutil.copytree(newest.path, unfinished, dirs_exist_ok=True)  # the killed rank may have left such a folder, too
    (unfinished / storage.MANIFEST).unlink()
    os.truncate(unfinished / "rank-0.pt", 1000)


def lose_checkpoints(attempt: RunFolder) -> None:
    for each_attempt in attempt.list_attempts():
        shutil.rmtree(storage.get_checkpoints_dir(each_attempt))


def tear_line(attempt: RunFolder) -> None:
    """Append half a line, as if the writer had been killed."""
    last_line = attempt.metrics_file.read_text().splitlines()[-1]
    with open(attempt.metrics_file, "a") as file:
        file.write(last_line[: len(last_line) // 2])


def halve_newest(attempt: RunFolder) -> None:
    halve(find_newest_checkpoint(attempt).path / "rank-1.pt")


def flip_bit_of_newest(attempt: RunFolder) -> None:
    flip_bit(find_newest_checkpoint(attempt).path / "rank-0.pt")


def delete_newest_manifest(attempt: RunFolder) -> None:
    (find_newest_checkpoint(attempt).path / storage.MANIFEST).unlink()


def halve_meta(attempt: RunFolder) -> None:
    halve(attempt.path / "meta.json")


def fill_disk(running: Running, chance: random.Random) -> None:
    """Slow down training so that checkpoints are due while the disk is full; no step is lost."""
    lab = running.lab
    attempt = running.newest()
    lab.limit_cables(SLOW_RATE)
    # In 12 s, a slow run takes more than 10 steps, so that it reaches the next checkpoint while the disk is full.
    wait_on_cluster(
        "a checkpoint is due soon", lambda: CHECKPOINT_STEPS // 2 <= last_step(attempt) % CHECKPOINT_STEPS < 15
    )
    zeros = lab.disk / "zeros"
    lab.resize_disk(shutil.disk_usage(lab.disk).used + (1 << 20))
    with contextlib.suppress(OSError), open(zeros, "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    due = find_newest_checkpoint(attempt).step + CHECKPOINT_STEPS
    time.sleep(12)
    lab.resize_disk(DISK_BYTES)
    zeros.unlink()
    wait_on_cluster("the metrics are written", lambda: last_step(attempt) >= due)
    if CheckpointPath(attempt, due).path.exists():
        raise RuntimeError(f"step {due} was saved: the disk was not full when it was due")


# ---- W&B


def track_offline(lab: Lab) -> dict[str, str]:
    """Return variables that make W&B record a run without a host."""
    return {"WANDB_MODE": "offline"}


WANDB_RECORD = "sent-to-wandb"


def start_wandb_host(lab: Lab) -> dict[str, str]:
    """Start a recording W&B host in the cluster's network; return variables that make a run use it."""
    (lab.base / WANDB_RECORD).unlink(missing_ok=True)
    argv = [sys.executable, "-m", "tests.harness.runs.wandb_host", CONTROLLER_ADDRESS, str(lab.base / WANDB_RECORD)]
    command = lab.cluster.build_command(argv, cwd=ROOT)
    lab.wandb = subprocess.Popen(command, env=lab.env, stdout=subprocess.PIPE, text=True)
    assert lab.wandb.stdout
    return {"WANDB_MODE": "online", "WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": lab.wandb.stdout.readline().strip()}


def kill_wandb_host(running: Running, chance: random.Random) -> None:
    """Kill the W&B host in the middle of an online run, which is slow until W&B has accepted it."""
    host = running.lab.wandb
    assert host
    running.lab.limit_cables(SLOW_RATE)
    mode = wait_for_wandb(running)
    host.kill()
    host.wait()
    if mode != "online":
        raise RuntimeError(f"the run was tracked {mode}")


def wait_for_wandb(running: Running) -> str:
    """Wait until W&B has accepted the run; return "online" or "offline"."""
    status = running.folder.path / "wandb" / "status.json"
    return str(wait_on_cluster("W&B has accepted the run", lambda: read_json(status).get("mode")))


FAULTS = (
    Fault("USR2", signal_job, notice=True, environ=track_offline),
    Fault("scontrol requeue", requeue, notice=True),
    Fault(
        "preemption: TERM",
        preempt_encrypted,
        notice=True,
        settings=("launch.backend=builtin", "launch.tls=true"),
        environ=track_offline,
    ),
    Fault(
        "time limit",
        reach_time_limit,
        notice=True,
        settings=("cluster.time=1", "cluster.signal_seconds=10", "launch.step_timeout=8"),
    ),
    Fault("kill -9 of rank 0", kill(0), environ=track_offline),
    Fault("kill -9 of rank 1", kill(1)),
    Fault("kill -9 of a data worker", kill_worker, only="ddp_multinode"),
    Fault("kill -9, and again right after", kill_twice, starts=3, intervals=2, environ=track_offline),
    Fault("kill -9 while the run resumes", kill_resuming, starts=3),
    Fault("a rank stopped permanently", stop_forever),
    Fault("power-off of the batch host", power_off(0), environ=track_offline),
    Fault("power-off of the other host", power_off(1)),
    Fault("both hosts off and on", power_off(0, 1)),
    Fault("cable of the batch host cut", cut(0), environ=track_offline),
    Fault("cable of the other host cut", cut(1)),
    Fault("a cable cut for 4 s", cut_briefly, starts=1, settings=("launch.step_timeout=30",)),
    Fault("slurmd killed", kill_slurmd),
    Fault("slurmctld killed, back after 5 s", kill_slurmctld, starts=1),
    Fault("newest checkpoint truncated", damage(halve_newest), intervals=2, unusable=1),
    Fault("newest checkpoint: a bit flipped", damage(flip_bit_of_newest), intervals=2, unusable=1),
    Fault("newest checkpoint: no manifest", damage(delete_newest_manifest), intervals=2, unusable=1),
    Fault("all checkpoints lost", damage(lose_checkpoints), intervals=None),
    Fault("latest dangling", damage(make_latest_dangle)),
    Fault("half-written checkpoint left", damage(write_half_a_checkpoint)),
    Fault("torn last line of metrics.jsonl", damage(tear_line), environ=track_offline),
    Fault("torn meta.json", damage(halve_meta), environ=track_offline),
    Fault("disk full for 12 s", fill_disk, starts=1, own_disk=True, environ=track_offline),
    Fault("W&B host gone", kill_wandb_host, starts=1, environ=start_wandb_host),
    Fault(
        "preemption: USR2, then TERM",
        preempt,
        notice=True,
        conf=("SlurmctldParameters=preempt_send_user_signal", "GraceTime=20"),
    ),
)
