"""Rendezvous of the ranks: the store through which they meet, the process group, and what each knows of the others.

Forked ranks meet through a file in a private temporary folder and communicate on the loopback interface only: no open
port, no clash between runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common.core import network
from common.core.errors import Unreachable, UserError, summarize_error
from common.core.text import format_count
from common.distributed import objects, private_folder
from common.distributed.builtin.registration import Transport, register_backend
from common.distributed.rank_info import RankInfo
from common.distributed.transport.certificates import Identity
from common.distributed.transport.memory_links import choose_polling_seconds
from configs.launch import Launch

PROBE_SECONDS = 5.0  # without an answer, after which a port belongs to another program


@dataclasses.dataclass(frozen=True, kw_only=True)
class World(RankInfo):
    """All ranks of a run, or a subgroup of them, as one of them sees them."""

    hosts: tuple[str, ...]
    """Host name of each rank."""
    device: torch.device
    backend: str
    threads: int
    timeout: datetime.timedelta = datetime.timedelta(minutes=2)
    """Time limit of one collective or message; groups made later need it, too."""
    rendezvous_seconds: float = 0.0
    """Seconds from the start of `joined_world` until this rank has joined."""
    store: dist.Store | None = None
    """Key-value store of the rendezvous; it works when collectives no longer do."""
    global_ranks: tuple[int, ...] = ()
    """In a subgroup, the rank of each member in the run; empty for all ranks."""
    group: dist.ProcessGroup | None = None
    """Process group of a subgroup; None for all ranks."""
    transport: Transport | None = None
    """Facts by which later process groups connect, with the backend `builtin`."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0 and not self.joins

    @property
    def message_device(self) -> torch.device:
        """The device that small messages are sent from: nccl takes GPUs only, and to the others the CPU is nearer."""
        return self.device if self.backend == "nccl" else torch.device("cpu")

    def gather(self, value: Any) -> list[Any]:
        """Return the plain values of all ranks on rank 0, an empty list elsewhere. All ranks call it."""
        values = self.all_gather(value)
        return values if self.is_main else []

    def all_gather(self, value: Any) -> list[Any]:
        """Return the plain values of all ranks, which travel as JSON. All ranks call it. Raises TypeError."""
        return objects.all_gather_json(value, self.message_device, self.group)

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's plain value on all ranks, as `all_gather` does. All ranks call it."""
        return objects.broadcast_json(value, self.global_rank(0), self.message_device, self.group)

    def named_barrier(self, name: str) -> None:
        """Wait until all ranks have called it with this name, once in a run; keeps no GPU busy."""
        if self.backend != "nccl" or self.store is None:
            dist.barrier(self.group)
            return
        names = [f"meet/{name}/{rank}" for rank in range(self.size)]
        self.store.set(names[self.rank], "")
        self.store.wait(names, self.timeout)

    def global_rank(self, rank: int) -> int:
        """Return the rank in the run of a member of this subgroup."""
        return self.global_ranks[rank] if self.global_ranks else rank

    def make_subgroup(self, global_ranks: Sequence[int]) -> World:
        """Return the world of some ranks, this one among them; all of them call it."""
        if len(global_ranks) == self.size:
            return self
        group = dist.new_group(list(global_ranks), timeout=self.timeout, use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)  # not -100, which is for those outside
        return dataclasses.replace(
            self,
            rank=global_ranks.index(self.rank),
            size=len(global_ranks),
            hosts=tuple(self.hosts[rank] for rank in global_ranks),
            global_ranks=tuple(global_ranks),
            group=group,
        )


# ---- joining


