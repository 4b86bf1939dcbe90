"""The kinds of faults that runs on a cluster suffer, and how each is made."""

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
from tests.cluster.lab import CRAWLING, DISK, EVERY, SLOW, USUAL, Lab, Running, last_step
from tests.harness.site import until
from tests.harness.warm import ROOT

Mend = Callable[[], object]


@dataclasses.dataclass(frozen=True)
class Fault:
    """One way to disturb a run. `strike` returns what mends it once the run goes on, if anything has to be."""

    name: str
    strike: Callable[[Running, random.Random], Mend | None]
    notice: bool = False
    """Whether the run is told beforehand: then no step is lost."""
    starts: int = 2
    """How often the run is started at least; with 1 it goes on and is not started again."""
    intervals: int | None = 1
    """Checkpoint intervals that may be lost; None loses all that was done."""
    useless: int = 0
    """The newest checkpoints that are of no use: at least so many intervals are lost."""
    only: str = ""
    """The one experiment that can suffer it."""
    own_disk: bool = False
    """Whether the run folder lies on the lab's own disk, which only root can mount."""
    words: tuple[str, ...] = ()
    """More settings."""
    conf: tuple[str, ...] = ()
    """More lines of slurm.conf."""
    environ: Callable[[Lab], dict[str, str]] = lambda lab: {}
    """More variables of the run, such as those by which W&B follows it: where a fault could spoil its record."""


# ---- SLURM takes the hosts away


def signal_job(running: Running, chance: random.Random) -> None:
    running.lab.slurm("scancel", "--signal=USR2", running.job)


def requeue(running: Running, chance: random.Random) -> None:
    running.lab.tool("requeue", running.job)


def preempt(running: Running, chance: random.Random) -> None:
    running.lab.tool("preempt", running.job)


def preempt_encrypted(running: Running, chance: random.Random) -> Mend:
    """The next start makes a certificate of its own: nobody can read this one's any more."""
    check_encrypted(running)
    preempt(running, chance)
    return lambda: check_encrypted(running)


def check_encrypted(running: Running) -> None:
    """Raise RuntimeError if the newest start is not encrypted, or a key lies in the run folder."""
    if not read_json(running.newest().attempt_folder / "world.json").get("tls"):
        raise RuntimeError("it is not encrypted")
    if left := list(running.folder.path.glob(".private-*/*.pem")):
        raise RuntimeError(f"{left[0]} is left")


def reach_time_limit(running: Running, chance: random.Random) -> None:
    """The limit is a minute, and the run would be over before: it is slowed until SLURM tells it of the limit.

    The next start gets more, as a busy machine may need it.
    """
    running.lab.limit_cables(CRAWLING)
    until("the job is told of its limit", lambda: running.state() != "RUNNING", 120)
    running.lab.slurm("scontrol", "update", f"jobid={running.job}", "timelimit=10")


# ---- processes end, or stand still


def kill(rank: int) -> Callable[[Running, random.Random], None]:
    def strike(running: Running, chance: random.Random) -> None:
        os.kill(running.ranks()[rank], signal.SIGKILL)

    return strike


def kill_any(running: Running, chance: random.Random) -> None:
    kill(chance.randrange(2))(running, chance)


def kill_twice(running: Running, chance: random.Random) -> None:
    """The next start has trained a step or two when it is struck, too."""
    starts = len(running.folder.list_attempts())
    kill_any(running, chance)
    running.wait_for_start(starts + 1)
    kill_any(running, chance)


def kill_resuming(running: Running, chance: random.Random) -> None:
    """The next start has its place in the run folder, and has not yet said what it continues."""
    starts = len(running.folder.list_attempts())
    kill_any(running, chance)
    running.wait_until_queued()
    ranks = until("both ranks of the next start", lambda: len(found := running.ranks()) == 2 and found, 120, 0.02)
    until("it begins", lambda: len(running.folder.list_attempts()) > starts, 120, 0.001)
    os.kill(chance.choice(ranks), signal.SIGKILL)


def kill_worker(running: Running, chance: random.Random) -> None:
    """Between two epochs there are none for a moment."""
    workers = until("there are data workers", lambda: running.workers(chance.randrange(2)), pause=0.01)
    os.kill(chance.choice(workers), signal.SIGKILL)


def stop_for_ever(running: Running, chance: random.Random) -> None:
    os.kill(running.ranks()[chance.randrange(2)], signal.SIGSTOP)


# ---- hosts, cables and daemons


