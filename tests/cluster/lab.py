"""A fault laboratory: a cluster of three hosts of which runs use two, and runs on it, observed from outside."""

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
from tests.harness.commands.processes import find_processes, make_environment
from tests.harness.environment.shared_results import hold_lock
from tests.harness.experiments.registry import ENTRY_BY_NAME
from tests.harness.repository import ROOT
from tests.harness.slurm.cluster_site import find_running_cluster, wait_on_cluster

STEPS = 240  # of a run
CHECKPOINT_STEPS = 20  # between two checkpoints
TIMEOUT = 10  # seconds for a message, and until SLURM misses a host
USUAL_RATE = "50mbit"  # of a cable: a step takes about 0.03 s
SLOW_RATE = "4mbit"  # a step takes about 0.4 s
VERY_SLOW_RATE = "2mbit"  # a step takes about 0.8 s
DISK_BYTES = 2 << 30  # of a disk that a test can fill: a run refuses to start with less than 1 GB
Answer = TypeVar("Answer")


class Lab:
    """A cluster and the data of its runs. Labs may share a folder with data and undisturbed runs."""

    def __init__(self, base: Path, shared: Path) -> None:
        self.base = base
        self.shared = shared
        self.env = make_environment(CLUSTER_DIR=str(base), PYTHONPATH=str(ROOT), HOME=str(base))
        self.conf: tuple[str, ...] | None = None
        self.count = 0
        self.wandb: subprocess.Popen[str] | None = None
        self.disk = base / "disk"
        with hold_lock(shared / "images.lock"):
            if not (shared / "images").exists():
                make_images(shared / "images.new")
                (shared / "images.new").rename(shared / "images")

    def tool(self, *arguments: str) -> str:
        """Run `python -m slurm cluster`; return its output. Raises RuntimeError with its error message."""
        return self.command("cluster", *arguments)

    def command(self, *arguments: str, env: dict[str, str] | None = None) -> str:
        """Run `python -m slurm`; return its output. Raises RuntimeError with its error message."""
        command = [sys.executable, "-m", "slurm", *arguments]
        env = self.env | (env or {})
        process = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
        if process.returncode:
            raise RuntimeError(f"{' '.join(arguments)}: {process.stdout}{process.stderr}")
        return process.stdout

    def up(self, conf: tuple[str, ...] = ()) -> None:
        """Start a cluster with additional lines of slurm.conf, and give its cables the usual rate."""
        if self.conf != conf:
            self.down()
            options = [f"--conf={line}" for line in (f"SlurmdTimeout={TIMEOUT}", *conf)]
            self.tool("up", "--nodes=3", *options)
            self.conf = conf
        self.limit_cables(USUAL_RATE)

    def down(self) -> None:
        if self.conf is not None:
            self.tool("down")
            self.conf = None

    def resize_disk(self, size: int) -> None:
        """Give the disk of the lab `size` bytes."""
        subprocess.run(["mount", "-o", f"remount,size={size}", str(self.disk)], check=True)

    @property
    def cluster(self) -> Cluster:
        return find_running_cluster(self.env)

    def limit_cables(self, rate: str) -> None:
        """Limit the rate in bit/s at which the switch sends to each host."""

        def limit() -> None:
            for name in namespaces.read_cable_states():
                command = f"tc qdisc replace dev {name} root tbf rate {rate} burst 16kb latency 300ms"
                subprocess.run(command.split(), check=True)

        self.as_root(limit)

    def as_root(self, function: Callable[[], object]) -> None:
        """Run a function in a process on the controller that has the rights to change the network."""

        def run() -> None:
            os.environ["PATH"] = make_search_path()  # contains ip and tc
            function()

        self.cluster.run_as_root(run)

    def slurm(self, *command: str) -> str:
        """Run a program on the controller; return its output."""
        return self.cluster.run(*command)

    def on_host(self, host: str, *command: str) -> None:
        """Run a program on a host."""
        number = int(host.removeprefix("node"))
        subprocess.run(self.cluster.build_command(command, node=number), check=True, stdin=subprocess.DEVNULL)

    def daemon(self, name: str) -> str:
        """Return the pid of slurmctld, or of slurmd-HOST, in the pid namespace of its host."""
        return (self.cluster.plan.folder / "run" / f"{name}.pid").read_text().strip()

    def submit(self, experiment: str, *settings: str, own_disk: bool = False, **env: str) -> Running:
        """Submit a run on two hosts."""
        return self.submit_on(2, experiment, *settings, own_disk=own_disk, **env)

    def submit_on(self, nodes: int, experiment: str, *settings: str, own_disk: bool = False, **env: str) -> Running:
        """Submit a run on `nodes` hosts."""
        self.count += 1
        runs = (self.disk if own_disk else self.base) / f"runs-{self.count}"
        all_settings = [
            *ENTRY_BY_NAME[experiment].cluster_settings,
            f"steps={STEPS}",
            f"runs={runs}",
            "log.seconds=0.1",
        ]
        all_settings += [f"data.cache={self.shared / 'cache'}", f"data.root={self.shared / 'images'}"]
        all_settings += [f"checkpoint.every_steps={CHECKPOINT_STEPS}", "checkpoint.every_seconds=0"]
        all_settings += [f"launch.step_timeout={TIMEOUT}", "wandb.finish_timeout=300", *settings]
        self.command("exp", f"--nodes={nodes}", f"--args={' '.join(all_settings)}", "--", experiment, env=env)
        (path,) = runs.iterdir()
        return Running(self, RunFolder(path))

    def reference(self, experiment: str, *settings: str) -> RunFolder:
        """Return the undisturbed run, which labs with the same shared folder create once."""
        name = "-".join([experiment, *settings])
        path = self.shared / f"undisturbed-{name}"
        with hold_lock(self.shared / f"{name}.lock"):
            if not path.exists():
                running = self.submit(experiment, *settings)
                running.finish()
                assert running.folder.result.get("state") == "finished", running.folder.result
                shutil.move(running.folder.path, path)
        return RunFolder(path)


