"""A fault laboratory: a cluster of three hosts of which runs use two, and runs on it, watched from outside."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
from PIL import Image

from common.ranks.rank_info import REPLACED_RANK_VARIABLE
from common.runs.folder import RunFolder, read_json
from common.runs.rank_changes import read_rank_changes
from slurm.local_cluster import namespaces
from slurm.local_cluster.cluster import Cluster
from slurm.local_cluster.slurm_conf import make_search_path
from tests.harness.processes import environment, processes_of
from tests.harness.registry import BY_NAME
from tests.harness.shared import locked
from tests.harness.site import find_cluster, until
from tests.harness.warm import ROOT

STEPS, EVERY = 240, 20  # of a run; between two checkpoints
TIMEOUT = 10  # seconds for a message, and until SLURM misses a host
USUAL, SLOW, CRAWLING = "50mbit", "4mbit", "2mbit"  # of a cable: a step takes about 0.03, 0.4 and 0.8 s
DISK = 2 << 30  # bytes of a disk that can be made full: a run refuses to begin with less than 1 GB
Answer = TypeVar("Answer")


class Lab:
    """A cluster of its own with what the runs need. Labs may share a folder with data and undisturbed runs."""

    def __init__(self, base: Path, shared: Path) -> None:
        self.base, self.shared = base, shared
        self.env = environment(CLUSTER_DIR=str(base), PYTHONPATH=str(ROOT), HOME=str(base))
        self.conf: tuple[str, ...] | None = None
        self.count = 0
        self.wandb: subprocess.Popen[str] | None = None
        self.disk = base / "disk"
        with locked(shared / "images.lock"):
            if not (shared / "images").exists():
                make_images(shared / "images.new")
                (shared / "images.new").rename(shared / "images")

    def tool(self, *words: str) -> str:
        """`python -m slurm cluster`; its output. Raises RuntimeError with its complaint."""
        return self.command("cluster", *words)

    def command(self, *words: str, env: dict[str, str] | None = None) -> str:
        """`python -m slurm`; its output. Raises RuntimeError with its complaint."""
        command = [sys.executable, "-m", "slurm", *words]
        env = self.env | (env or {})
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stdout}{done.stderr}")
        return done.stdout

    def up(self, conf: tuple[str, ...] = ()) -> None:
        """A cluster with these lines of slurm.conf, its cables as fast as usual."""
        if self.conf != conf:
            self.down()
            self.tool("up", "--nodes=3", *(f"--conf={line}" for line in (f"SlurmdTimeout={TIMEOUT}", *conf)))
            self.conf = conf
        self.limit_cables(USUAL)

    def down(self) -> None:
        if self.conf is not None:
            self.tool("down")
            self.conf = None

    def resize_disk(self, size: int) -> None:
        """Give the disk of the lab so many bytes."""
        subprocess.run(["mount", "-o", f"remount,size={size}", str(self.disk)], check=True)

    @property
    def cluster(self) -> Cluster:
        return find_cluster(self.env)

    def limit_cables(self, rate: str) -> None:
        """Let every cable at the switch carry so many bits a second to its host."""

        def limit() -> None:
            for name in namespaces.read_cable_states():
                words = ["tc", "qdisc", "replace", "dev", name, "root", "tbf", "rate", rate]
                subprocess.run([*words, "burst", "16kb", "latency", "300ms"], check=True)

        self.as_root(limit)

    def as_root(self, function: Callable[[], object]) -> None:
        """Run a function in a process on the controller that may change the network."""

        def run() -> None:
            os.environ["PATH"] = make_search_path()  # ip and tc are administrators' programs
            function()

        self.cluster.run_as_root(run)

    def slurm(self, *words: str) -> str:
        """A program on the controller; its output."""
        return self.cluster.run(*words)

    def on_host(self, host: str, *words: str) -> None:
        """Run a program on a host."""
        number = int(host.removeprefix("node"))
        subprocess.run(self.cluster.build_command(words, node=number), check=True, stdin=subprocess.DEVNULL)

    def daemon(self, name: str) -> str:
        """The pid of slurmctld, or of slurmd-HOST, as its own host counts."""
        return (self.cluster.plan.folder / "run" / f"{name}.pid").read_text().strip()

    def submit(self, experiment: str, *more: str, own_disk: bool = False, **env: str) -> Running:
        """Submit a run on two hosts."""
        return self.submit_on(2, experiment, *more, own_disk=own_disk, **env)

    def submit_on(self, nodes: int, experiment: str, *more: str, own_disk: bool = False, **env: str) -> Running:
        """Submit a run on so many hosts."""
        self.count += 1
        runs = (self.disk if own_disk else self.base) / f"runs-{self.count}"
        words = [
            *BY_NAME[experiment].cluster_settings,
            f"steps={STEPS}",
            f"runs={runs}",
            f"data.cache={self.shared / 'cache'}",
        ]
        words += [f"data.root={self.shared / 'images'}", "log.seconds=0.1", "checkpoint.every_seconds=0"]
        words += [f"checkpoint.every_steps={EVERY}", f"launch.step_timeout={TIMEOUT}", "wandb.finish_timeout=60", *more]
        self.command("exp", f"--nodes={nodes}", f"--args={' '.join(words)}", "--", experiment, env=env)
        (path,) = runs.iterdir()
        return Running(self, RunFolder(path))

    def reference(self, experiment: str, *more: str) -> RunFolder:
        """The undisturbed run, of which all labs that share a folder make one."""
        name = "-".join([experiment, *more])
        place = self.shared / f"undisturbed-{name}"
        with locked(self.shared / f"{name}.lock"):
            if not place.exists():
                running = self.submit(experiment, *more)
                running.finish()
                assert running.folder.result.get("state") == "finished", running.folder.result
                shutil.move(running.folder.path, place)
        return RunFolder(place)


def make_images(root: Path) -> None:
    """A folder of small images, each class with a colour of its own under noise; PNG and JPEG."""
    random_ = np.random.default_rng(0)
    for part, count in (("train", 160), ("val", 16)):
        for number, colour in enumerate(([90, 60, 60], [60, 90, 60], [60, 60, 90], [80, 80, 40])):
            place = root / part / f"class{number}"
            place.mkdir(parents=True)
            for i in range(count):
                pixels = random_.integers(0, 140, (8, 8, 3)) + np.array(colour)
                ending = "png" if i % 2 else "jpg"
                Image.fromarray(pixels.astype(np.uint8)).save(place / f"{i:03d}.{ending}")


class Running:
    """A submitted run, watched from outside the cluster."""

    def __init__(self, lab: Lab, folder: RunFolder) -> None:
        self.lab, self.folder = lab, folder
        self.job = read_json(folder.path / "meta.json")["job"]["id"]

    def state(self) -> str:
        """What SLURM says of the job."""
        return self.lab.slurm("squeue", "-h", "--states=all", "-j", self.job, "-o", "%T")

    def hosts(self) -> list[str]:
        """The hosts of the job, the one of its script first."""
        batch, names = self.lab.slurm("squeue", "-h", "-j", self.job, "-o", "%B %N").split()
        return sorted(self.lab.slurm("scontrol", "show", "hostnames", names).split(), key=lambda name: name != batch)

    def newest(self) -> RunFolder:
        return self.folder.list_attempts()[-1]

    def step(self) -> int:
        """The last step that is written down."""
        attempts = self.folder.list_attempts()
        return last_step(attempts[-1]) if attempts else 0

    def wait_for_step(self, step: int) -> None:
        until(f"step {step} of {self.folder.path}", lambda: self.step() >= step, 120, 0.05)

    def wait_for_start(self, number: int) -> None:
        """Wait until so many starts were made and the newest trains."""
        until(f"start {number}", lambda: len(self.folder.list_attempts()) >= number and self.step() > 0, 120, 0.05)

    def wait_until_queued(self) -> None:
        """Wait until SLURM has queued the job again and nothing of it runs."""
        until("the job has left its hosts", lambda: self.state() == "PENDING" and not self.ranks(), 120, 0.2)

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
                named = dict(line.split(b"=", 1) for line in environ if b"=" in line)
                if b"submitit.core._submit" in words and b"SLURM_STEP_NODELIST" in named:  # no srun, no launcher
                    found[pid] = int(named.get(REPLACED_RANK_VARIABLE.encode(), named[b"SLURM_PROCID"]))
                    parents[pid] = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        return {pid: rank for pid, rank in found.items() if (parents[pid] in found) == of_a_rank}

    def finish(self, seconds: float = 200) -> None:
        """Wait until the run has ended, and all its processes."""
        until(f"{self.folder.path} ends", lambda: self.folder.result, seconds, 0.2)
        until("no process is left", lambda: not processes_of(str(self.folder.path)), 120, 0.2)


def last_step(attempt: RunFolder) -> int:
    return max((row["global_step"] for row in attempt.read_attempt_rows()), default=0)


def time_step_after(running: Running, strike: Callable[[], Answer]) -> tuple[float, Answer]:
    """Strike an elastic run; return the seconds until a step has been taken that came after it, and what `strike` did.

    The step may be one of the struck attempt, by other ranks, or of the next attempt. A run that ends has taken it.
    """
    old, began = running.newest(), time.monotonic()
    known = len(read_rank_changes(old))
    struck = strike()

    def goes_on() -> bool:
        if running.newest().number > old.number:
            return running.step() > 0
        changes = read_rank_changes(old)
        return bool(running.folder.result) or (len(changes) > known and running.step() > int(changes[-1]["step"]))

    until("the run goes on", goes_on, 150, 0.005)
    return time.monotonic() - began, struck


@contextlib.contextmanager
def own_disk(place: Path) -> Iterator[None]:
    """A disk in memory whose size can change, seen by this process and what it starts. Root is needed.

    This process keeps mounts of its own, so that nothing stays mounted however it ends.
    """
    namespaces.unshare_namespaces("mnt")
    namespaces.mount_path("none", "/", None, namespaces.RECURSIVE | namespaces.PRIVATE)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(place)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(place)], check=True)


@contextlib.contextmanager
def laboratory(shared: Path | None = None) -> Iterator[Lab]:
    """A lab in a folder of its own, which stays if something went wrong."""
    base = Path(tempfile.mkdtemp(prefix="faults-", dir="/tmp"))
    lab = Lab(base, shared or base)
    lab.disk.mkdir()
    with own_disk(lab.disk) if os.getuid() == 0 else contextlib.nullcontext():
        try:
            yield lab
        finally:
            lab.down()
            until("no process of the lab is left", lambda: not processes_of(str(base)), 20)
    shutil.rmtree(base)
