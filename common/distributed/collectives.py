"""Operations of the collectives benchmark: test vectors, exact results, bandwidth factors, bytes, and variants.

Every operation takes an input and an output tensor, as in nccl-tests (github.com/NVIDIA/nccl-tests), whose definitions
of sizes and bandwidths apply (doc/PERFORMANCE.md there). Shapes for n elements and p ranks:

    operation         input    output                                       result is in
    sendrecv          [n]      [n], the input of the previous rank (ring)   the output
    broadcast         [n]      -                                            the input, from rank 0
    all_reduce        [n]      -                                            the input
    reduce_scatter    [n]      [n / p]                                      the output
    all_gather        [n / p]  [n]                                          the output
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
from common.distributed.transport.cost import MessageTimeLine, fit_line
from common.distributed.transport.memory_links import MemoryStream
from configs.collectives import TRANSPORTS
from configs.launch import Launch

CollectiveOperation = Callable[[Tensor, Tensor], object]
"""An operation on the input and the output of this rank."""
PERIOD = 1009  # length of a rank's repeated sequence: prime, so that neighbouring chunks differ
MAX_EXACT_SUM = 256  # bfloat16, the least precise type, represents all integers up to it
SHARDED = ("reduce_scatter", "all_gather")
IN_PLACE = ("broadcast", "all_reduce")


class CollectivePoint(NamedTuple):
    """One operation on a vector of `length` elements, `nbytes` bytes in total."""

    op: str
    dtype: str
    length: int
    nbytes: int

    @property
    def name(self) -> str:
        """Operation and type, without the size."""
        return f"{self.op} {self.dtype}"


def list_points(ops: Sequence[str], dtypes: Sequence[str], sizes: Sequence[int], ranks: int) -> list[CollectivePoint]:
    """Return all combinations of operation, type and size in bytes; sizes are rounded up to equal shards."""
    points = []
    for op, dtype, size in itertools.product(ops, dtypes, sizes):
        element_bytes = getattr(torch, dtype).itemsize
        unit = element_bytes * (ranks if op in SHARDED else 1)
        nbytes = -(-size // unit) * unit
        points.append(CollectivePoint(op, dtype, nbytes // element_bytes, nbytes))
    return points


def compute_bus_factor(op: str, ranks: int) -> float:
    """Return bus bandwidth / algorithm bandwidth: bytes through a rank's link per byte of the vector.

    The bus bandwidth is comparable to the bandwidth of a link, for any number of ranks.
    """
    if op == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if op in SHARDED else 1.0


class CollectiveVariant(NamedTuple):
    """One implementation of the operations, with its byte counters and its algorithms."""

    operations: Mapping[str, CollectiveOperation]
    """The operations by name."""
    count_sent_bytes: Callable[[], float] = float
    """Count the bytes of all messages sent so far, without headers; 0 if unknown."""
    count_interface_bytes: Callable[[], float] = float
    """Count the bytes that have left the network interface so far; 0 if unknown."""
    algorithms: Sequence[tuple[int, Algorithm]] = ()
    """All-reduce algorithms, each with the smallest vector in bytes that it is used for; empty if unknown."""
    link_variant: str = ""
    """Name of the side whose `sendrecv` measures the links used by these algorithms."""
    widens_half_precision: bool = False
    """True if an all-reduce transfers float16 and bfloat16 as float32."""

    def compute_vector_bytes(self, point: CollectivePoint) -> int:
        """Return the bytes of a point's vector as an all-reduce transfers it."""
        is_widened = self.widens_half_precision and point.dtype in ("float16", "bfloat16")
        return 2 * point.nbytes if is_widened else point.nbytes

    def choose_algorithm(self, point: CollectivePoint) -> Algorithm | None:
        """Return the algorithm of a point's all-reduce; None if unknown and for other operations."""
        if point.op != "all_reduce":
            return None
        nbytes = self.compute_vector_bytes(point)
        candidates = [algorithm for min_bytes, algorithm in self.algorithms if min_bytes <= nbytes]
        return candidates[-1] if candidates else None


