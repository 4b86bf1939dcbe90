"""Faults on a real SLURM cluster: each run is disturbed once and must end as if nothing had happened, to the bit.

    python -m tests.cluster.faults [--rounds=N] [--seed=S] [--only NAME ...] [--skip=N] [--list]

Three hosts, two of them used, one to spare. ddp_multinode (on a folder of images, two data workers a rank) and
mnist_pipeline take turns; the step at which a fault strikes is drawn from a printed seed. The table goes to the screen
and to tests/benchmarks/results/faults.json and .md. Needs slurm-wlm and iproute2.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from common import snapshots
from common.folder import Folder, read_json
from common.snapshots import Snapshot
from slurm.cluster import Cluster, folder_of
from slurm.cluster_conf import CONTROLLER, Plan
from slurm.cluster_net import Process
from tests.harness.processes import ROOT, environment, processes_of
from tests.harness.site import until

RESULTS = ROOT / "tests" / "benchmarks" / "results"
STEPS, EVERY = 240, 20  # of a run; between two checkpoints
TIMEOUT = 10  # seconds for a message, and until SLURM misses a host
EXPERIMENTS = {
    "ddp_multinode": ("data.name=imagefolder", "data.block=1", "data.workers=2", "batch=64", "epochs=15"),
    "mnist_pipeline": ("data.name=digits", "width=1024", "batch=1024", "epochs=5", "data.test_limit=500"),
}


# ---- the cluster and the runs on it


class Lab:
    """A cluster of its own with what the runs need, in one folder."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.env = environment(CLUSTER_DIR=str(base), PYTHONPATH=str(ROOT), WANDB_MODE="offline", HOME=str(base))
        self.conf: tuple[str, ...] | None = None
        self.references: dict[str, Folder] = {}
        self.count = 0
        self.wandb: subprocess.Popen[str] | None = None
        make_images(base / "images")

    def tool(self, *words: str, module: str = "slurm.cluster", env: dict[str, str] | None = None) -> str:
        """One of the project's commands; its output. Raises RuntimeError with its complaint."""
        command = [sys.executable, "-m", module, *words]
        env = self.env | (env or {})
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stdout}{done.stderr}")
        return done.stdout

    def up(self, conf: tuple[str, ...] = ()) -> None:
        """A cluster with these lines of slurm.conf."""
        if self.conf != conf:
            self.down()
            self.tool("up", "--nodes=3", *(f"--conf={line}" for line in (f"SlurmdTimeout={TIMEOUT}", *conf)))
            self.conf = conf

    def down(self) -> None:
        if self.conf is not None:
            self.tool("down")
            self.conf = None

    @property
    def cluster(self) -> Cluster:
        folder = folder_of("local", self.env)
        process = Process.load(folder / "holder")
        assert process, "the cluster is gone"
        return Cluster(Plan.load(folder), process)

    def slurm(self, *words: str) -> str:
        return self.cluster.run(*words)

    def submit(self, experiment: str, *more: str, **env: str) -> Running:
        """Submit a run on two hosts."""
        self.count += 1
        runs = self.base / f"runs-{self.count}"
        words = [*EXPERIMENTS[experiment], f"steps={STEPS}", f"runs={runs}", f"data.cache={self.base / 'cache'}"]
        words += [f"data.root={self.base / 'images'}", "log.seconds=0.1", "checkpoint.every_seconds=0"]
        words += [f"checkpoint.every_steps={EVERY}", f"launch.step_timeout={TIMEOUT}", "wandb.finish_timeout=20", *more]
        self.tool("--nodes=2", f"--args={' '.join(words)}", "--", experiment, module="slurm.submit", env=env)
        (path,) = runs.iterdir()
        return Running(self, Folder(path))

    def reference(self, experiment: str) -> Folder:
        """The undisturbed run."""
        if experiment not in self.references:
            running = self.submit(experiment)
            running.finish()
            self.references[experiment] = running.folder
        return self.references[experiment]

    def host_is_idle(self, host: str) -> bool:
        return "idle" in self.slurm("sinfo", "-h", "-p", "main", "-n", host, "-o", "%T").split()


