"""Rendezvous of ranks that torchrun or SLURM has started, possibly on several hosts: store, interface, differences.

Forked ranks do not need this module.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
from collections.abc import Sequence

import torch.distributed as dist

from common.ranks.rank_info import RankInfo
from common.system import network
from common.system.errors import UnreachableError, UserError, summarize_error
from common.system.text import format_count

PROBE_SECONDS = 5.0  # a port that does not answer within this time belongs to another program


def open_torchrun_store(rank_info: RankInfo, timeout: datetime.timedelta) -> dist.Store:
    """Open the rendezvous store at torchrun's port. The torchrun agent usually serves this store.

    Raises UnreachableError if rank 0 cannot be reached.
    """
    host, _, port = rank_info.master.rpartition(":")
    is_server = rank_info.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = dist.TCPStore(host, int(port), rank_info.size, is_server, timeout=timeout, wait_for_workers=False)
        return dist.PrefixStore(f"start-{rank_info.attempt_id}", store)  # torchrun keeps its store across restarts
    except (RuntimeError, dist.DistError) as error:
        raise UnreachableError(
            f"rank {rank_info.rank} cannot reach rank 0 at {rank_info.master}: {summarize_error(error)}"
        ) from None


def open_slurm_store(rank_info: RankInfo, timeout: datetime.timedelta) -> dist.Store:
    """Open a store that rank 0 serves on a port derived from the id of the attempt.

    Rank 0 uses the first free port of a list, and the other ranks try all ports of the list. Raises UnreachableError if
    rank 0 does not answer.
    """
    candidates = network.derive_ports(rank_info.attempt_id)

    def serve(port: int) -> dist.TCPStore:
        store = dist.TCPStore(rank_info.master, port, rank_info.size, True, timeout=timeout, wait_for_workers=False)
        store.set("token", rank_info.attempt_id)
        return store

    def open_client(port: int) -> dist.TCPStore | None:
        limit = datetime.timedelta(seconds=PROBE_SECONDS)
        store = dist.TCPStore(rank_info.master, port, rank_info.size, False, timeout=limit, wait_for_workers=False)
        return store if store.get("token").decode() == rank_info.attempt_id else None

    def connect(port: int) -> dist.TCPStore | None:
        try:  # TCPStore's timeout does not cover another program that accepts the connection but never answers
            store = network.call_with_timeout(PROBE_SECONDS, lambda: open_client(port))
        except (RuntimeError, dist.DistError):
            return None
        if store is not None:
            store.set_timeout(timeout)
        return store

    if rank_info.rank == 0:
        check_rank0_name(rank_info)
        return network.serve_on_free_port(candidates, serve)
    return network.connect_to_rank0(rank_info.master, candidates, connect, timeout.total_seconds())


def check_rank0_name(rank_info: RankInfo) -> None:
    """Raise UserError if other hosts cannot reach rank 0 by its host name."""
    network.resolve_for_other_hosts(rank_info.master, "the host of rank 0", rank_info.nodes)


def find_interface_to_rank0(rank_info: RankInfo) -> str:
    """Return the name of the network interface that connects this host to rank 0.

    Raises UserError if the address of rank 0 is not an IPv4 address and cannot be resolved to one.
    """
    if rank_info.nodes == 1:
        return "lo"
    host = rank_info.master.rpartition(":")[0] if rank_info.launcher == "torchrun" else rank_info.master
    try:
        return network.find_interface(network.resolve_ipv4(host))
    except OSError as error:
        raise UserError(
            f"{socket.gethostname()} has no IPv4 route to rank 0 on {host}: {summarize_error(error)}; use an IPv4 "
            "address or a name that resolves to one, or set launch.interface"
        ) from None


def describe_host_difference(hosts: Sequence[tuple[str, int, str]]) -> str:
    """Describe how the first host that differs from the host of rank 0 differs, with a remedy.

    `hosts` contains the host name, the number of ranks on this host, and the backend of each rank.
    """
    first_name, first_size, first_backend = hosts[0]
    name, size, backend = next(host for host in hosts if host[1:] != hosts[0][1:])
    if size != first_size:
        sizes = f"{first_name} has {format_count(first_size, 'rank')}, but {name} has {size}"
        return f"{sizes}; use the same --nproc-per-node on all hosts"
    backends = f"{first_name} uses the backend {first_backend}, but {name} uses {backend}"
    return f"{backends}; if a host has fewer GPUs than ranks, set launch.mixed=true or launch.device=cpu"


def wait_for_reading_ranks(store: dist.Store, rank_info: RankInfo, timeout: datetime.timedelta) -> None:
    """On rank 0, wait until all ranks have read the host names, because the store may end with rank 0."""
    keys = [f"read/{rank}" for rank in range(rank_info.size)]
    store.set(keys[rank_info.rank], "")
    if rank_info.rank == 0:
        with contextlib.suppress(RuntimeError, dist.DistError):
            store.wait(keys, timeout)