def get_communicator(group: dist.ProcessGroup | None) -> Communicator:
    """Return the communicator of a group of the backend `builtin`; None is the group of all ranks."""
    if group is None:
        group = dist.group.WORLD
    assert group is not None
    backend = group._get_backend(torch.device("cpu"))
    assert isinstance(backend, BuiltinBackend)
    return backend.communicator


def count_sent_bytes(group: dist.ProcessGroup | None) -> float:
    """Return the bytes that this rank has sent in a `builtin` group, without message headers."""
    links = get_communicator(group).outgoing.values()
    return float(sum(link.bytes_sent for link in links))


def count_interface_bytes(world: World) -> float:
    """Return the bytes that have left this rank's network interface.

    Ranks of a single host share an interface: each gets the mean. 0 for several ranks on each of several hosts.
    """
    sent = network.read_sent_bytes(os.environ["GLOO_SOCKET_IFNAME"])
    hosts = len(set(world.hosts))
    if hosts == 1:
        return sent / world.size
    return sent if hosts == world.size else 0.0


def describe_links(world: World, group: dist.ProcessGroup | None) -> str:
    """Return what carries the messages of a `builtin` group: memory, network, or both. All ranks call it."""
    links = get_communicator(group).outgoing.values()
    uses_memory = [isinstance(link.stream, MemoryStream) for link in links]
    kinds = set(itertools.chain.from_iterable(world.all_gather(uses_memory)))
    if False not in kinds:
        return "memory"
    return "memory and network" if True in kinds else "network"


def open_group(world: World, backend: str) -> dist.ProcessGroup:
    """Open another process group of all ranks. All of them call it."""
    group = dist.new_group(backend=backend, timeout=world.timeout)
    assert isinstance(group, dist.ProcessGroup)
    return group


def add_builtin_counters(side: CollectiveVariant, group: dist.ProcessGroup | None) -> CollectiveVariant:
    """Return the side with the algorithms and the byte counter of a `builtin` group."""
    algorithms = get_communicator(group).algorithms
    return side._replace(
        count_sent_bytes=partial(count_sent_bytes, group), algorithms=algorithms, widens_half_precision=True
    )


def open_builtin_variants(
    world: World,
    settings: Launch,
    transport: str,
    names: Sequence[str],
    make: Callable[..., dict[str, CollectiveOperation]],
) -> dict[str, CollectiveVariant]:
    """Open a `builtin` group of all ranks and a side for each algorithm in `names`. All ranks call it.

    The first side has all operations of the group, made by `make`; the others have the all-reduce only, because no
    other operation depends on the algorithm. Names of sides include what carries their messages: ranks share memory
    only within a host.
    """
    group_settings = replace(settings, algorithm="ring", transport=TRANSPORTS[transport])
    identity = world.transport.identity if world.transport and transport == "tls" else None
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    group_transport = describe_transport(world, group_settings, world.hosts, interface, identity)
    register_backend(group_transport)
    group = open_group(world, "builtin")
    if world.transport:  # later groups use the run's own transport again
        register_backend(world.transport)

    carrier = describe_links(world, group) if transport == "memory" else transport
    link = f"{names[0]}, {carrier}"
    count_interface = partial(count_interface_bytes, world)
    sides: dict[str, CollectiveVariant] = {}
    calls = make(group)
    for name in names:
        algorithms = build_by_size(name, world.size, group_transport.hosts)
        calls["all_reduce"] = partial(all_reduce_by, algorithms, group)
        side = add_builtin_counters(
            CollectiveVariant(calls, count_interface_bytes=count_interface, link_variant=link), group
        )
        sides[f"{name}, {carrier}"] = side._replace(algorithms=algorithms)
        calls = {}
    return sides


def list_variant_notes(sides: Mapping[str, CollectiveVariant], transports: Sequence[str]) -> list[str]:
    """Return notes about replaced algorithms and unavailable shared memory."""
    notes: set[str] = set()
    for side in sides.values():
        notes |= {algorithm.note for _, algorithm in side.algorithms if algorithm.note}
    uses_network = any(name.endswith(", network") for name in sides)
    uses_memory = any("memory" in name for name in sides)
    if "memory" in transports and uses_network and not uses_memory:
        notes.add("no two ranks share a host: transports=memory sends through the network")
    return sorted(notes)