def make_images(root: Path) -> None:
    """Create a folder of small noisy images, PNG and JPEG; each class has its own colour."""
    generator = np.random.default_rng(0)
    for part, count in (("train", 160), ("val", 16)):
        for number, colour in enumerate(([90, 60, 60], [60, 90, 60], [60, 60, 90], [80, 80, 40])):
            class_folder = root / part / f"class{number}"
            class_folder.mkdir(parents=True)
            for index in range(count):
                pixels = generator.integers(0, 140, (8, 8, 3)) + np.array(colour)
                suffix = "png" if index % 2 else "jpg"
                Image.fromarray(pixels.astype(np.uint8)).save(class_folder / f"{index:03d}.{suffix}")


class Running:
    """A submitted run, observed from outside the cluster."""

    def __init__(self, lab: Lab, folder: RunFolder) -> None:
        self.lab = lab
        self.folder = folder
        self.job = read_json(folder.path / "meta.json")["job"]["id"]

    def state(self) -> str:
        """Return the state of the job that SLURM shows."""
        return self.lab.slurm("squeue", "-h", "--states=all", "-j", self.job, "-o", "%T")

    def hosts(self) -> list[str]:
        """Return the hosts of the job, the one of its script first."""
        batch, names = self.lab.slurm("squeue", "-h", "-j", self.job, "-o", "%B %N").split()
        return sorted(self.lab.slurm("scontrol", "show", "hostnames", names).split(), key=lambda name: name != batch)

    def newest(self) -> RunFolder:
        return self.folder.list_attempts()[-1]

    def step(self) -> int:
        """Return the last step in the metrics of the newest attempt."""
        attempts = self.folder.list_attempts()
        return last_step(attempts[-1]) if attempts else 0

    def wait_for_step(self, step: int) -> None:
        wait_on_cluster(f"step {step} of {self.folder.path}", lambda: self.step() >= step, 120, 0.05)

    def wait_for_start(self, number: int) -> None:
        """Wait until `number` attempts exist and the newest trains."""
        wait_on_cluster(
            f"attempt {number}", lambda: len(self.folder.list_attempts()) >= number and self.step() > 0, 120, 0.05
        )

    def wait_until_queued(self) -> None:
        """Wait until SLURM has requeued the job and no rank is left."""
        wait_on_cluster("the job has left its hosts", lambda: self.state() == "PENDING" and not self.ranks(), 120, 0.2)

    def ranks(self) -> list[int]:
        """Return the pids of the ranks, in the order of the ranks."""
        ranks = self._processes()
        return sorted(ranks, key=lambda pid: (ranks[pid], pid))

    def workers(self, rank: int) -> list[int]:
        """Return the pids of the data workers of a rank, which are forked and so have its command line."""
        return [pid for pid, number in self._processes(of_a_rank=True).items() if number == rank]

    def _processes(self, of_a_rank: bool = False) -> dict[int, int]:
        """Return a rank number per pid, of the ranks or of the processes that they forked."""
        numbers = {}
        parents = {}
        for pid in find_processes(str(self.folder.path)):
            with contextlib.suppress(OSError, StopIteration):
                arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                lines = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                environ = dict(line.split(b"=", 1) for line in lines if b"=" in line)
                is_in_a_step = b"SLURM_STEP_NODELIST" in environ  # unlike srun and the launcher
                if is_in_a_step and b"submitit.core._submit" in arguments:
                    numbers[pid] = int(environ.get(REPLACED_RANK_VARIABLE.encode(), environ[b"SLURM_PROCID"]))
                    parents[pid] = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        return {pid: number for pid, number in numbers.items() if (parents[pid] in numbers) == of_a_rank}

    def finish(self, seconds: float = 400) -> None:
        """Wait until the run and all its processes have ended."""
        wait_on_cluster(f"{self.folder.path} ends", lambda: self.folder.result, seconds, 0.2)
        wait_on_cluster("no process is left", lambda: not find_processes(str(self.folder.path)), 120, 0.2)


