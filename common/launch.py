"""Where am I, and with whom: finds torchrun, then SLURM, else starts the processes itself.

Local processes are forked after the script's imports, so that two ranks cost one `import torch`.
They meet through a file in a private temporary folder and talk on the loopback interface only: no
open port, no clash between runs. Whatever way a run ends, no process of it is left.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import datetime
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common.config import UserError
from configs.shared import Launch

GRACE = 2.0  # seconds between asking the other processes to end and ending them
PDEATHSIG = 1  # from linux/prctl.h


@dataclasses.dataclass(frozen=True)
class Place:
    """A process's seat in the run, before it has met the others."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    nodes: int = 1
    how: str = "local"
    master: str = ""
    """What brings the processes together: a file (local) or host:port."""


@dataclasses.dataclass(frozen=True)
class World:
    """All processes of a run as one of them sees them."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    nodes: int
    how: str
    hosts: tuple[str, ...]
    """The host of each rank."""
    device: torch.device
    backend: str
    threads: int

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """The picklable values of all ranks, on rank 0; empty elsewhere. All ranks call it."""
        values: list[Any] = [None] * self.size
        dist.gather_object(value, values if self.is_main else None)
        return values if self.is_main else []

    def broadcast(self, value: Any) -> Any:
        """Rank 0's picklable value on all ranks. All ranks call it."""
        box = [value]
        dist.broadcast_object_list(box)
        return box[0]


# ---- where am I