def make_images(root: Path) -> None:
    """A folder of small images, each class with a colour of its own under noise; PNG and JPEG."""
    random_ = np.random.default_rng(0)
    for part, count in (("train", 256), ("val", 32)):
        for number, colour in enumerate(([90, 60, 60], [60, 90, 60], [60, 60, 90], [80, 80, 40])):
            place = root / part / f"class{number}"
            place.mkdir(parents=True)
            for i in range(count):
                pixels = random_.integers(0, 140, (32, 32, 3)) + np.array(colour)
                ending = "png" if i % 2 else "jpg"
                Image.fromarray(pixels.astype(np.uint8)).save(place / f"{i:03d}.{ending}")


class Running:
    """A submitted run, watched from outside the cluster."""

    def __init__(self, lab: Lab, folder: Folder) -> None:
        self.lab, self.folder = lab, folder
        self.job = read_json(folder.path / "meta.json")["job"]["id"]

    def state(self) -> str:
        """What SLURM says of the job."""
        return self.lab.slurm("squeue", "-h", "--states=all", "-j", self.job, "-o", "%T")

    def hosts(self) -> list[str]:
        """The hosts of the job, the one of its script first."""
        batch, names = self.lab.slurm("squeue", "-h", "-j", self.job, "-o", "%B %N").split()
        return sorted(self.lab.slurm("scontrol", "show", "hostnames", names).split(), key=lambda name: name != batch)

    def newest(self) -> Folder:
        return self.folder.attempts()[-1]

    def step(self) -> int:
        """The last step that is written down."""
        attempts = self.folder.attempts()
        return last_step(attempts[-1]) if attempts else 0

    def wait_for_step(self, step: int) -> None:
        until(f"step {step} of {self.folder.path}", lambda: self.step() >= step, 90, 0.05)

    def wait_for_start(self, number: int) -> None:
        """Wait until so many starts were made and the newest trains."""
        until(f"start {number}", lambda: len(self.folder.attempts()) == number and self.step() > 0, 90, 0.05)

    def ranks(self) -> list[int]:
        """The pids of the ranks, in their order."""
        return [pid for _, pid in sorted((number, pid) for pid, number in self._processes().items())]

    def workers(self, rank: int) -> list[int]:
        """The data workers of a rank: they look like it, as they are forked."""
        return [pid for pid, number in self._processes(of_a_rank=True).items() if number == rank]

    def _processes(self, of_a_rank: bool = False) -> dict[int, int]:
        """Rank by pid, of the ranks or of the processes that they forked."""
        found, parents = {}, {}
        for pid in processes_of(str(self.folder.path)):
            with contextlib.suppress(OSError, StopIteration):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                if b"submitit.core._submit" in words and not words[0].endswith(b"srun"):
                    found[pid] = int(next(line[13:] for line in environ if line.startswith(b"SLURM_PROCID=")))
                    parents[pid] = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        return {pid: rank for pid, rank in found.items() if (parents[pid] in found) == of_a_rank}

    def finish(self, seconds: float = 150) -> None:
        """Wait until the run has ended, and all its processes."""
        until(f"{self.folder.path} ends", lambda: self.folder.result, seconds, 0.2)
        until("no process is left", lambda: not processes_of(str(self.folder.path)), 40, 0.2)


def last_step(attempt: Folder) -> int:
    return max((row["global_step"] for row in attempt.own_metrics()), default=0)


# ---- the faults