def last_step(attempt: RunFolder) -> int:
    return max((row["global_step"] for row in attempt.read_attempt_rows()), default=0)


def time_step_after(running: Running, strike: Callable[[], Answer]) -> tuple[float, Answer]:
    """Strike an elastic run; return the seconds until a later step has been taken, and the value of `strike`.

    The step may belong to the struck attempt, taken by other ranks, or to the next attempt. A finished run took it.
    """
    struck_attempt = running.newest()
    strike_time = time.monotonic()
    previous_changes = len(read_rank_changes(struck_attempt))
    answer = strike()

    def has_continued() -> bool:
        if running.newest().number > struck_attempt.number:
            return running.step() > 0
        if running.folder.result:
            return True
        changes = read_rank_changes(struck_attempt)
        return len(changes) > previous_changes and running.step() > int(changes[-1]["step"])

    wait_on_cluster("the run continues", has_continued, 150, 0.005)
    return time.monotonic() - strike_time, answer


@contextlib.contextmanager
def own_disk(path: Path) -> Iterator[None]:
    """Mount a disk in memory whose size can change, for this process and its children. Requires root.

    This process gets its own mount namespace, so that nothing stays mounted even if it is killed.
    """
    namespaces.unshare_namespaces("mnt")
    namespaces.mount_path("none", "/", None, namespaces.RECURSIVE | namespaces.PRIVATE)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(path)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(path)], check=True)


@contextlib.contextmanager
def laboratory(shared: Path | None = None) -> Iterator[Lab]:
    """Start a lab in a new folder, which is kept after a failure."""
    base = Path(tempfile.mkdtemp(prefix="faults-", dir="/tmp"))
    lab = Lab(base, shared or base)
    lab.disk.mkdir()
    with own_disk(lab.disk) if os.getuid() == 0 else contextlib.nullcontext():
        try:
            yield lab
        finally:
            lab.down()
            wait_on_cluster("no process of the lab is left", lambda: not find_processes(str(base)), 20)
    shutil.rmtree(base)
