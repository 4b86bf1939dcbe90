"""Collectives: the time of an all-reduce by size and algorithm, with fitted lines.

    python experiments/collectives.py                                          two ranks on this machine
    python experiments/collectives.py processes_per_node=4 algorithms=[ring,tree,star] sizes=[4,1M]
    python experiments/collectives.py ops=[all_reduce] dtypes=[float32,bfloat16,int32]
    python experiments/collectives.py transports=[network,tls] launch.backend=builtin launch.tls=true
    make exp NAME=collectives NODES=4                                          on a cluster, with the bytes on its links

A run takes about a minute on 2 CPU cores. No model is trained: a step is one round of one point (operation, data type
and size). In each round, all variants are measured in turn, and each round starts with a different variant. A variant
is the library (gloo on CPUs, nccl on GPUs), the ring below, which uses only sends and receives, or the built-in backend
with an algorithm and a transport. All ranks fill their inputs with integers and run the operation once while its bytes
are counted. The ranks then wait for each other, run the operation again while it is timed, and compare the result with
the exact result. The time of a call is the time of the slowest rank. The time of a point is the median over the rounds.

A link needs alpha + beta n seconds to send n bytes (Hockney 1994, doi:10.1016/S0167-8191(06)80021-9). With p ranks,
each rank of a ring sends 2 (p - 1) messages of n / p bytes, so an all-reduce takes 2 (p - 1) alpha + 2 (p - 1) / p beta
n seconds. In every algorithm, at least one rank must send this number of bytes or more (Patarasuk and Yuan 2009,
doi:10.1016/j.jpdc.2008.09.002).
Other algorithms send fewer messages, which is faster for small n (Thakur, Rabenseifner and Gropp 2005,
doi:10.1177/1094342005051521). The bus bandwidth of nccl-tests (doc/PERFORMANCE.md) is n / t times 2 (p - 1) / p, for
an all-reduce that takes the time t. For any p, the bus bandwidth can be compared with the bandwidth of a link.
"""

from __future__ import annotations

from common.api import Run, start
from common.backend.algorithms import build_algorithms_by_size
from common.measure import plots
from common.measure.foreign_load import ForeignLoadMeter
from common.measure.timing import time_calls
from common.ranks.rendezvous import World
from common.techniques.collectives import measurement
from common.techniques.collectives.measurement import CollectiveOperation, CollectivePoint, CollectiveVariant
from common.techniques.collectives.report import CollectiveReport
from configs.collectives import Config

from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor


def shift_in_ring(sent: Tensor, received: Tensor, world: World, group: dist.ProcessGroup | None = None) -> None:
    """Send a tensor to the next rank of the ring, and receive one from the previous rank.

    The send and the receive overlap. If every rank waited for its send before it received, the ring would deadlock.
    """
    next_rank = (world.rank + 1) % world.size
    previous_rank = (world.rank - 1) % world.size
    operations = []
    if sent.numel():  # chunks are empty if the vector has fewer elements than the ring has ranks
        operations.append(dist.P2POp(dist.isend, sent, next_rank, group))
    if received.numel():
        operations.append(dist.P2POp(dist.irecv, received, previous_rank, group))
    if not operations:
        return
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def reduce_scatter_in_ring(chunks: Sequence[Tensor], world: World) -> None:
    """Pass every chunk once around the ring, and add the values of each rank. Rank r ends with the sum of chunk r."""
    buffer = torch.empty_like(chunks[0])  # no chunk is longer than the first one
    for step in range(1, world.size):
        outgoing = chunks[(world.rank - step) % world.size]
        partial_sum = chunks[(world.rank - step - 1) % world.size]
        incoming = buffer[: len(partial_sum)]
        shift_in_ring(outgoing, incoming, world)
        partial_sum += incoming


def all_gather_in_ring(chunks: Sequence[Tensor], world: World) -> None:
    """Pass every chunk once around the ring, starting with chunk r on rank r, so that all ranks get all chunks."""
    for step in range(world.size - 1):
        outgoing = chunks[(world.rank - step) % world.size]
        incoming = chunks[(world.rank - step - 1) % world.size]
        shift_in_ring(outgoing, incoming, world)


def make_ring_operations(world: World) -> dict[str, CollectiveOperation]:
    """Create the operations of the ring: an all-reduce is a reduce-scatter followed by an all-gather."""

    def all_reduce(x: Tensor, out: Tensor) -> None:
        chunks = x.tensor_split(world.size)
        reduce_scatter_in_ring(chunks, world)
        all_gather_in_ring(chunks, world)

    def reduce_scatter(x: Tensor, out: Tensor) -> None:
        chunks = x.tensor_split(world.size)
        reduce_scatter_in_ring(chunks, world)
        out.copy_(chunks[world.rank])

    def all_gather(x: Tensor, out: Tensor) -> None:
        chunks = out.tensor_split(world.size)
        chunks[world.rank].copy_(x)
        all_gather_in_ring(chunks, world)

    return {"all_reduce": all_reduce, "reduce_scatter": reduce_scatter, "all_gather": all_gather}


