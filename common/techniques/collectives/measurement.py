"""Operations of the collectives benchmark, with test vectors, byte counts, and bandwidth factors.

Every operation takes an input and an output tensor, as in nccl-tests (github.com/NVIDIA/nccl-tests). Sizes and
bandwidths are defined as in doc/PERFORMANCE.md of nccl-tests. Shapes for n elements and p ranks:

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

from common.backend.algorithm_choice import measure_links
from common.backend.algorithms import Algorithm, build_algorithms_by_size, count_bytes_per_rank
from common.backend.communicator import Communicator
from common.backend.cost import MessageTimeLine, fit_message_time_line
from common.backend.process_group import BuiltinBackend
from common.backend.setup import make_transport_settings
from common.backend.torch_registration import register_backend
from common.ranks.links.memory_stream import MemoryStream
from common.ranks.rank_info import RankInfo
from common.ranks.rendezvous import World
from common.system import network
from configs.collectives import TRANSPORTS
from configs.shared import Launch

CollectiveOperation = Callable[[Tensor, Tensor], object]
"""Function that executes an operation on the input and output tensors of this rank."""
PERIOD = 1009  # length of the sequence that a rank's vector repeats; prime, so that neighboring chunks differ
MAX_EXACT_SUM = 256  # bfloat16, the least precise data type, represents all integers up to 256 exactly
SHARDED = ("reduce_scatter", "all_gather")
IN_PLACE = ("broadcast", "all_reduce")


class CollectivePoint(NamedTuple):
    """Operation on a vector that has `length` elements of type `dtype` and a total size of `nbytes` bytes."""

    op: str
    dtype: str
    length: int
    nbytes: int

    @property
    def name(self) -> str:
        """Operation and data type, without the size."""
        return f"{self.op} {self.dtype}"


def list_benchmark_points(
    ops: Sequence[str], dtypes: Sequence[str], sizes: Sequence[int], ranks: int
) -> list[CollectivePoint]:
    """Return all combinations of operation, data type, and size.

    `sizes` are in bytes. For sharded operations, each size is rounded up so that all ranks have equal shards.
    """
    points = []
    for op, dtype, size in itertools.product(ops, dtypes, sizes):
        element_bytes = getattr(torch, dtype).itemsize
        unit = element_bytes * (ranks if op in SHARDED else 1)
        nbytes = -(-size // unit) * unit
        points.append(CollectivePoint(op, dtype, nbytes // element_bytes, nbytes))
    return points


def compute_bus_factor(op: str, ranks: int) -> float:
    """Return the ratio of bus bandwidth to algorithm bandwidth.

    This ratio is the number of bytes that pass through the network link of each rank for each byte of the vector. The
    bus bandwidth can therefore be compared with the bandwidth of this link, regardless of the number of ranks.
    """
    if op == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if op in SHARDED else 1.0


class CollectiveVariant(NamedTuple):
    """Implementation of the operations, with byte counters and the all-reduce algorithms that it uses."""

    operations: Mapping[str, CollectiveOperation]
    """Functions that execute the operations, by operation name."""
    count_sent_bytes: Callable[[], float] = float
    """Function that returns the number of message bytes sent so far, excluding headers; 0 if unknown."""
    count_interface_bytes: Callable[[], float] = float
    """Function that returns the number of bytes sent through the network interface so far; 0 if unknown."""
    algorithms: Sequence[tuple[int, Algorithm]] = ()
    """All-reduce algorithms, each with the smallest vector size in bytes for which it is used; empty if unknown."""
    link_variant: str = ""
    """Name of the variant whose `sendrecv` times measure the links over which the all-reduce algorithms send."""
    widens_half_precision: bool = False
    """True if an all-reduce transfers float16 and bfloat16 numbers as float32."""

    def compute_vector_bytes(self, point: CollectivePoint) -> int:
        """Return the size of the vector in bytes, after conversion to the data type that an all-reduce transfers."""
        is_widened = self.widens_half_precision and point.dtype in ("float16", "bfloat16")
        return 2 * point.nbytes if is_widened else point.nbytes

    def choose_algorithm(self, point: CollectivePoint) -> Algorithm | None:
        """Return the algorithm that this variant uses for the all-reduce of a point.

        Return None if the algorithm is unknown or if the operation is not an all-reduce.
        """
        if point.op != "all_reduce":
            return None
        nbytes = self.compute_vector_bytes(point)
        candidates = [algorithm for min_bytes, algorithm in self.algorithms if min_bytes <= nbytes]
        return candidates[-1] if candidates else None


def get_communicator(group: dist.ProcessGroup | None) -> Communicator:
    """Return the communicator of a `builtin` process group; None denotes the group of all ranks."""
    if group is None:
        group = dist.group.WORLD
    assert group is not None
    backend = group._get_backend(torch.device("cpu"))
    assert isinstance(backend, BuiltinBackend)
    return backend.communicator


def count_sent_bytes(group: dist.ProcessGroup | None) -> float:
    """Return the number of bytes that this rank has sent in a `builtin` group, excluding message headers."""
    links = get_communicator(group).outgoing.values()
    return float(sum(link.bytes_sent for link in links))


def count_interface_bytes(world: World) -> float:
    """Return the number of bytes that this rank has sent through its network interface.

    If all ranks are on a single host, they share its interface, so the result is the mean over the ranks. The result is
    0 if there are several hosts and at least one host runs several ranks, because the bytes cannot be attributed to a
    rank.
    """
    sent = network.read_sent_bytes(os.environ["GLOO_SOCKET_IFNAME"])
    hosts = len(set(world.hosts))
    if hosts == 1:
        return sent / world.size
    return sent if hosts == world.size else 0.0


def describe_links(world: World, group: dist.ProcessGroup | None) -> str:
    """Return whether the messages of a `builtin` group pass through shared memory, the network, or both.

    All ranks must call this function.
    """
    links = get_communicator(group).outgoing.values()
    uses_memory = [isinstance(link.stream, MemoryStream) for link in links]
    kinds = set(itertools.chain.from_iterable(world.all_gather(uses_memory)))
    if False not in kinds:
        return "memory"
    return "memory and network" if True in kinds else "network"


def create_group_of_all_ranks(world: World, backend: str) -> dist.ProcessGroup:
    """Create another process group of all ranks. All ranks must call this function."""
    group = dist.new_group(backend=backend, timeout=world.timeout)
    assert isinstance(group, dist.ProcessGroup)
    return group


def add_builtin_counters(side: CollectiveVariant, group: dist.ProcessGroup | None) -> CollectiveVariant:
    """Return a copy of a variant with the algorithms and the byte counter of a `builtin` group."""
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
    """Create a `builtin` group of all ranks and a variant for each algorithm in `names`.

    The first variant has all operations of the group, as returned by `make`. The other variants have only the
    all-reduce, because no other operation depends on the algorithm. The name of each variant includes the transport
    that its messages actually use, which may be the network even for transports=memory. All ranks must call this
    function.
    """
    group_settings = replace(settings, algorithm="ring", transport=TRANSPORTS[transport])
    identity = world.transport.identity if world.transport and transport == "tls" else None
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    group_transport = make_transport_settings(world, group_settings, world.hosts, interface, identity)
    register_backend(group_transport)
    group = create_group_of_all_ranks(world, "builtin")
    if world.transport:  # later groups must use the transport of the run again
        register_backend(world.transport)

    carrier = describe_links(world, group) if transport == "memory" else transport
    link = f"{names[0]}, {carrier}"
    count_interface = partial(count_interface_bytes, world)
    sides: dict[str, CollectiveVariant] = {}
    calls = make(group)
    for name in names:
        algorithms = build_algorithms_by_size(name, world.size, group_transport.hosts)
        calls["all_reduce"] = partial(all_reduce_with_algorithms, algorithms, group)
        side = add_builtin_counters(
            CollectiveVariant(calls, count_interface_bytes=count_interface, link_variant=link), group
        )
        sides[f"{name}, {carrier}"] = side._replace(algorithms=algorithms)
        calls = {}
    return sides


def list_variant_notes(sides: Mapping[str, CollectiveVariant], transports: Sequence[str]) -> list[str]:
    """Return notes on algorithms that were replaced by others and on shared memory that could not be used."""
    notes: set[str] = set()
    for side in sides.values():
        notes |= {algorithm.note for _, algorithm in side.algorithms if algorithm.note}
    uses_network = any(name.endswith(", network") for name in sides)
    uses_memory = any("memory" in name for name in sides)
    if "memory" in transports and uses_network and not uses_memory:
        notes.add("transports=memory uses the network, because no two ranks are on the same host")
    return sorted(notes)


def all_reduce_with_algorithms(
    algorithms: Sequence[tuple[int, Algorithm]], group: dist.ProcessGroup, vector: Tensor, output: Tensor
) -> None:
    """All-reduce a vector in a `builtin` group with the given algorithms. `output` is not used."""
    get_communicator(group).replace_algorithms(algorithms)
    dist.all_reduce(vector, group=group)


def fit_link_lines(world: World) -> dict[str, MessageTimeLine]:
    """Fit a line to the message times of each link between neighboring ranks.

    Links are measured one at a time. The result is empty if the ranks run on GPUs. Only rank 0 returns the lines; the
    result is empty on all other ranks. All ranks must call this function.
    """
    if world.device.type != "cpu":
        return {}
    lines = {}
    for rank, times in enumerate(world.gather(measure_links(world))):
        if times:
            lines[f"{rank} - {(rank + 1) % world.size}"] = fit_message_time_line(
                [(nbytes, seconds) for nbytes, seconds in times]
            )
    return lines


def compute_sent_bytes(point: CollectivePoint, side: CollectiveVariant, ranks: int) -> list[float]:
    """Return the number of bytes that each rank sends with the algorithm of a variant.

    If the algorithm is unknown, return the theoretical minimum, averaged over the ranks. In a ring, every rank sends
    this minimum (Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002).
    """
    if algorithm := side.choose_algorithm(point):
        element_bytes = side.compute_vector_bytes(point) // point.length
        return [float(element_bytes * count) for count in count_bytes_per_rank(algorithm, point.length)]
    factor = (ranks - 1) / ranks if point.op == "broadcast" else compute_bus_factor(point.op, ranks)
    return [factor * point.nbytes] * ranks


class BenchmarkVectors:
    """Random input vectors of all ranks, and the expected results of the operations.

    All data types represent the sums of these vectors exactly.
    """

    def __init__(self, seed: int, rank_info: RankInfo, device: torch.device) -> None:
        self.rank = rank_info.rank
        self.ranks = rank_info.size
        self.device = device
        largest = max(1, min(9, MAX_EXACT_SUM // self.ranks))
        generator = torch.Generator().manual_seed(seed)
        self.periods = torch.randint(largest + 1, (self.ranks, PERIOD), generator=generator).to(device)

    def repeat_period_to_length(self, period: Tensor, point: CollectivePoint, length: int) -> Tensor:
        """Return a vector of `length` elements that repeats the numbers in `period`."""
        return period.to(getattr(torch, point.dtype)).repeat(-(-length // PERIOD))[:length]

    def make_tensors(self, point: CollectivePoint) -> tuple[Tensor, Tensor]:
        """Return this rank's input tensor, and an output tensor filled with -1, which no correct result contains."""
        shard = point.length // self.ranks
        input_length = shard if point.op == "all_gather" else point.length
        vector = self.repeat_period_to_length(self.periods[self.rank], point, input_length)
        output_length = {"reduce_scatter": shard, "broadcast": 0, "all_reduce": 0}.get(point.op, point.length)
        return vector, torch.full((output_length,), -1, dtype=vector.dtype, device=self.device)

    def compute_expected(self, point: CollectivePoint) -> Tensor:
        """Return the expected result of an operation on this rank."""
        shard = point.length // self.ranks
        match point.op:
            case "all_gather":
                return torch.cat([self.repeat_period_to_length(period, point, shard) for period in self.periods])
            case "sendrecv":
                period = self.periods[self.rank - 1]
            case "broadcast":
                period = self.periods[0]
            case _:
                period = self.periods.sum(0)
        expected = self.repeat_period_to_length(period, point, point.length)
        if point.op == "reduce_scatter":
            return expected[shard * self.rank : shard * (self.rank + 1)]
        return expected

    def check_result(self, point: CollectivePoint, vector: Tensor, output: Tensor, side: str) -> None:
        """Raise RuntimeError if the result of an operation is not exact.

        The result is in the input tensor for in-place operations, and in the output tensor for all others.
        """
        actual = vector if point.op in IN_PLACE else output
        expected = self.compute_expected(point)
        if torch.equal(actual, expected):
            return
        position = int((actual != expected).nonzero()[0])
        raise RuntimeError(
            f"{side} returned a wrong result: {point.op} of {point.length} {point.dtype} elements on rank {self.rank}, "
            f"position {position}: got {actual[position].item():g}, expected {expected[position].item():g}"
        )