def all_reduce_by(
    algorithms: Sequence[tuple[int, Algorithm]], group: dist.ProcessGroup, vector: Tensor, output: Tensor
) -> None:
    """All-reduce a vector in a `builtin` group with the given algorithms; `output` is unused."""
    get_communicator(group).algorithms = algorithms
    dist.all_reduce(vector, group=group)


def fit_link_lines(world: World) -> dict[str, MessageTimeLine]:
    """Fit a line to the message times between neighbouring ranks, one link at a time.

    Empty for ranks on GPUs, and on all ranks but rank 0. All ranks call it.
    """
    if world.device.type != "cpu":
        return {}
    lines = {}
    for rank, times in enumerate(world.gather(measure_links(world))):
        if times:
            lines[f"{rank} - {(rank + 1) % world.size}"] = fit_line([(nbytes, seconds) for nbytes, seconds in times])
    return lines


def compute_sent_bytes(point: CollectivePoint, side: CollectiveVariant, ranks: int) -> list[float]:
    """Return the bytes that each rank sends with the side's algorithm.

    If the algorithm is unknown, return the minimum, averaged over the ranks. In a ring every rank sends this minimum
    (Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002).
    """
    if algorithm := side.choose_algorithm(point):
        element_bytes = side.compute_vector_bytes(point) // point.length
        return [float(element_bytes * count) for count in count_bytes(algorithm, point.length)]
    factor = (ranks - 1) / ranks if point.op == "broadcast" else compute_bus_factor(point.op, ranks)
    return [factor * point.nbytes] * ranks


class TestVectors:
    """Random input vectors of the ranks and the expected results. All types represent the sums exactly."""

    def __init__(self, seed: int, rank_info: RankInfo, device: torch.device) -> None:
        self.rank = rank_info.rank
        self.ranks = rank_info.size
        self.device = device
        largest = max(1, min(9, MAX_EXACT_SUM // self.ranks))
        generator = torch.Generator().manual_seed(seed)
        self.periods = torch.randint(largest + 1, (self.ranks, PERIOD), generator=generator).to(device)

    def tile_period(self, period: Tensor, point: CollectivePoint, length: int) -> Tensor:
        """Return `length` elements of the point's type that repeat the numbers of the period."""
        return period.to(getattr(torch, point.dtype)).repeat(-(-length // PERIOD))[:length]

    def make_tensors(self, point: CollectivePoint) -> tuple[Tensor, Tensor]:
        """Return this rank's input, and an output filled with a wrong value."""
        shard = point.length // self.ranks
        input_length = shard if point.op == "all_gather" else point.length
        vector = self.tile_period(self.periods[self.rank], point, input_length)
        output_length = {"reduce_scatter": shard, "broadcast": 0, "all_reduce": 0}.get(point.op, point.length)
        return vector, torch.full((output_length,), -1, dtype=vector.dtype, device=self.device)

    def compute_expected(self, point: CollectivePoint) -> Tensor:
        """Return the expected result on this rank."""
        shard = point.length // self.ranks
        match point.op:
            case "all_gather":
                return torch.cat([self.tile_period(period, point, shard) for period in self.periods])
            case "sendrecv":
                period = self.periods[self.rank - 1]
            case "broadcast":
                period = self.periods[0]
            case _:
                period = self.periods.sum(0)
        expected = self.tile_period(period, point, point.length)
        if point.op == "reduce_scatter":
            return expected[shard * self.rank : shard * (self.rank + 1)]
        return expected

    def check_result(self, point: CollectivePoint, vector: Tensor, output: Tensor, side: str) -> None:
        """Raise RuntimeError unless the result, in input or output, is exact."""
        actual = vector if point.op in IN_PLACE else output
        expected = self.compute_expected(point)
        if torch.equal(actual, expected):
            return
        position = int((actual != expected).nonzero()[0])
        raise RuntimeError(
            f"{side} returned a wrong result: {point.op} of {point.length} {point.dtype} on rank {self.rank}, position "
            f"{position}: got {actual[position].item():g}, expected {expected[position].item():g}"
        )
