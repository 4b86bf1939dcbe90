"""Where am I, and with whom: the place that torchrun, SLURM or we ourselves gave a process, and joining the others.

Local processes meet through a file in a private temporary folder and talk on the loopback interface
only: no open port, no clash between runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from common.core import network
from common.core.errors import Absent, UserError
from configs.shared import Launch


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
    """What brings the processes together: a file (local), host:port (torchrun) or a host (slurm)."""
    token: str = ""
    """What tells this start from earlier ones by the same job or torchrun; ports (slurm) and names in the store follow
    from it."""
    again: bool = False
    """Whether the job or torchrun that started this process had started one before in its place."""


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
    timeout: datetime.timedelta = datetime.timedelta(minutes=2)
    """How long one message may take; groups made later need it, too."""
    seconds: float = 0.0
    """How long it took to meet the others."""
    store: dist.Store | None = None
    """Where the processes met; it works when messages no longer do."""
    members: tuple[int, ...] = ()
    """Of a part of a run's processes, the rank of each in the whole run; empty for all of them."""
    group: dist.ProcessGroup | None = None
    """What sends messages within a part."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """The picklable values of all ranks, on rank 0; empty elsewhere. All ranks call it."""
        values: list[Any] = [None] * self.size
        dist.gather_object(value, values if self.is_main else None, self.global_rank(0), self.group)
        return values if self.is_main else []

    def broadcast(self, value: Any) -> Any:
        """Rank 0's picklable value on all ranks. All ranks call it."""
        box = [value]
        dist.broadcast_object_list(box, self.global_rank(0), self.group)
        return box[0]

    def meet(self, name: str) -> None:
        """Wait until all ranks have called it with this name, in one run once; no GPU is busy with it."""
        if self.backend != "nccl" or self.store is None:
            dist.barrier(self.group)
            return
        names = [f"meet/{name}/{rank}" for rank in range(self.size)]
        self.store.set(names[self.rank], "")
        self.store.wait(names, self.timeout)

    def global_rank(self, rank: int) -> int:
        """The rank in the whole run of a process of this part."""
        return self.members[rank] if self.members else rank

    def part(self, members: Sequence[int]) -> World:
        """This process and some others as a world of their own, whose members call it together."""
        if len(members) == self.size:
            return self
        group = dist.new_group(list(members), timeout=self.timeout, use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)  # not -100, which is for those outside
        return dataclasses.replace(
            self,
            rank=members.index(self.rank),
            size=len(members),
            hosts=tuple(self.hosts[rank] for rank in members),
            members=tuple(members),
            group=group,
        )


# ---- where am I


def outside(environ: Mapping[str, str]) -> Place | None:
    """The place that torchrun or SLURM gave this process; None if nobody did and we start processes ourselves.

    torchrun goes first: inside an allocation it is the one that was asked for. A batch script or a
    shell of an allocation is no SLURM task: only srun's tasks count.
    """
    again = any(environ.get(name, "0") != "0" for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"))
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environ.keys():
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
            token=environ.get("TORCHELASTIC_RESTART_COUNT", ""),
            again=again,
        )
    if {"SLURM_PROCID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST"} <= environ.keys():
        size, nodes = int(environ["SLURM_STEP_NUM_TASKS"]), int(environ["SLURM_STEP_NUM_NODES"])
        start = (environ["SLURM_JOB_ID"], environ["SLURM_STEP_ID"], environ.get("SLURM_RESTART_COUNT", "0"))
        return Place(
            rank=int(environ["SLURM_PROCID"]),
            size=size,
            local_rank=int(environ["SLURM_LOCALID"]),
            local_size=size // nodes,
            node=int(environ["SLURM_NODEID"]),
            nodes=nodes,
            how="slurm",
            master=first_host(environ["SLURM_STEP_NODELIST"]),
            token=".".join(start),
            again=again,
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
    start = time.perf_counter()
    threads = settings.threads or own_cores(place)
    torch.set_num_threads(threads)
    device, backend = choose_device(place, settings)
    setup = datetime.timedelta(seconds=settings.setup_timeout)
    store = meet(place, settings)
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
        timeout=step,
        seconds=time.perf_counter() - start,
        store=store,
    )