@dataclasses.dataclass(frozen=True)
class Fault:
    """One way to disturb a run. `strike` returns what mends it once the run goes on, if anything has to be."""

    name: str
    strike: Callable[[Running, random.Random], Callable[[], None] | None]
    notice: bool = False
    """Whether the run is told beforehand: then no step is lost."""
    restarts: bool = True
    intervals: int = 1
    """Checkpoint intervals that may be lost; with 2 the newest checkpoint is of no use, and one at least is."""
    only: str = ""
    """The one experiment that can suffer it."""
    words: tuple[str, ...] = ()
    """More settings."""
    conf: tuple[str, ...] = ()
    """More lines of slurm.conf."""
    environ: Callable[[Lab], dict[str, str]] = lambda lab: {}


def signalled(running: Running, chance: random.Random) -> None:
    running.lab.slurm("scancel", "--signal=USR2", running.job)


def requeued(running: Running, chance: random.Random) -> None:
    running.lab.tool("requeue", running.job)


def preempted(running: Running, chance: random.Random) -> None:
    running.lab.tool("preempt", running.job)


def time_limit(running: Running, chance: random.Random) -> None:
    """The limit is a minute, and the run would be over before: it is slowed until SLURM tells it of the limit."""
    pids, number = running.ranks(), running.newest().number
    handlers = [f"/proc/{pid}/status" for pid in pids]
    while running.state() == "RUNNING" and running.newest().number == number and all(map(os.path.exists, handlers)):
        stop(pids, 1.0)
        time.sleep(0.15)


def stop(pids: list[int], seconds: float) -> None:
    """Let processes stand still for a while, as on a host that is overloaded."""
    for number, pause in ((signal.SIGSTOP, seconds), (signal.SIGCONT, 0.0)):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(pause)


def killed(rank: int) -> Callable[[Running, random.Random], None]:
    def strike(running: Running, chance: random.Random) -> None:
        os.kill(running.ranks()[rank], signal.SIGKILL)

    return strike


def worker_killed(running: Running, chance: random.Random) -> None:
    """Between two epochs there are none for a moment."""
    workers = until("there are data workers", lambda: running.workers(chance.randrange(2)), pause=0.01)
    os.kill(chance.choice(workers), signal.SIGKILL)


def without_power(which: int) -> Callable[[Running, random.Random], Callable[[], None]]:
    def strike(running: Running, chance: random.Random) -> Callable[[], None]:
        host = running.hosts()[which]
        running.lab.tool("power-off", host)
        return lambda: back(running.lab, "power-on", host)

    return strike


def cut_off(which: int) -> Callable[[Running, random.Random], Callable[[], None]]:
    def strike(running: Running, chance: random.Random) -> Callable[[], None]:
        host = running.hosts()[which]
        running.lab.tool("cut", host)
        return lambda: back(running.lab, "join", host)

    return strike


def back(lab: Lab, verb: str, host: str) -> None:
    """Bring a host back, and let SLURM use it again at once."""
    lab.tool(verb, host)
    with contextlib.suppress(Exception):  # it may be up already
        lab.slurm("scontrol", "update", f"nodename={host}", "state=resume")


def damaged(damage: Callable[[Snapshot], None]) -> Callable[[Running, random.Random], None]:
    """Kill a rank, and while nothing runs do something to the newest checkpoint."""

    def strike(running: Running, chance: random.Random) -> None:
        os.kill(running.ranks()[chance.randrange(2)], signal.SIGKILL)
        until("the job has left its hosts", lambda: running.state() == "PENDING" and not running.ranks(), pause=0.05)
        damage(snapshots.of_attempt(running.newest())[-1])

    return strike


