"""Collectives on vectors of whole numbers: what each rank puts in and must get, bandwidths, bytes, and ways to do them.

Every operation takes an input and has an output, as in nccl-tests (github.com/NVIDIA/nccl-tests), whose sizes and
bandwidths these are: doc/PERFORMANCE.md there. Of n elements and p ranks, shapes are

    operation         input    output                                           result is in
    sendrecv          [n]      [n], what the rank before in the ring has put in    the output
    broadcast         [n]      -                                                   the input, of rank 0
    all_reduce        [n]      -                                                   the input
    reduce_scatter    [n]      [n / p]                                             the output
    all_gather        [n / p]  [n]                                                 the output
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from common.core import network
from common.distributed.algorithm_choice import measure_links
from common.distributed.builtin.backend import BuiltinBackend
from common.distributed.builtin.communicator import Communicator
from common.distributed.builtin.registration import register_backend
from common.distributed.rank_info import RankInfo
from common.distributed.rendezvous import World, describe_transport
from common.distributed.transport.algorithms import Algorithm, build_by_size, count_bytes
from common.distributed.transport.cost import Line, fit_line
from common.distributed.transport.memory_links import MemoryStream
from configs.collectives import TRANSPORTS
from configs.launch import Launch

Call = Callable[[Tensor, Tensor], object]
"""An operation on the input and the output of this rank."""
PERIOD = 1009  # elements after which the numbers of a rank repeat: a prime, so that no chunk looks like its neighbour
EXACT = 256  # largest sum: bfloat16, of all types the shortest, has all whole numbers up to it
SHARDED = ("reduce_scatter", "all_gather")
IN_PLACE = ("broadcast", "all_reduce")


class Point(NamedTuple):
    """An operation on a vector of `length` elements, nbytes bytes in all."""

    op: str
    dtype: str
    length: int
    nbytes: int

    @property
    def name(self) -> str:
        """Operation and type, without the size."""
        return f"{self.op} {self.dtype}"


def list_points(ops: Sequence[str], dtypes: Sequence[str], sizes: Sequence[int], ranks: int) -> list[Point]:
    """Return every operation with every type in every size (bytes), rounded up to what can be shared by the ranks."""
    points = []
    for op, dtype, size in itertools.product(ops, dtypes, sizes):
        width = getattr(torch, dtype).itemsize
        least = width * (ranks if op in SHARDED else 1)
        nbytes = -(-size // least) * least
        points.append(Point(op, dtype, nbytes // width, nbytes))
    return points


def compute_bus_factor(op: str, ranks: int) -> float:
    """Return bus bandwidth / algorithm bandwidth: the bytes that must pass through a rank's link, for each of a vector.

    Whatever the number of ranks, a bus bandwidth can be compared with that of the link.
    """
    if op == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if op in SHARDED else 1.0


class Side(NamedTuple):
    """A way to do operations, by name, and what is known of the bytes that this rank sends for them."""

    calls: Mapping[str, Call]
    count_sent: Callable[[], float] = float
    """Count the bytes of all messages so far, headers left out; 0 where that is not known."""
    count_interface: Callable[[], float] = float
    """Count the bytes that have left the network interface so far; 0 where that is not known."""
    algorithms: Sequence[tuple[int, Algorithm]] = ()
    """How it does an all-reduce, where that is known: each with the bytes of a vector from which on it is taken."""
    link: str = ""
    """The side that measures the links under these algorithms by `sendrecv`."""
    widens: bool = False
    """True where float16 and bfloat16 travel as float32 in an all-reduce."""

    def compute_vector_bytes(self, point: Point) -> int:
        """Return the bytes of a point's vector as it travels in an all-reduce."""
        return point.nbytes * (2 if self.widens and point.dtype in ("float16", "bfloat16") else 1)

    def choose_algorithm(self, point: Point) -> Algorithm | None:
        """Return how it does a point's all-reduce, where that is known; None for other operations."""
        nbytes = self.compute_vector_bytes(point)
        fits = [algorithm for least, algorithm in self.algorithms if least <= nbytes]
        return fits[-1] if fits and point.op == "all_reduce" else None