def outside(environ: Mapping[str, str]) -> Place | None:
    """The place that torchrun or SLURM gave this process; None if nobody did and we start processes ourselves.

    torchrun goes first: inside an allocation it is the one that was asked for. A batch script or a
    shell of an allocation is no SLURM task: only srun's tasks count.
    """
    if "TORCHELASTIC_RUN_ID" in environ or {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environ.keys():
        size, local_size = int(environ["WORLD_SIZE"]), int(environ.get("LOCAL_WORLD_SIZE", "1"))
        return Place(
            rank=int(environ["RANK"]),
            size=size,
            local_rank=int(environ.get("LOCAL_RANK", "0")),
            local_size=local_size,
            node=int(environ.get("GROUP_RANK", "0")),
            nodes=max(1, size // local_size),
            how="torchrun",
            master=f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}",
        )
    if {"SLURM_PROCID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST"} <= environ.keys():
        size, nodes = int(environ["SLURM_STEP_NUM_TASKS"]), int(environ["SLURM_STEP_NUM_NODES"])
        port = 20_000 + int(environ["SLURM_JOB_ID"]) % 40_000
        return Place(
            rank=int(environ["SLURM_PROCID"]),
            size=size,
            local_rank=int(environ["SLURM_LOCALID"]),
            local_size=size // nodes,
            node=int(environ["SLURM_NODEID"]),
            nodes=nodes,
            how="slurm",
            master=f"{first_host(environ['SLURM_STEP_NODELIST'])}:{port}",
        )
    return None


def first_host(nodelist: str) -> str:
    """The first host of a SLURM list such as `node[03-07,9],gpu1`."""
    head, bracket, tail = nodelist.partition("[")
    if not bracket or "," in head:
        return head.partition(",")[0]
    inside, _, suffix = tail.partition("]")
    number = inside.replace("-", ",").partition(",")[0]
    return head + number + suffix.partition(",")[0]


# ---- joining


def join(place: Place, settings: Launch) -> World:
    """Meet the other processes. Raises UserError naming those that did not come in time."""
    cores = len(os.sched_getaffinity(0))
    threads = settings.threads or max(1, cores // place.local_size)
    torch.set_num_threads(threads)
    device, backend = choose_device(place, settings)
    setup = datetime.timedelta(seconds=settings.setup_timeout)
    if place.how == "local":
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        store: dist.Store = dist.FileStore(place.master, place.size)
    else:
        host, _, port = place.master.rpartition(":")
        under_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        serves = place.rank == 0 and not under_torchrun
        try:
            store = dist.TCPStore(host, int(port), place.size, serves, timeout=setup, wait_for_workers=False)
        except (RuntimeError, dist.DistError) as error:
            raise UserError(f"rank {place.rank} cannot reach rank 0 at {place.master}: {first_line(error)}") from None
    hosts = roll_call(store, place, setup)
    step = datetime.timedelta(seconds=settings.step_timeout)
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.size, timeout=step)
    return World(
        rank=place.rank,
        size=place.size,
        local_rank=place.local_rank,
        local_size=place.local_size,
        node=place.node,
        nodes=place.nodes,
        how=place.how,
        hosts=hosts,
        device=device,
        backend=backend,
        threads=threads,
    )


def choose_device(place: Place, settings: Launch) -> tuple[torch.device, str]:
    """One GPU per process with nccl where there are enough, else the CPU with gloo."""
    found = torch.cuda.device_count() if settings.device != "cpu" else 0
    if found >= place.local_size or (found and settings.device == "cuda"):
        if found < place.local_size:
            raise UserError(
                f"launch.device=cuda: {place.local_size} processes on this host, {found} GPUs; "
                "use fewer processes or launch.device=auto"
            )
        torch.cuda.set_device(place.local_rank)
        return torch.device("cuda", place.local_rank), "nccl"
    if settings.device == "cuda":
        raise UserError("launch.device=cuda: no GPU is visible; use launch.device=auto or cpu")
    return torch.device("cpu"), "gloo"


def roll_call(store: dist.Store, place: Place, timeout: datetime.timedelta) -> tuple[str, ...]:
    """Wait until every rank has signed in; returns their hosts. Raises UserError naming the missing ones."""
    names = [f"here/{rank}" for rank in range(place.size)]
    store.set(names[place.rank], socket.gethostname())
    try:
        store.wait(names, timeout)
    except (RuntimeError, dist.DistError):
        absent = [str(rank) for rank, name in enumerate(names) if not store.check([name])]
        raise UserError(
            f"rank {', '.join(absent)} did not arrive within {timeout.total_seconds():.0f} s; "
            "see its log, or raise launch.setup_timeout"
        ) from None
    return tuple(store.get(name).decode() for name in names)


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# ---- starting local processes


@dataclasses.dataclass
class Child:
    rank: int
    pid: int
    status: int | None = None
    """The wait status once the process has ended."""


def fork_all(body: Callable[[Place], None], size: int, nodes: int, meanwhile: Callable[[], None]) -> int:
    """Run `body` in `size` forked processes; returns the exit status of the run.

    `meanwhile` runs here while they start. The first process that fails ends all others: its
    message or traceback is shown once, those of its peers are only in their logs.
    """
    private = Path(tempfile.mkdtemp(prefix="rendezvous-"))
    children: list[Child] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        sys.stdout.flush()
        sys.stderr.flush()
        for rank in range(size):
            local_size = size // nodes
            place = Place(rank, size, rank, size, rank // local_size, nodes, "local", str(private / "store"))
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                run_child(body, place, private, parent)
            children.append(Child(rank, pid))
        meanwhile()
        return wait_all(children, private)
    except KeyboardInterrupt:
        print("\nstopped by Ctrl-C", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        end_all(children)
        shutil.rmtree(private, ignore_errors=True)


def run_child(body: Callable[[Place], None], place: Place, private: Path, parent: int) -> None:
    """The life of a forked process; never returns."""
    status = 1
    try:
        ctypes.CDLL(None).prctl(PDEATHSIG, signal.SIGKILL)  # dies with the parent, however that dies
        if os.getppid() != parent:
            os._exit(1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, and it ends us
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        body(place)
        status = 0
    except BaseException as error:  # noqa: BLE001 (every end is told to the parent)
        status = 2 if isinstance(error, UserError) else 1
        text = str(error) if isinstance(error, UserError) else traceback.format_exc()
        note = {"user": isinstance(error, UserError), "text": text}
        with contextlib.suppress(OSError):
            (private / f"error-{place.rank}.json").write_text(json.dumps(note))
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def wait_all(children: list[Child], private: Path) -> int:
    """Wait until all have ended well, or the first one badly; tells what happened and returns the exit status."""
    while any(child.status is None for child in children):
        ended = [child for child in children if child.status is None and reap(child)]
        failed = [child for child in ended if child.status]
        if failed:
            return tell(first_cause(failed, private), len(children), private)
        if not ended:
            time.sleep(0.01)
    return 0


def first_cause(failed: list[Child], private: Path) -> Child:
    """Of processes found dead at once, the one that began it: a killed one, else the first that raised."""

    def when(child: Child) -> float:
        with contextlib.suppress(OSError):
            return (private / f"error-{child.rank}.json").stat().st_mtime
        return 0.0

    return min(failed, key=when)


def reap(child: Child) -> bool:
    pid, status = os.waitpid(child.pid, os.WNOHANG)
    if pid:
        child.status = status
    return bool(pid)


def tell(child: Child, size: int, private: Path) -> int:
    """Print why a run failed; returns its exit status."""
    assert child.status is not None
    others = f"; the other {size - 1} were stopped" if size > 1 else ""
    if os.WIFSIGNALED(child.status):
        number = os.WTERMSIG(child.status)
        name = signal.Signals(number).name
        print(f"error: rank {child.rank} (pid {child.pid}) was killed by {name}{others}", file=sys.stderr)
        return 128 + number
    try:
        note = json.loads((private / f"error-{child.rank}.json").read_text())
    except (OSError, ValueError):
        note = {"user": False, "text": ""}
    if note["user"]:
        print(f"error: {note['text']}", file=sys.stderr)
    else:
        print(f"{note['text']}error: rank {child.rank} failed as shown above{others}", file=sys.stderr)
    return os.WEXITSTATUS(child.status)


def end_all(children: list[Child]) -> None:
    """Ask all that still run to end, then end them."""
    for signal_number, patience in ((signal.SIGTERM, GRACE), (signal.SIGKILL, 5.0)):
        alive = [child for child in children if child.status is None and not reap(child)]
        for child in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal_number)
        deadline = time.monotonic() + patience
        while any(child.status is None and not reap(child) for child in alive) and time.monotonic() < deadline:
            time.sleep(0.01)


@contextlib.contextmanager
def group(place: Place, settings: Launch) -> Iterator[World]:
    """The joined world; the process group is destroyed when the block ends.

    Not when it fails: its peers would fail in turn, and could be found dead before this process has told why.
    """
    yield join(place, settings)
    dist.destroy_process_group()
