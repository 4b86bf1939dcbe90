"""Registration of the backend `builtin` with torch, and creation of its process groups.

Call `register_backend(TransportSettings(...))` and then `dist.init_process_group("builtin", ...)`.
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

from common.backend.algorithms import Algorithm, build_algorithm, build_algorithms_by_size, make_algorithm_from_tuples
from common.backend.certificates import Identity
from common.backend.communicator import Communicator
from common.backend.process_group import BACKEND_NAME, BuiltinBackend
from common.ranks.links.connecting import connect_ranks
from common.system.errors import UserError

MIN_TORCH_VERSION = [2, 15]  # first version whose Backend class has the method names that process_group.py overrides


@dataclass
class TransportSettings:
    """Settings with which the process groups of a run connect their ranks."""

    run: str
    """Identifier of the run and the attempt. Two ranks connect only if they have the same identifier."""
    hosts: Sequence[str]
    """Host of each rank, ordered by rank."""
    algorithm: str = "ring"
    """All-reduce algorithm, or several algorithms by vector size in the format of `build_algorithms_by_size`."""
    address: str = "127.0.0.1"
    """IPv4 address of this rank's network interface."""
    host: str = ""
    """Name of this rank's host. Ranks with the same non-empty name use shared memory; all others use sockets."""
    polling_seconds: float = 0.0
    """Time in seconds for which a rank that waits for shared memory polls before it sleeps."""
    setup_timeout: float = 60.0
    """Time limit in seconds for connecting all ranks of a group."""
    identity: Identity | None = None
    """Key and certificate for TLS; None without TLS."""


def register_backend(transport: TransportSettings) -> None:
    """Register the backend `builtin` with torch.distributed.

    Process groups of this backend that are created later use the settings in `transport`. Raises UserError if the
    version of torch is too old.
    """
    if [int(part) for part in torch.__version__.split(".")[:2]] < MIN_TORCH_VERSION:
        raise UserError(
            f"launch.backend=builtin needs torch 2.15 or newer (found {torch.__version__}); use another backend"
        )
    dist.Backend.register_backend(BACKEND_NAME, partial(create_backend, transport), extended_api=True, devices=["cpu"])


def create_backend(transport: TransportSettings, options: Any, _: object) -> BuiltinBackend:
    """Create the backend of a process group and connect the ranks of the group.

    torch calls this function when a process group is created. Raises UnreachableError if some ranks do not connect in
    time.
    """
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
        algorithms = build_algorithms_by_size(
            transport.algorithm, size, [transport.hosts[member] for member in members]
        )
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
    """Return the custom algorithm `FILE.py:function`, which only the first rank of the group loads.

    The other ranks receive the moves of the algorithm from the first rank, because the file may differ between hosts,
    and the function may return different moves in each call. Ranks with different moves would wait for each other
    forever. Raises UserError if the algorithm is invalid.
    """
    if rank == 0:
        algorithm = build_algorithm(name, size)
        publish("algorithm", json.dumps(algorithm.moves))
        return algorithm
    return make_algorithm_from_tuples(name, json.loads(look_up("algorithm")))


def replace_all_reduce_algorithm(transport: TransportSettings, name: str) -> None:
    """Use another all-reduce algorithm in process groups that are created later.

    A built-in algorithm is also used in the existing group of all ranks. All ranks must call this function at the same
    point in their sequence of collectives. Raises UserError if the algorithm is invalid.
    """
    transport.algorithm = name
    if ":" not in name:  # the ranks agreed on the moves of a custom algorithm when the group was created
        assert dist.group.WORLD is not None
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        assert isinstance(backend, BuiltinBackend)
        backend.communicator.algorithms = build_algorithms_by_size(name, backend.size(), transport.hosts)
