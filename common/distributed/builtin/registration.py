"""Making the backend `builtin` known to torch, and a process group of it when torch asks for one.

`register_backend(Transport(...))`, then `dist.init_process_group("builtin", ...)`.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from common.core.errors import UserError
from common.distributed.builtin.backend import NAME, BuiltinBackend
from common.distributed.builtin.communicator import Communicator
from common.distributed.transport.algorithms import Algorithm, build_algorithm, build_by_size, make_algorithm
from common.distributed.transport.certificates import Identity
from common.distributed.transport.connecting import connect_ranks

OLDEST = [2, 15]  # of torch, whose calls of a backend have the names that backend.py overrides


@dataclass
class Transport:
    """Facts of a run that its process groups need."""

    run: str
    """Name of run and attempt, by which ranks recognise each other."""
    hosts: Sequence[str]
    """Host of each rank."""
    algorithm: str = "ring"
    """All-reduce, or several by size, as `build_by_size` reads them."""
    address: str = "127.0.0.1"
    """IPv4 address of this rank's network interface."""
    host: str = ""
    """Name that ranks have in common whose messages go through memory; without one all go through sockets."""
    spin: float = 0.0
    """Seconds of polling such messages before sleeping."""
    setup_timeout: float = 60.0
    """Seconds until all ranks of a group must have connected."""
    identity: Identity | None = None
    """Key and certificate, for TLS."""


def register_backend(transport: Transport) -> None:
    """Make `builtin` known to torch.distributed; groups made later have these settings. Raises UserError."""
    if [int(part) for part in torch.__version__.split(".")[:2]] < OLDEST:
        raise UserError(f"launch.backend=builtin needs torch 2.15 or newer, this is {torch.__version__}; leave it out")
    dist.Backend.register_backend(NAME, partial(create_backend, transport), extended_api=True, devices=["cpu"])


def create_backend(transport: Transport, options: Any, _: object) -> BuiltinBackend:
    """Connect the members of a process group, as torch asks for it. Raises Unreachable."""
    store, rank, size = options.store, options.group_rank, options.group_size
    members = list(options.global_ranks_in_group) or list(range(size))

    def look_up(key: str) -> bytes:
        store.wait([key], datetime.timedelta(seconds=transport.setup_timeout))
        return bytes(store.get(key))

    if ":" in transport.algorithm:
        algorithms = [(0, agree_on_own_algorithm(transport.algorithm, rank, size, store.set, look_up))]
    else:
        algorithms = build_by_size(transport.algorithm, size, [transport.hosts[member] for member in members])
    if rank == 0 and not options.global_ranks_in_group:
        print("".join(f"{algorithm.note}\n" for _, algorithm in algorithms if algorithm.note), end="", flush=True)
    links = connect_ranks(
        rank,
        size,
        store.set,
        look_up,
        group=f"{transport.run}/{options.group_id}",
        address=transport.address,
        setup_timeout=transport.setup_timeout,
        timeout=options.timeout.total_seconds(),
        identity=transport.identity,
        host=transport.host,
        spin=transport.spin,
    )
    return BuiltinBackend(Communicator(rank, size, *links, algorithms), members, options.timeout)


def agree_on_own_algorithm(
    name: str, rank: int, size: int, publish: Callable[[str, str], object], look_up: Callable[[str], bytes]
) -> Algorithm:
    """Return the algorithm of `FILE.py:function` as the first rank of the group reads it. Raises UserError.

    Files may differ between hosts, and functions between calls: ranks that make other moves wait for each other.
    """
    if rank == 0:
        algorithm = build_algorithm(name, size)
        publish("algorithm", json.dumps(algorithm.moves))
        return algorithm
    return make_algorithm(name, json.loads(look_up("algorithm")))


def replace_algorithm(transport: Transport, name: str) -> None:
    """Take another all-reduce from now on: in groups made later, and a built-in one in the group of all ranks, too.

    All ranks call it between the same collectives. Raises UserError.
    """
    transport.algorithm = name
    if ":" not in name:  # all ranks have agreed on the moves of one's own
        assert dist.group.WORLD is not None
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        assert isinstance(backend, BuiltinBackend)
        backend.communicator.algorithms = build_by_size(name, backend.size(), transport.hosts)