def power_off(*which: int) -> Callable[[Running, random.Random], Mend]:
    """The hosts come back once the run goes on elsewhere; two of three come back at once, as one is too few."""

    def strike(running: Running, chance: random.Random) -> Mend:
        hosts = [running.hosts()[number] for number in which]
        for host in hosts:
            running.lab.tool("power-off", host)

        def mend() -> None:
            for host in hosts:
                bring_back(running.lab, "power-on", host)

        if len(hosts) == 1:
            return mend
        mend()
        return lambda: None

    return strike


def cut(which: int) -> Callable[[Running, random.Random], Mend]:
    def strike(running: Running, chance: random.Random) -> Mend:
        host = running.hosts()[which]
        running.lab.tool("cut", host)
        return lambda: bring_back(running.lab, "join", host)

    return strike


def cut_briefly(running: Running, chance: random.Random) -> None:
    """Shorter than anybody waits: what was on its way is sent again."""
    plan, number = running.lab.cluster.plan, int(chance.choice(running.hosts()).removeprefix("node"))

    def blink() -> None:
        daemons.cut_cable(plan, number)
        time.sleep(4)
        daemons.reconnect_cable(plan, number)

    running.lab.as_root(blink)


def bring_back(lab: Lab, verb: str, host: str) -> None:
    """Bring a host back, and let SLURM use it again at once."""
    lab.tool(verb, host)
    with contextlib.suppress(Exception):  # it may be up already
        lab.slurm("scontrol", "update", f"nodename={host}", "state=resume")


def kill_slurmd(running: Running, chance: random.Random) -> Mend:
    """Training goes on, slowly enough not to be over when SLURM misses the host; an elastic run may go on even then."""
    lab, host = running.lab, chance.choice(running.hosts())
    lab.limit_cables(SLOW)
    lab.on_host(host, "kill", "-KILL", lab.daemon(f"slurmd-{host}"))
    until("SLURM misses the host", lambda: "down" in lab.slurm("sinfo", "-h", "-n", host, "-o", "%t"))
    lab.limit_cables(USUAL)
    return lambda: lab.on_host(host, "slurmd", "-N", host)


def kill_slurmctld(running: Running, chance: random.Random) -> None:
    """Training goes on, slowly enough not to be over before SLURM is back."""
    lab = running.lab
    lab.limit_cables(SLOW)
    lab.slurm("kill", "-KILL", lab.daemon("slurmctld"))
    time.sleep(5)
    lab.slurm("slurmctld")
    until("the controller is back", lambda: running.state() == "RUNNING")


# ---- files


def damage(harm: Callable[[RunFolder], object]) -> Callable[[Running, random.Random], None]:
    """Kill a rank, and while nothing runs do something to what its start has left."""

    def strike(running: Running, chance: random.Random) -> None:
        kill_any(running, chance)
        running.wait_until_queued()
        harm(running.newest())

    return strike


def newest(attempt: RunFolder) -> CheckpointPath:
    return storage.list_checkpoints(attempt)[-1]