def make_library_operations(world: World, group: dist.ProcessGroup | None = None) -> dict[str, CollectiveOperation]:
    """Create the operations of a process group from the functions of torch.distributed."""
    return {
        "sendrecv": lambda x, out: shift_in_ring(x, out, world, group),
        "broadcast": lambda x, out: dist.broadcast(x, 0, group),
        "all_reduce": lambda x, out: dist.all_reduce(x, group=group),
        "reduce_scatter": lambda x, out: dist.reduce_scatter_tensor(out, x, group=group),
        "all_gather": lambda x, out: dist.all_gather_into_tensor(out, x, group=group),
    }


def create_variants(cfg: Config, run: Run) -> dict[str, CollectiveVariant]:
    """Create all variants of the collectives, by name."""
    world = run.world
    count_interface = partial(measurement.count_interface_bytes, world)
    # the library, or the built-in backend and gloo if the run itself uses the built-in backend
    library = CollectiveVariant(make_library_operations(world), count_interface_bytes=count_interface)
    if world.backend == "builtin":
        builtin = measurement.add_builtin_counters(library, None)._replace(link_variant="builtin")
        gloo_group = measurement.create_group_of_all_ranks(world, "gloo")
        gloo = CollectiveVariant(make_library_operations(world, gloo_group), count_interface_bytes=count_interface)
        variants = {"builtin": builtin, "gloo": gloo}
    else:
        variants = {world.backend: library}
    # the ring of sends and receives; the all-reduce of the ring corresponds to the algorithm `ring`
    ring = build_algorithms_by_size("ring", world.size)
    count_sent = variants[world.backend].count_sent_bytes
    variants["isend ring"] = CollectiveVariant(
        make_ring_operations(world), count_sent, count_interface, ring, world.backend
    )
    # the built-in backend, with each transport and algorithm
    if world.device.type == "cpu" and cfg.algorithms:
        make_operations = partial(make_library_operations, world)
        for transport in cfg.transports:
            variants |= measurement.open_builtin_variants(world, cfg.launch, transport, cfg.algorithms, make_operations)
    for note in measurement.list_variant_notes(variants, cfg.transports):
        run.log_message(note)
    return variants


def measure_variants(
    variants: Mapping[str, CollectiveVariant],
    first: int,
    point: CollectivePoint,
    vectors: measurement.BenchmarkVectors,
    world: World,
) -> dict[str, list[list[float]]]:
    """Measure every variant that has the operation, starting with variant `first`, and check all results.

    On rank 0, returns for each variant and rank: seconds, bytes sent, and bytes that left the network interface.
    """
    measurements: dict[str, list[list[float]]] = {}
    token = torch.zeros(1, device=world.device)
    names = list(variants)
    for name in names[first:] + names[:first]:
        variant = variants[name]
        if point.op not in variant.operations:
            continue
        operation = variant.operations[point.op]

        # Count the bytes of the first call. The first call is not timed, because other variants ran before the call.
        sent_before = variant.count_sent_bytes()
        interface_before = variant.count_interface_bytes()
        dist.barrier()
        operation(*vectors.make_tensors(point))
        dist.barrier()  # waits for the bytes that other ranks still have to send
        sent = variant.count_sent_bytes() - sent_before
        through_interface = variant.count_interface_bytes() - interface_before

        x, out = vectors.make_tensors(point)
        # Ranks synchronize with the variant's all-reduce, because dist.barrier warms up only the library's connections.
        synchronize = partial(variant.operations["all_reduce"], token, token)
        (seconds,) = time_calls(partial(operation, x, out), world.device, 1, warm_up=0, prepare=synchronize)
        vectors.check_result(point, x, out, name)
        measurements[name] = world.gather([seconds, sent, through_interface])
    return measurements


def main(cfg: Config, run: Run) -> None:
    world = run.world
    variants = create_variants(cfg, run)
    points = measurement.list_benchmark_points(cfg.ops, cfg.dtypes, cfg.parse_sizes(), world.size)
    vectors = measurement.BenchmarkVectors(cfg.seed, world, run.device)
    # The last dimension holds seconds, bytes sent, and bytes that left the network interface.
    table = torch.zeros(cfg.rounds, len(points), len(variants), world.size, 3, dtype=torch.float64)

    # Run every operation once, because the first message opens a connection.
    for point in measurement.list_benchmark_points(cfg.ops, cfg.dtypes[:1], [64], world.size):
        measure_variants(variants, 0, point, vectors, world)
    links = measurement.fit_link_lines(world)
    load_meter = ForeignLoadMeter(world)

    for step in run.repeat(points, measured=table):
        point = step.batch
        point_index = (step.number - 1) % len(points)
        measurements = measure_variants(variants, step.epoch % len(variants), point, vectors, world)
        for variant_index, name in enumerate(variants):
            if world.is_main and name in measurements:
                by_rank = measurements[name]
                table[step.epoch, point_index, variant_index] = torch.tensor(by_rank, dtype=torch.float64)
                slowest = max(seconds for seconds, _, _ in by_rank)
                step.log(**{f"{point.name} {name}": slowest})
        step.log(bytes=float(point.nbytes))

    load_facts = load_meter.report_foreign_load()
    report = CollectiveReport(points, variants, table, links)
    if cfg.plot and world.is_main:
        plots.draw_times_by_size(run.folder.path, report.list_curves())
    run.report(report, load_facts)


if __name__ == "__main__":
    start(main, Config)