@contextlib.contextmanager
def joined_world(rank_info: RankInfo, settings: Launch, private: Path | None = None) -> Iterator[World]:
    """Join the other ranks for the block, and destroy the process group at its end.

    Not when the block fails: the other ranks would fail in turn, and could be found dead before this one has reported
    why. `private` is a folder for the key of this attempt, which does not exist yet, for `launch.tls=true`.
    Raises UserError naming the ranks that did not join in time.
    """
    start = time.perf_counter()
    threads = settings.threads or count_own_cores(rank_info)
    torch.set_num_threads(threads)
    device, backend = choose_device_and_backend(rank_info, settings)
    setup, step = (datetime.timedelta(seconds=limit) for limit in (settings.setup_timeout, settings.step_timeout))
    identity = None
    if settings.tls:
        assert private is not None
        identity = private_folder.open_identity(private, rank_info, settings.setup_timeout)
    store, interface = set_up_rendezvous(rank_info, settings, setup, private if identity else None)
    hosts = gather_hosts(store, rank_info, setup)
    transport = None
    if backend == "builtin":
        transport = describe_transport(rank_info, settings, hosts, interface, identity)
        register_backend(transport)
    dist.init_process_group(backend, store=store, rank=rank_info.rank, world_size=rank_info.size, timeout=step)
    if private and identity and rank_info.rank == 0:
        private_folder.delete_key(private)
    yield World(
        **vars(rank_info),
        hosts=hosts,
        device=device,
        backend=backend,
        threads=threads,
        timeout=step,
        rendezvous_seconds=time.perf_counter() - start,
        store=store,
        transport=transport,
    )
    dist.destroy_process_group()
    if private and identity and rank_info.rank == 0:
        private_folder.delete_folder(private)


def set_up_rendezvous(
    rank_info: RankInfo, settings: Launch, setup: datetime.timedelta, private: Path | None
) -> tuple[dist.Store, str]:
    """Open the rendezvous store and set the network interface of gloo and NCCL; return both.

    With a private folder the store is a file there: a TCPStore asks nobody who it is.
    """
    if rank_info.launcher == "local":
        set_interface("lo")
        return dist.HashStore() if rank_info.joins else dist.FileStore(rank_info.master, rank_info.size), "lo"
    chosen = network.check_interface(settings.interface) if settings.interface else ""
    if private is not None:
        if rank_info.rank == 0:
            check_rank0_name(rank_info)
        store: dist.Store = dist.FileStore(str(private / "store"), rank_info.size)
    else:
        open_store = open_torchrun_store if rank_info.launcher == "torchrun" else open_slurm_store
        store = dist.HashStore() if rank_info.joins else open_store(rank_info, setup)
    address = network.resolve_ipv4(rank_info.master.partition(":")[0])
    chosen = chosen or ("lo" if rank_info.nodes == 1 else network.find_interface(address))
    set_interface(chosen)
    return store, chosen


def open_torchrun_store(rank_info: RankInfo, setup: datetime.timedelta) -> dist.Store:
    """Open the store at the port that torchrun names; mostly its agent serves there. Raises Unreachable."""
    host, _, port = rank_info.master.rpartition(":")
    serves = rank_info.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = dist.TCPStore(host, int(port), rank_info.size, serves, timeout=setup, wait_for_workers=False)
        return dist.PrefixStore(f"start-{rank_info.attempt_id}", store)  # torchrun keeps its store over restarts
    except (RuntimeError, dist.DistError) as error:
        raise Unreachable(
            f"rank {rank_info.rank} cannot reach rank 0 at {rank_info.master}: {summarize_error(error)}"
        ) from None


def open_slurm_store(rank_info: RankInfo, setup: datetime.timedelta) -> dist.Store:
    """Serve on rank 0, on the first free port of a list derived from the attempt's id; other ranks try the list.

    Raises Unreachable where rank 0 does not answer.
    """
    candidates = network.derive_ports(rank_info.attempt_id)

    def serve(port: int) -> dist.TCPStore:
        store = dist.TCPStore(rank_info.master, port, rank_info.size, True, timeout=setup, wait_for_workers=False)
        store.set("token", rank_info.attempt_id)
        return store

    def open_client(port: int) -> dist.TCPStore | None:
        brief = datetime.timedelta(seconds=PROBE_SECONDS)
        store = dist.TCPStore(rank_info.master, port, rank_info.size, False, timeout=brief, wait_for_workers=False)
        return store if store.get("token").decode() == rank_info.attempt_id else None

    def connect(port: int) -> dist.TCPStore | None:
        try:  # another program behind the port may accept and never answer, which TCPStore's time-out does not end
            store = network.call_with_timeout(PROBE_SECONDS, lambda: open_client(port))
        except (RuntimeError, dist.DistError):
            return None
        if store is not None:
            store.set_timeout(setup)
        return store

    if rank_info.rank == 0:
        check_rank0_name(rank_info)
        return network.serve_on_free_port(candidates, serve)
    return network.connect_to_rank0(rank_info.master, candidates, connect, setup.total_seconds())


