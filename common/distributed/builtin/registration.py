"""Making the backend `builtin` known to torch, and a process group of it when torch asks for one.

`register_backend(Transport(...))`, then `dist.init_process_group("builtin", ...)`.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from common.core.errors import UserError
from common.distributed.builtin.backend import NAME, BuiltinBackend
from common.distributed.builtin.communicator import Communicator
from common.distributed.transport.algorithms import build_algorithm
from common.distributed.transport.certificates import Identity
from common.distributed.transport.connecting import connect_ranks

OLDEST = [2, 15]  # of torch, whose calls of a backend have the names that backend.py overrides


@dataclass(frozen=True)
class Transport:
    """What process groups need to know of a run."""

    run: str
    """Name of run and attempt, by which ranks recognise each other."""
    hosts: Sequence[str]
    """Host of each rank."""
    algorithm: str = "ring"
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
    algorithm = build_algorithm(transport.algorithm, size, [transport.hosts[member] for member in members])

    if algorithm.note and rank == 0 and not options.global_ranks_in_group:
        print(algorithm.note, flush=True)

    def look_up(key: str) -> bytes:
        store.wait([key], datetime.timedelta(seconds=transport.setup_timeout))
        return bytes(store.get(key))

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
    return BuiltinBackend(Communicator(rank, size, *links, algorithm), members, options.timeout)