def halve(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip_bit(file: Path) -> None:
    """A bit of a tensor: torch.load would not notice."""
    middle = file.stat().st_size // 2
    with open(file, "r+b") as opened:
        opened.seek(middle)
        byte = opened.read(1)[0]
        opened.seek(middle)
        opened.write(bytes([byte ^ 1]))


def dangle(attempt: RunFolder) -> None:
    newest(attempt).path.with_name("latest").write_text("step-99999999\n")


def half_write(attempt: RunFolder) -> None:
    last = newest(attempt)
    left = last.path.with_name(f".{CheckpointPath(attempt, last.step + EVERY).name}.new")
    shutil.copytree(last.path, left, dirs_exist_ok=True)  # the kill may have left one itself
    (left / storage.MANIFEST).unlink()
    os.truncate(left / "rank-0.pt", 1000)


def lose_checkpoints(attempt: RunFolder) -> None:
    for one in attempt.list_attempts():
        shutil.rmtree(storage.get_checkpoints_dir(one))


def tear_line(attempt: RunFolder) -> None:
    """What a writer leaves that ends in the middle of a line."""
    last = attempt.metrics_file.read_text().splitlines()[-1]
    with open(attempt.metrics_file, "a") as file:
        file.write(last[: len(last) // 2])


def fill_disk(running: Running, chance: random.Random) -> None:
    """Training goes on slowly, so that checkpoints fall due meanwhile, and no step is lost."""
    lab, attempt = running.lab, running.newest()
    lab.limit_cables(SLOW)
    until("the run trains", lambda: last_step(attempt))
    zeros = lab.disk / "zeros"
    lab.resize_disk(shutil.disk_usage(lab.disk).used + (1 << 20))
    with contextlib.suppress(OSError), open(zeros, "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    due = newest(attempt).step + EVERY
    time.sleep(12)
    lab.resize_disk(DISK)
    zeros.unlink()
    until("the metrics come after all", lambda: last_step(attempt) >= due)
    if CheckpointPath(attempt, due).path.exists():
        raise RuntimeError(f"step {due} was saved: the disk was not full when it fell due")


# ---- W&B


def follow_offline(lab: Lab) -> dict[str, str]:
    """What makes W&B follow a run without a host."""
    return {"WANDB_MODE": "offline"}


RECORD = "sent-to-wandb"


def start_wandb(lab: Lab) -> dict[str, str]:
    """A W&B host in the cluster's network that records what it is sent, and what makes a run use it."""
    (lab.base / RECORD).unlink(missing_ok=True)
    argv = [sys.executable, "-m", "tests.harness.wandb_host", CONTROLLER_ADDRESS, str(lab.base / RECORD)]
    command = lab.cluster.build_command(argv, cwd=ROOT)
    lab.wandb = subprocess.Popen(command, env=lab.env, stdout=subprocess.PIPE, text=True)
    assert lab.wandb.stdout
    return {"WANDB_MODE": "online", "WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": lab.wandb.stdout.readline().strip()}


def end_wandb(running: Running, chance: random.Random) -> None:
    """The host ends in the middle of an online run, which is slow until W&B has taken it."""
    host = running.lab.wandb
    assert host
    running.lab.limit_cables(SLOW)
    mode = wait_for_wandb(running)
    host.kill()
    host.wait()
    if mode != "online":
        raise RuntimeError(f"it was tracked {mode}")


def wait_for_wandb(running: Running) -> str:
    """Wait until W&B has taken the run; online or offline."""
    status = running.folder.path / "wandb" / "status.json"
    return str(until("W&B has taken the run", lambda: read_json(status).get("mode")))


FAULTS = (
    Fault("USR2", signal_job, notice=True, environ=follow_offline),
    Fault("scontrol requeue", requeue, notice=True),
    Fault(
        "preemption: TERM",
        preempt_encrypted,
        notice=True,
        words=("launch.backend=builtin", "launch.tls=true"),
        environ=follow_offline,
    ),
    Fault(
        "time limit",
        reach_time_limit,
        notice=True,
        words=("cluster.time=1", "cluster.signal_seconds=10", "launch.step_timeout=8"),
    ),
    Fault("kill -9 of rank 0", kill(0), environ=follow_offline),
    Fault("kill -9 of rank 1", kill(1)),
    Fault("kill -9 of a data worker", kill_worker, only="ddp_multinode"),
    Fault("kill -9, and again right after", kill_twice, starts=3, intervals=2, environ=follow_offline),
    Fault("kill -9 while the run resumes", kill_resuming, starts=3),
    Fault("a rank stopped for ever", stop_for_ever),
    Fault("power-off of the batch host", power_off(0), environ=follow_offline),
    Fault("power-off of the other host", power_off(1)),
    Fault("both hosts off and on", power_off(0, 1)),
    Fault("cable of the batch host cut", cut(0), environ=follow_offline),
    Fault("cable of the other host cut", cut(1)),
    Fault("a cable cut for 4 s", cut_briefly, starts=1, words=("launch.step_timeout=30",)),
    Fault("slurmd killed", kill_slurmd),
    Fault("slurmctld killed, back after 5 s", kill_slurmctld, starts=1),
    Fault("newest checkpoint truncated", damage(lambda a: halve(newest(a).path / "rank-1.pt")), intervals=2, useless=1),
    Fault(
        "newest checkpoint: a bit flipped",
        damage(lambda a: flip_bit(newest(a).path / "rank-0.pt")),
        intervals=2,
        useless=1,
    ),
    Fault(
        "newest checkpoint: no manifest",
        damage(lambda a: (newest(a).path / storage.MANIFEST).unlink()),
        intervals=2,
        useless=1,
    ),
    Fault("all checkpoints lost", damage(lose_checkpoints), intervals=None),
    Fault("latest dangling", damage(dangle)),
    Fault("half-written checkpoint left", damage(half_write)),
    Fault("torn last line of metrics.jsonl", damage(tear_line), environ=follow_offline),
    Fault("torn meta.json", damage(lambda a: halve(a.path / "meta.json")), environ=follow_offline),
    Fault("disk full for 12 s", fill_disk, starts=1, own_disk=True, environ=follow_offline),
    Fault("W&B host gone", end_wandb, starts=1, environ=start_wandb),
    Fault(
        "preemption: USR2, then TERM",
        preempt,
        notice=True,
        conf=("SlurmctldParameters=preempt_send_user_signal", "GraceTime=20"),
    ),
)