def truncate(newest: Snapshot) -> None:
    file = newest.path / "rank-1.pt"
    os.truncate(file, file.stat().st_size // 2)


def flip(newest: Snapshot) -> None:
    """A bit of a tensor: torch.load would not notice."""
    file = newest.path / "rank-0.pt"
    middle = file.stat().st_size // 2
    with open(file, "r+b") as opened:
        opened.seek(middle)
        byte = opened.read(1)[0]
        opened.seek(middle)
        opened.write(bytes([byte ^ 1]))


def lose_manifest(newest: Snapshot) -> None:
    (newest.path / snapshots.MANIFEST).unlink()


def dangle(newest: Snapshot) -> None:
    newest.path.with_name("latest").write_text("step-99999999\n")


def half_write(newest: Snapshot) -> None:
    left = newest.path.with_name(f".{Snapshot(newest.attempt, newest.step + EVERY).name}.new")
    shutil.copytree(newest.path, left)
    (left / snapshots.MANIFEST).unlink()
    os.truncate(left / "rank-0.pt", 1000)


def wandb_host(lab: Lab) -> dict[str, str]:
    """A W&B host in the cluster's network, and what makes a run use it."""
    argv = [sys.executable, "-m", "tests.harness.wandb_host", CONTROLLER]
    lab.wandb = subprocess.Popen(lab.cluster.command(argv, cwd=ROOT), env=lab.env, stdout=subprocess.PIPE, text=True)
    assert lab.wandb.stdout
    return {"WANDB_MODE": "online", "WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": lab.wandb.stdout.readline().strip()}


def wandb_gone(running: Running, chance: random.Random) -> None:
    """The host ends in the middle of an online run."""
    status, host = running.folder.path / "wandb" / "status.json", running.lab.wandb
    assert host
    mode = until("W&B has taken the run", lambda: read_json(status).get("mode"))
    host.kill()
    host.wait()
    if mode != "online":
        raise RuntimeError(f"it was tracked {read_json(status)}")


FAULTS = (
    Fault("USR2", signalled, notice=True),
    Fault("scontrol requeue", requeued, notice=True),
    Fault("preemption: TERM", preempted, notice=True),
    Fault(
        "time limit",
        time_limit,
        notice=True,
        words=("cluster.time=1", "cluster.signal_seconds=10", "launch.step_timeout=8"),
    ),
    Fault("kill -9 of rank 0", killed(0)),
    Fault("kill -9 of rank 1", killed(1)),
    Fault("kill -9 of a data worker", worker_killed, only="ddp_multinode"),
    Fault("power-off of the batch host", without_power(0)),
    Fault("power-off of the other host", without_power(1)),
    Fault("cable of the batch host cut", cut_off(0)),
    Fault("cable of the other host cut", cut_off(1)),
    Fault("newest checkpoint truncated", damaged(truncate), intervals=2),
    Fault("newest checkpoint: a bit flipped", damaged(flip), intervals=2),
    Fault("newest checkpoint: no manifest", damaged(lose_manifest), intervals=2),
    Fault("latest dangling", damaged(dangle)),
    Fault("half-written checkpoint left", damaged(half_write)),
    Fault("W&B host gone", wandb_gone, restarts=False, environ=wandb_host),
    Fault(
        "preemption: USR2, then TERM",
        preempted,
        notice=True,
        conf=("SlurmctldParameters=preempt_send_user_signal", "GraceTime=20"),
    ),
)


# ---- one case


@dataclasses.dataclass
class Row:
    """What became of a disturbed run."""

    fault: str
    experiment: str
    step: int
    """At which it was struck."""
    detected: float | None = None
    """Seconds until SLURM no longer showed the job as running; of the time limit, since the run was slowed."""
    resumed: float | None = None
    """Seconds until a new start had loaded a checkpoint."""
    redone: int | None = None
    """Steps that were trained again."""
    starts: int = 0
    equal: bool = False
    problems: list[str] = dataclasses.field(default_factory=list)
    folder: str = ""
    total: float = 0.0


def suffer(lab: Lab, fault: Fault, experiment: str, seed: str) -> Row:
    """Disturb one run; what it ends with is compared with an undisturbed one."""
    chance = random.Random(f"{seed} {fault.name} {experiment}")
    began = time.monotonic()
    lab.up(fault.conf)
    reference = lab.reference(experiment)
    row = Row(fault.name, experiment, chance.randint(STEPS // 5, STEPS // 2))
    running = lab.submit(experiment, *fault.words, **fault.environ(lab))
    row.folder = str(running.folder.path)
    try:
        running.wait_for_step(row.step)
        watch(running, fault, row, chance)
        running.finish()
        row.starts = len(running.folder.attempts())
        row.problems += problems(running.folder, reference)
        if (row.starts > 1) != fault.restarts:
            row.problems.append(f"{row.starts} starts")
        row.equal = not row.problems
    except (TimeoutError, RuntimeError, AssertionError) as error:
        row.problems.append(f"{type(error).__name__}: {error}")
        with contextlib.suppress(Exception):
            lab.slurm("scancel", running.job)
    row.total = time.monotonic() - began
    return row


def watch(running: Running, fault: Fault, row: Row, chance: random.Random) -> None:
    """Strike, and take the times until the run goes on."""
    old, start = running.newest(), time.monotonic()
    with stopwatch(running, row, start) if fault.restarts else contextlib.nullcontext():
        mend = fault.strike(running, chance)
        if not fault.restarts:
            return
        begun = lambda: running.newest().number > old.number and running.newest().origin  # noqa: E731
        _, step = until("a new start has loaded a checkpoint", begun, 120, 0.05)
        row.resumed = time.monotonic() - start
    row.redone = last_step(old) - step
    if mend:
        mend()
    least, most = (fault.intervals - 1) * EVERY, 0 if fault.notice else fault.intervals * EVERY
    if not least <= row.redone <= most:
        row.problems.append(f"{row.redone} steps were done again: {last_step(old)} reached, went on after {step}")


@contextlib.contextmanager
def stopwatch(running: Running, row: Row, start: float) -> Iterator[None]:
    """Meanwhile a process of its own asks SLURM when the job is no longer shown as running."""
    script = f'until [ "$(squeue -h -j {running.job} -o %T)" != RUNNING ]; do sleep 0.1; done'
    with subprocess.Popen(running.lab.cluster.command(["sh", "-c", script])) as process:

        def wait() -> None:
            process.wait()
            row.detected = time.monotonic() - start

        thread = threading.Thread(target=wait)
        thread.start()
        try:
            yield
        finally:
            process.kill()
            thread.join()


def problems(folder: Folder, reference: Folder) -> list[str]:
    """In what a run differs from the undisturbed one, and what it left behind."""
    found = []
    if folder.result.get("state") != "finished":
        return [f"it ended as {folder.result}"]
    rows, right = folder.metrics(), reference.metrics()
    for name, keys in (
        ("loss", ("global_step", "loss")),
        ("evaluation", ("global_step", "test_loss", "test_accuracy")),
    ):
        columns = [[tuple(r[k] for k in keys) for r in table if keys[1] in r] for table in (rows, right)]
        if columns[0] != columns[1]:
            found.append(f"{name}: {first_difference(*columns)}")
    if [row["global_step"] for row in rows if "loss" in row] != list(range(1, STEPS + 1)):
        found.append("metrics have gaps or repeats")
    if any(folder.result[key] != reference.result[key] for key in ("test_loss", "test_accuracy")):
        found.append("result.json has another evaluation")
    found += [f"the last checkpoint differs in {place}" for place in differences(final(folder), final(reference))[:3]]
    ids = {path.name.rpartition("-")[2] for path in (folder.path / "wandb").glob("*run-*-*")}
    if len(ids) != 1:
        found.append(f"W&B ids {ids}")
    found += [f"{file.name} is a failure" for file in (folder.path / "submit").glob("*_result.pkl") if is_failure(file)]
    return found


def first_difference(one: list[Any], other: list[Any]) -> str:
    for a, b in zip(one, other, strict=False):
        if a != b:
            return f"{a} instead of {b}"
    return f"{len(one)} rows instead of {len(other)}"


def is_failure(file: Path) -> bool:
    """Whether Submitit kept an error as a process's result."""
    import pickle

    return bool(pickle.loads(file.read_bytes())[0] != "success")


def final(folder: Folder) -> list[Any]:
    """All that the checkpoint of the last step holds, but what tells of the start that saved it."""
    import torch

    place = Snapshot(folder.chain()[0][0], STEPS)
    parts = [torch.load(file, weights_only=True) for file in sorted(place.path.glob("rank-*.pt"))]
    for part in parts:
        part.pop("attempt")
        for name in ("seconds", "rows", "wandb"):
            part["common"].pop(name, None)
    return parts


def differences(one: Any, other: Any, place: str = "") -> list[str]:
    """Where two trees of tensors and primitives differ in any bit."""
    import torch

    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return [] if one.dtype == other.dtype and torch.equal(one, other) else [place]
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [found for key in one for found in differences(one[key], other[key], f"{place}/{key}")]
    if isinstance(one, list | tuple) and type(one) is type(other) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [found for i, pair in pairs for found in differences(*pair, f"{place}/{i}")]
    return [] if type(one) is type(other) and one == other else [place]


# ---- the table


def plan(rounds: int, names: list[str]) -> list[tuple[int, Fault, str]]:
    """Every fault in every round, the experiments taking turns; the next round the other way round."""
    both = list(EXPERIMENTS)
    chosen = [fault for fault in FAULTS if not names or fault.name in names]
    return [(n, fault, fault.only or both[(n + i) % 2]) for n in range(rounds) for i, fault in enumerate(chosen)]


def table(rows: list[Row]) -> str:
    """Markdown."""
    lines = ["| fault | experiment | detected after (s) | resumed after (s) | steps redone | equal to the bit |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        times = ["-" if value is None else f"{value:.1f}" for value in (row.detected, row.resumed)]
        redone = "-" if row.redone is None else str(row.redone)
        words = "yes" if row.equal else "NO: " + "; ".join(row.problems).replace("\n", " ")[:300]
        lines.append(f"| {row.fault} | {row.experiment} | {times[0]} | {times[1]} | {redone} | {words} |")
    return "\n".join(lines) + "\n"


def save(rows: list[Row], seed: str) -> None:
    RESULTS.mkdir(exist_ok=True)
    facts = {"seed": seed, "steps": STEPS, "every": EVERY, "rows": [dataclasses.asdict(row) for row in rows]}
    (RESULTS / "faults.json").write_text(json.dumps(facts, indent=1) + "\n")
    (RESULTS / "faults.md").write_text(table(rows))


@contextlib.contextmanager
def laboratory() -> Iterator[Lab]:
    """A lab in a folder of its own, which stays if something went wrong."""
    base = Path(tempfile.mkdtemp(prefix="faults-", dir="/tmp"))
    lab = Lab(base)
    try:
        yield lab
    finally:
        lab.down()
        until("no process of the lab is left", lambda: not processes_of(str(base)), 20)
    shutil.rmtree(base)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.cluster.faults", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", default=str(random.SystemRandom().randrange(10**6)))
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", choices=[fault.name for fault in FAULTS])
    parser.add_argument("--skip", type=int, default=0, metavar="N", help="go on with a plan whose first N were done")
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args(arguments)
    if given.list:
        print("\n".join(fault.name for fault in FAULTS))
        return 0
    print(f"seed {given.seed}", flush=True)
    rows: list[Row] = []
    with contextlib.suppress(AssertionError), laboratory() as lab:
        for number, fault, experiment in plan(given.rounds, given.only)[given.skip :]:
            rows.append(suffer(lab, fault, experiment, f"{given.seed} {number}"))
            print(f"{rows[-1]}", flush=True)
            save(rows, given.seed)
        assert all(row.equal for row in rows)
    print(table(rows))
    return 0 if all(row.equal for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