def get_communicator(group: dist.ProcessGroup | None) -> Communicator:
    """Return what carries the messages of a group of the backend `builtin`; None is the group of all ranks."""
    chosen = dist.group.WORLD if group is None else group
    backend = chosen._get_backend(torch.device("cpu")) if chosen is not None else None
    assert isinstance(backend, BuiltinBackend)
    return backend.communicator


def count_sent_bytes(group: dist.ProcessGroup | None) -> float:
    """Return the bytes that this rank has sent in a group of the backend `builtin`, headers of messages left out."""
    return float(sum(link.bytes_sent for link in get_communicator(group).outgoing.values()))


def count_interface_bytes(world: World) -> float:
    """Return the bytes that have left this rank's network interface.

    On one host the ranks share an interface, and it is their mean; 0 for several ranks on each of several hosts.
    """
    sent, hosts = network.read_sent_bytes(os.environ["GLOO_SOCKET_IFNAME"]), len(set(world.hosts))
    return sent / world.size if hosts == 1 else sent if hosts == world.size else 0.0


def describe_links(world: World, group: dist.ProcessGroup | None) -> str:
    """Return what carries the messages of a group of the backend `builtin`: memory, network, or both.

    All ranks call it.
    """
    own = [isinstance(link.stream, MemoryStream) for link in get_communicator(group).outgoing.values()]
    every = [is_memory for found in world.all_gather(own) for is_memory in found]
    if all(every):
        return "memory"
    return "memory and network" if any(every) else "network"


def open_group(world: World, backend: str) -> dist.ProcessGroup:
    """Open another group of all ranks. All of them call it."""
    group = dist.new_group(backend=backend, timeout=world.timeout)
    assert isinstance(group, dist.ProcessGroup)
    return group


def describe_builtin(side: Side, group: dist.ProcessGroup | None) -> Side:
    """Return the side of a group of the backend `builtin` with what is known of its algorithms and bytes."""
    algorithms = get_communicator(group).algorithms
    return side._replace(count_sent=partial(count_sent_bytes, group), algorithms=algorithms, widens=True)


def open_builtin_sides(
    world: World, settings: Launch, transport: str, names: Sequence[str], make: Callable[..., dict[str, Call]]
) -> dict[str, Side]:
    """Open a group of all ranks with the backend `builtin`, whatever the run's own is, and a side for each algorithm.

    The first one has all operations of the group, as `make` makes them; nothing but the all-reduce depends on the
    algorithm. Sides are named after what carries their messages: only ranks of one host share memory. All ranks call
    it.
    """
    chosen = replace(settings, algorithm="ring", transport=TRANSPORTS[transport])
    identity = world.transport.identity if world.transport and transport == "tls" else None
    described = describe_transport(world, chosen, world.hosts, os.environ["GLOO_SOCKET_IFNAME"], identity)
    register_backend(described)
    group = open_group(world, "builtin")
    if world.transport:  # groups made later are the run's own
        register_backend(world.transport)
    carrier = describe_links(world, group) if transport == "memory" else transport
    found, calls = {}, make(group)
    interface = partial(count_interface_bytes, world)
    for name in names:
        algorithms = build_by_size(name, world.size, described.hosts)
        calls["all_reduce"] = partial(all_reduce_by, algorithms, group)
        side = describe_builtin(Side(calls, count_interface=interface, link=f"{names[0]}, {carrier}"), group)
        found[f"{name}, {carrier}"] = side._replace(algorithms=algorithms)
        calls = {}
    return found


def list_notes(sides: Mapping[str, Side], transports: Sequence[str]) -> list[str]:
    """Return what a user should know of the sides: algorithms that were replaced, and memory that is not shared."""
    notes = {algorithm.note for side in sides.values() for _, algorithm in side.algorithms if algorithm.note}
    through_network = any(name.endswith(", network") for name in sides)
    if "memory" in transports and through_network and not any("memory" in name for name in sides):
        notes.add("no two ranks share a host: transports=memory sends through the network")
    return sorted(notes)


