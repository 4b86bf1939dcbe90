"""Rendezvous of the ranks: the store, the process group, and the `World` that describes the ranks.

Forked ranks find each other through a file in a private temporary folder, and communicate only over the loopback
interface. The rendezvous of forked ranks uses this file instead of a port, so concurrent runs cannot interfere with
each other.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import datetime
import json
import os
import shutil
import socket
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common.ranks import objects
from common.ranks.backend_setup import import_backend_setup
from common.ranks.rank_info import RankInfo
from common.system import network
from common.system.errors import UnreachableError, UserError
from common.system.text import format_count
from configs.shared import Launch


@dataclasses.dataclass(frozen=True, kw_only=True)
class World(RankInfo):
    """Description of all ranks of a run or of a subgroup, and of the position of this rank among these ranks."""

    hosts: tuple[str, ...]
    """Host name of each rank, ordered by rank."""
    device: torch.device
    backend: str
    threads: int
    timeout: datetime.timedelta = datetime.timedelta(minutes=2)
    """Time limit of each collective and each message, including those of subgroups that are created later."""
    rendezvous_seconds: float = 0.0
    """Time in seconds from the start of `join_world` until this rank has joined."""
    store: dist.Store | None = None
    """Key-value store of the rendezvous, which still works after collectives have failed."""
    global_ranks: tuple[int, ...] = ()
    """Global rank of each member of a subgroup; empty for the group of all ranks."""
    group: dist.ProcessGroup | None = None
    """Process group of a subgroup; None for the group of all ranks."""
    transport: Any = None
    """Settings for later process groups of a backend that torch does not contain; None for torch's backends."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0 and not self.is_joining

    @property
    def message_device(self) -> torch.device:
        """Device of the tensors that carry small messages: the GPU with NCCL, otherwise the CPU."""
        return self.device if self.backend == "nccl" else torch.device("cpu")

    def gather(self, value: Any) -> list[Any]:
        """Return the JSON values of all ranks on rank 0, and an empty list on other ranks.

        All ranks must call this method.
        """
        values = self.all_gather(value)
        return values if self.is_main else []

    def all_gather(self, value: Any) -> list[Any]:
        """Return the JSON values of all ranks on each rank.

        All ranks must call this method. Raises TypeError if `value` is not a JSON value.
        """
        return objects.all_gather_json(value, self.message_device, self.group)

    def broadcast(self, value: Any) -> Any:
        """Return the JSON value of rank 0 on all ranks.

        All ranks must call this method. Raises TypeError if the value of rank 0 is not a JSON value.
        """
        return objects.broadcast_json(value, self.get_global_rank(0), self.message_device, self.group)

    def wait_for_all_ranks(self, name: str) -> None:
        """Wait until all ranks have called this method with the same name.

        A name can be used only once per run. With NCCL, the ranks wait on the rendezvous store, so that their GPUs are
        not occupied while they wait.
        """
        if self.backend != "nccl" or self.store is None:
            dist.barrier(self.group)
            return
        keys = [f"meet/{name}/{rank}" for rank in range(self.size)]
        self.store.set(keys[self.rank], "")
        self.store.wait(keys, self.timeout)

    def get_global_rank(self, rank: int) -> int:
        """Return the global rank of the member that has the given rank in this subgroup."""
        return self.global_ranks[rank] if self.global_ranks else rank

    def make_subgroup(self, global_ranks: Sequence[int]) -> World:
        """Return the world of a subset of the ranks, which must contain this rank.

        All ranks of the subset must call this method.
        """
        if len(global_ranks) == self.size:
            return self
        group = dist.new_group(list(global_ranks), timeout=self.timeout, use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)  # torch returns a process group only on ranks of the group
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
def join_world(rank_info: RankInfo, settings: Launch, key_folder: Path | None = None) -> Iterator[World]:
    """Join the other ranks for the duration of the `with` block.

    The process group is destroyed at the end of the block unless the block fails. Destroying the group after a failure
    would make the other ranks fail too, possibly before this rank has reported its error. With `launch.tls=true`,
    `key_folder` is the folder that rank 0 creates for the key of this attempt. Raises UserError, which names the
    missing ranks, if some ranks do not join in time.
    """
    start = time.perf_counter()
    threads = settings.threads or count_usable_cores(rank_info)
    torch.set_num_threads(threads)
    device, backend = choose_device_and_backend(rank_info, settings)
    setup_timeout = datetime.timedelta(seconds=settings.setup_timeout)
    step_timeout = datetime.timedelta(seconds=settings.step_timeout)

    backend_setup = import_backend_setup(backend)
    identity = None
    if backend_setup is not None and settings.tls:
        identity = backend_setup.create_or_load_identity(key_folder, rank_info, settings.setup_timeout)
    else:
        key_folder = None

    # `choose_device_and_backend` has set the current device, which nccl uses for barriers
    warnings.filterwarnings("ignore", r"barrier\(\): using the device under current context")
    store, interface = set_up_rendezvous(rank_info, settings, setup_timeout, key_folder)
    set_default_timeout(step_timeout)
    hosts = exchange_host_names(store, rank_info, backend, setup_timeout)
    transport = None
    if backend_setup is not None:
        transport = backend_setup.register(rank_info, settings, hosts, interface, identity)
    dist.init_process_group(backend, store=store, rank=rank_info.rank, world_size=rank_info.size, timeout=step_timeout)
    if backend_setup is not None and key_folder and rank_info.rank == 0:
        backend_setup.delete_key_and_certificate(key_folder)
    yield World(
        **vars(rank_info),
        hosts=hosts,
        device=device,
        backend=backend,
        threads=threads,
        timeout=step_timeout,
        rendezvous_seconds=time.perf_counter() - start,
        store=store,
        transport=transport,
    )
    for group in dist.distributed_c10d._world.pg_map:
        # The callback of a future may hold the last reference to a group. If a thread of gloo frees this group after
        # it has executed the callback, it waits for itself, which aborts the process.
        prevent_destruction(group)
    dist.destroy_process_group()
    if key_folder and rank_info.rank == 0:
        shutil.rmtree(key_folder, ignore_errors=True)