def check_rank0_name(rank_info: RankInfo) -> None:
    """Raise UserError if other hosts cannot find rank 0 by its host name."""
    network.resolve_for_others(rank_info.master, "the host of rank 0", rank_info.nodes)


def set_interface(name: str) -> None:
    """Let gloo and NCCL use one network interface."""
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = name


def count_own_cores(rank_info: RankInfo) -> int:
    """Return how many cores this rank may use: those SLURM gave it, or an equal part of those of this host."""
    allowed = len(os.sched_getaffinity(0))
    given = int(os.environ.get("SLURM_CPUS_PER_TASK", "0")) if rank_info.launcher == "slurm" else 0
    return max(1, min(given, allowed) if given else allowed // rank_info.local_size)


def choose_device_and_backend(rank_info: RankInfo, settings: Launch) -> tuple[torch.device, str]:
    """Return one GPU per rank and nccl where there are enough GPUs, else the CPU and gloo. Raises UserError.

    With launch.backend=builtin it is the CPU and that; with launch.mixed=true it is gloo, and a GPU as far as there are
    some. The GPU becomes torch's current device.
    """
    if settings.backend == "builtin":
        return torch.device("cpu"), "builtin"
    found = 0 if settings.on_cpu else torch.cuda.device_count()
    if settings.device == "cuda":
        check_gpus(rank_info.local_size, found)
    if found >= rank_info.local_size or (settings.mixed and found > rank_info.local_rank):
        torch.cuda.set_device(rank_info.local_rank)
        return torch.device("cuda", rank_info.local_rank), "gloo" if settings.mixed else "nccl"
    return torch.device("cpu"), "gloo"


def check_gpus(ranks: int, gpus: int) -> None:
    """Raise UserError where launch.device=cuda asks for a GPU for each rank of this host, and there are fewer."""
    if not gpus:
        raise UserError("launch.device=cuda: no GPU is visible; use launch.device=auto or cpu")
    if gpus < ranks:
        raise UserError(
            f"launch.device=cuda: {format_count(ranks, 'rank')} on this host, {format_count(gpus, 'GPU')}; "
            "use fewer ranks or launch.device=auto"
        )


def describe_transport(
    rank_info: RankInfo, settings: Launch, hosts: Sequence[str], interface: str, identity: Identity | None = None
) -> Transport:
    """Return what the backend `builtin` needs to know of this run."""
    if rank_info.launcher == "local":  # ranks that are laid out as several hosts
        hosts = [str(rank * rank_info.nodes // rank_info.size) for rank in range(rank_info.size)]
    machine = network.identify_host() if settings.transport == "auto" else ""
    return Transport(
        run=rank_info.attempt_id or rank_info.master,
        hosts=hosts,
        algorithm="ring" if settings.algorithm == "auto" else settings.algorithm,  # until it has been chosen
        address=network.list_interfaces()[interface],
        host=machine and f"{hosts[rank_info.rank]}-{machine}",
        spin=choose_polling_seconds(rank_info.local_size),
        setup_timeout=settings.setup_timeout,
        identity=identity,
    )


def gather_hosts(store: dist.Store, rank_info: RankInfo, timeout: datetime.timedelta) -> tuple[str, ...]:
    """Wait until each rank has written its host to the store; return them. Raises Unreachable naming missing ranks."""
    names = [f"here/{rank}" for rank in range(rank_info.size)]
    store.set(names[rank_info.rank], socket.gethostname())
    try:
        store.wait(names, timeout)
    except (RuntimeError, dist.DistError):
        absent = [str(rank) for rank, name in enumerate(names) if not store.check([name])]
        raise Unreachable(
            f"{'ranks' if len(absent) > 1 else 'rank'} {', '.join(absent)} did not join within "
            f"{timeout.total_seconds():.0f} s; see the logs there, or raise launch.setup_timeout"
        ) from None
    return tuple(store.get(name).decode() for name in names)
