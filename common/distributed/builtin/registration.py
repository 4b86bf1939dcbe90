"""Registration of the backend `builtin` with torch, and construction of its process groups.

Call `register_backend(TransportSettings(...))`, then `dist.init_process_group("builtin", ...)`.
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
from common.distributed.builtin.backend import BACKEND_NAME, BuiltinBackend
from common.distributed.builtin.communicator import Communicator
from common.distributed.transport.algorithms import Algorithm, build_algorithm, build_by_size, make_algorithm
from common.distributed.transport.certificates import Identity
from common.distributed.transport.connecting import connect_ranks

MIN_TORCH_VERSION = [2, 15]  # the first whose backends have the method names that backend.py overrides


@dataclass
class TransportSettings:
    """Properties of a run that its process groups need."""

    run: str
    """Name of run and attempt, by which ranks recognise each other."""
    hosts: Sequence[str]
    """Host of each rank."""
    algorithm: str = "ring"
    """All-reduce algorithm, or several by size in the format of `build_by_size`."""
    address: str = "127.0.0.1"
    """IPv4 address of this rank's network interface."""
    host: str = ""
    """Ranks with the same non-empty name exchange messages through memory, all others through sockets."""
    polling_seconds: float = 0.0
    """Seconds of polling for messages through memory before sleeping."""
    setup_timeout: float = 60.0
    """Seconds within which all ranks of a group must connect."""
    identity: Identity | None = None
    """Key and certificate, for TLS."""


def register_backend(transport: TransportSettings) -> None:
    """Register `builtin` with torch.distributed; later groups use these settings. Raises UserError."""
    if [int(part) for part in torch.__version__.split(".")[:2]] < MIN_TORCH_VERSION:
        raise UserError(
            f"launch.backend=builtin needs torch 2.15 or newer, found {torch.__version__}; use another backend"
        )
    dist.Backend.register_backend(BACKEND_NAME, partial(create_backend, transport), extended_api=True, devices=["cpu"])


def create_backend(transport: TransportSettings, options: Any, _: object) -> BuiltinBackend:
    """Connect the members of a process group; torch calls it. Raises UnreachableError."""
    store = options.store
    rank = options.group_rank
    size = options.group_size
    members = list(options.global_ranks_in_group) or list(range(size))

    def look_up(key: str) -> bytes:
        store.wait([key], datetime.timedelta(seconds=transport.setup_timeout))
        return bytes(store.get(key))

    if ":" in transport.algorithm:
        algorithms = [(0, share_custom_algorithm(transport.algorithm, rank, size, store.set, look_up))]
    else:
        algorithms = build_by_size(transport.algorithm, size, [transport.hosts[member] for member in members])
    if rank == 0 and not options.global_ranks_in_group:
        for _, algorithm in algorithms:
            if algorithm.note:
                print(algorithm.note, flush=True)
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
        polling_seconds=transport.polling_seconds,
    )
    return BuiltinBackend(Communicator(rank, size, *links, algorithms), members, options.timeout)


def share_custom_algorithm(
    name: str, rank: int, size: int, publish: Callable[[str, str], object], look_up: Callable[[str], bytes]
) -> Algorithm:
    """Return the algorithm of `FILE.py:function`, loaded by the group's first rank. Raises UserError.

    Files may differ between hosts, and results between calls; ranks with different moves would wait for each other.
    """
    if rank == 0:
        algorithm = build_algorithm(name, size)
        publish("algorithm", json.dumps(algorithm.moves))
        return algorithm
    return make_algorithm(name, json.loads(look_up("algorithm")))


def replace_algorithm(transport: TransportSettings, name: str) -> None:
    """Use another all-reduce in later groups, and a built-in one in all ranks' group.

    All ranks must call it between the same collectives. Raises UserError.
    """
    transport.algorithm = name
    if ":" not in name:  # the ranks have agreed on the moves of a custom algorithm when the group was created
        assert dist.group.WORLD is not None
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        assert isinstance(backend, BuiltinBackend)
        backend.communicator.algorithms = build_by_size(name, backend.size(), transport.hosts)