def set_up_rendezvous(
    rank_info: RankInfo, settings: Launch, timeout: datetime.timedelta, key_folder: Path | None
) -> tuple[dist.Store, str]:
    """Open the rendezvous store and set the network interface of gloo and NCCL.

    Return the store and the name of the interface. If there is a key folder, the store is a file in this folder,
    because a TCPStore does not authenticate its clients.
    """
    store: dist.Store
    if rank_info.launcher == "local":
        set_interface("lo")
        store = dist.HashStore() if rank_info.is_joining else dist.FileStore(rank_info.master, rank_info.size)
        return store, "lo"
    from common.ranks import host_rendezvous  # imported here because local runs do not need it

    interface = network.check_interface(settings.interface) if settings.interface else ""
    if key_folder is not None:
        if rank_info.rank == 0:
            host_rendezvous.check_rank0_name(rank_info)
        store = dist.FileStore(str(key_folder / "store"), rank_info.size)
        # The destructor opens the file again, and waits for minutes if rank 0 deletes the folder at this moment.
        prevent_destruction(store)
    elif rank_info.is_joining:
        store = dist.HashStore()
    elif rank_info.launcher == "torchrun":
        store = host_rendezvous.open_torchrun_store(rank_info, timeout)
    else:
        store = host_rendezvous.open_slurm_store(rank_info, timeout)
    interface = interface or host_rendezvous.find_interface_to_rank0(rank_info)
    set_interface(interface)
    return store, interface