def all_reduce_by(
    algorithms: Sequence[tuple[int, Algorithm]], group: dist.ProcessGroup, x: Tensor, out: Tensor
) -> None:
    """All-reduce in a group of the backend `builtin`, by other algorithms than before."""
    get_communicator(group).algorithms = algorithms
    dist.all_reduce(x, group=group)


def fit_links(world: World) -> dict[str, Line]:
    """Fit a line to messages between each rank and the next one, one link at a time; return all on rank 0.

    Empty where ranks are on GPUs. All ranks call it.
    """
    found = world.gather(measure_links(world)) if world.device.type == "cpu" else []
    measured = {f"{rank} - {(rank + 1) % world.size}": one for rank, one in enumerate(found) if one}
    return {link: fit_line([(nbytes, seconds) for nbytes, seconds in one]) for link, one in measured.items()}


def compute_sent_bytes(point: Point, side: Side, ranks: int) -> list[float]:
    """Return the bytes that each rank sends by the side's algorithm, and where that is not known the least, on average.

    In a ring every rank sends that least: Patarasuk and Yuan 2009 (doi:10.1016/j.jpdc.2008.09.002).
    """
    if algorithm := side.choose_algorithm(point):
        width = side.compute_vector_bytes(point) // point.length
        return [float(width * count) for count in count_bytes(algorithm, point.length)]
    factor = (ranks - 1) / ranks if point.op == "broadcast" else compute_bus_factor(point.op, ranks)
    return [factor * point.nbytes] * ranks


class Vectors:
    """Inputs of a rank, drawn from a seed, and the results that it must get: sums that every type holds exactly."""

    def __init__(self, seed: int, rank_info: RankInfo, device: torch.device) -> None:
        self.rank, self.ranks, self.device = rank_info.rank, rank_info.size, device
        most = max(1, min(9, EXACT // self.ranks))
        draw = torch.Generator().manual_seed(seed)
        self.periods = torch.randint(most + 1, (self.ranks, PERIOD), generator=draw).to(device)

    def tile_period(self, period: Tensor, point: Point, length: int) -> Tensor:
        """Return `length` elements of the point's type: the numbers of the period, again and again."""
        return period.to(getattr(torch, point.dtype)).repeat(-(-length // PERIOD))[:length]

    def fill(self, point: Point) -> tuple[Tensor, Tensor]:
        """Return this rank's input, and an output that holds nothing right yet."""
        shard = point.length // self.ranks
        x = self.tile_period(self.periods[self.rank], point, shard if point.op == "all_gather" else point.length)
        length = {"reduce_scatter": shard, "broadcast": 0, "all_reduce": 0}.get(point.op, point.length)
        return x, torch.full((length,), -1, dtype=x.dtype, device=self.device)

    def compute_expected(self, point: Point) -> Tensor:
        """Return what this rank must get."""
        shard = point.length // self.ranks
        match point.op:
            case "sendrecv":
                return self.tile_period(self.periods[self.rank - 1], point, point.length)
            case "broadcast":
                return self.tile_period(self.periods[0], point, point.length)
            case "all_gather":
                return torch.cat([self.tile_period(period, point, shard) for period in self.periods])
        total = self.tile_period(self.periods.sum(0), point, point.length)
        return total[shard * self.rank : shard * (self.rank + 1)] if point.op == "reduce_scatter" else total

    def check(self, point: Point, x: Tensor, out: Tensor, side: str) -> None:
        """Raise RuntimeError unless the result, in input or output, is exactly right."""
        found, expected = x if point.op in IN_PLACE else out, self.compute_expected(point)
        if not torch.equal(found, expected):
            where = int((found != expected).nonzero()[0])
            raise RuntimeError(
                f"{side} is wrong: {point.op} of {point.length} {point.dtype} gives rank {self.rank} "
                f"{found[where].item():g} at position {where}, and {expected[where].item():g} is right"
            )