def meet(place: Place, settings: Launch) -> dist.Store:
    """The store through which the processes find each other; sets the one interface that they then use."""
    if place.how == "local":
        use_interface("lo")
        return dist.FileStore(place.master, place.size)
    chosen = network.checked_interface(settings.interface) if settings.interface else ""
    store = meet_at_port(place, settings) if place.how == "torchrun" else meet_by_token(place, settings)
    address = network.resolve(place.master.partition(":")[0])
    use_interface(chosen or ("lo" if place.nodes == 1 else network.interface_towards(address)))
    return store


def meet_at_port(place: Place, settings: Launch) -> dist.Store:
    """torchrun has named a port, and mostly serves there itself."""
    host, _, port = place.master.rpartition(":")
    setup = datetime.timedelta(seconds=settings.setup_timeout)
    serves = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = dist.TCPStore(host, int(port), place.size, serves, timeout=setup, wait_for_workers=False)
        return dist.PrefixStore(f"start-{place.token}", store)  # torchrun keeps its store over restarts
    except (RuntimeError, dist.DistError) as error:
        raise Absent(f"rank {place.rank} cannot reach rank 0 at {place.master}: {first_line(error)}") from None


def meet_by_token(place: Place, settings: Launch) -> dist.Store:
    """Rank 0 serves on the first free port of a list that follows from the token; the others try the list."""
    setup = datetime.timedelta(seconds=settings.setup_timeout)
    candidates = network.ports(place.token)

    def serve(port: int) -> dist.TCPStore:
        store = dist.TCPStore(place.master, port, place.size, True, timeout=setup, wait_for_workers=False)
        store.set("token", place.token)
        return store

    def connect(port: int) -> dist.TCPStore | None:
        try:
            brief = datetime.timedelta(seconds=5)
            store = dist.TCPStore(place.master, port, place.size, False, timeout=brief, wait_for_workers=False)
            if store.get("token").decode() != place.token:
                return None
        except (RuntimeError, dist.DistError):
            return None
        store.set_timeout(setup)
        return store

    if place.rank == 0:
        check_own_name(place)
        return network.first_free(candidates, serve)
    return network.find_first_rank(place.master, candidates, connect, settings.setup_timeout)


def check_own_name(place: Place) -> None:
    """Raise UserError if the others cannot find rank 0 by the name they know."""
    try:
        address = network.resolve(place.master)
    except OSError as error:
        raise UserError(f"{place.master}, the host of rank 0, does not know its own name: {error}") from None
    if place.nodes > 1 and address.startswith("127."):
        raise UserError(
            f"{place.master}, the host of rank 0, resolves to {address}, which other hosts cannot reach; "
            "give its name the address of its network interface in /etc/hosts"
        )


def use_interface(name: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = name


def own_cores(place: Place) -> int:
    """The processors that each process of this host may take: what SLURM gave each, or an equal share."""
    allowed = len(os.sched_getaffinity(0))
    given = int(os.environ.get("SLURM_CPUS_PER_TASK", "0")) if place.how == "slurm" else 0
    return max(1, min(given, allowed) if given else allowed // place.local_size)


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
    """Wait until every rank has signed in; returns their hosts. Raises Absent naming the missing ones."""
    names = [f"here/{rank}" for rank in range(place.size)]
    store.set(names[place.rank], socket.gethostname())
    try:
        store.wait(names, timeout)
    except (RuntimeError, dist.DistError):
        absent = [str(rank) for rank, name in enumerate(names) if not store.check([name])]
        raise Absent(
            f"rank {', '.join(absent)} did not arrive within {timeout.total_seconds():.0f} s; "
            "see its log, or raise launch.setup_timeout"
        ) from None
    return tuple(store.get(name).decode() for name in names)


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextlib.contextmanager
def group(place: Place, settings: Launch) -> Iterator[World]:
    """The joined world; the process group is destroyed when the block ends.

    Not when it fails: its peers would fail in turn, and could be found dead before this process has told why.
    """
    yield join(place, settings)
    dist.destroy_process_group()