def prevent_destruction(instance: object) -> None:
    """Prevent the destructor of an object from running, also when the interpreter exits."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(instance))  # this reference is never released


def set_interface(name: str) -> None:
    """Set the network interface of gloo and NCCL."""
    os.environ["GLOO_SOCKET_IFNAME"] = name
    os.environ["NCCL_SOCKET_IFNAME"] = name


def set_default_timeout(timeout: datetime.timedelta) -> None:
    """Set the time limit of process groups that are created without one, such as those of a DeviceMesh."""
    dist.distributed_c10d.default_pg_timeout = timeout
    dist.distributed_c10d.default_pg_nccl_timeout = timeout


def count_usable_cores(rank_info: RankInfo) -> int:
    """Return the number of CPU cores for this rank.

    The result is the number of cores that SLURM has allotted to the rank, or an equal share of the host's cores. It is
    the default number of threads.
    """
    allowed = len(os.sched_getaffinity(0))
    if rank_info.launcher == "slurm":
        allotted = int(os.environ.get("SLURM_CPUS_PER_TASK", "0"))
        if allotted:
            return min(allotted, allowed)
    return max(1, allowed // rank_info.local_size)


def choose_device_and_backend(rank_info: RankInfo, settings: Launch) -> tuple[torch.device, str]:
    """Return the device and the backend: a GPU and nccl if each rank has a GPU, otherwise the CPU and gloo.

    With `launch.backend=builtin`, the result is the CPU and builtin. With `launch.mixed=true`, the backend is gloo. In
    this case, the first ranks of each host get the host's GPUs, and the remaining ranks get the CPU. If this rank gets
    a GPU, this GPU becomes torch's current device. Otherwise, GPUs are hidden from this process, because functions of
    torch such as the PowerSGD hook of DDP use the GPU if any is visible. Raises UserError if `launch.device=cuda` is
    set and there are fewer GPUs than ranks.
    """
    gpus = 0 if settings.excludes_gpus else torch.cuda.device_count()
    if settings.device == "cuda":
        check_gpus(rank_info.local_size, gpus)
    if gpus >= rank_info.local_size or (settings.mixed and gpus > rank_info.local_rank):
        torch.cuda.set_device(rank_info.local_rank)
        return torch.device("cuda", rank_info.local_rank), "gloo" if settings.mixed else "nccl"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return torch.device("cpu"), "builtin" if settings.backend == "builtin" else "gloo"


def check_gpus(ranks: int, gpus: int) -> None:
    """Raise UserError for `launch.device=cuda` if this host has fewer GPUs than ranks."""
    if not gpus:
        raise UserError("launch.device=cuda: no GPU is visible; use launch.device=auto or cpu")
    if gpus < ranks:
        raise UserError(
            f"launch.device=cuda: this host has {format_count(gpus, 'GPU')} for {format_count(ranks, 'rank')}; "
            "use fewer ranks or launch.device=auto"
        )


def exchange_host_names(
    store: dist.Store, rank_info: RankInfo, backend: str, timeout: datetime.timedelta
) -> tuple[str, ...]:
    """Exchange the host names of all ranks through the store, and compare the hosts.

    Raises UnreachableError, which names the missing ranks, if some ranks do not join within the timeout. Raises
    UserError if the hosts have different backends or different numbers of ranks.
    """
    keys = [f"here/{rank}" for rank in range(rank_info.size)]
    store.set(keys[rank_info.rank], json.dumps([socket.gethostname(), rank_info.local_size, backend]))
    try:
        store.wait(keys, timeout)
    except (RuntimeError, dist.DistError):
        missing = [f"rank {rank}" for rank, key in enumerate(keys) if not store.check([key])]
        raise UnreachableError(
            f"{', '.join(missing)} did not join within {timeout.total_seconds():.0f} s; "
            "check the logs of the missing ranks, or raise launch.setup_timeout"
        ) from None
    hosts = [json.loads(store.get(key)) for key in keys]
    if any(host[1:] != hosts[0][1:] for host in hosts):
        from common.ranks import host_rendezvous  # imported here because few runs need it

        host_rendezvous.wait_for_reading_ranks(store, rank_info, timeout)
        raise UserError(host_rendezvous.describe_host_difference(hosts))
    return tuple(name for name, _, _ in hosts)
