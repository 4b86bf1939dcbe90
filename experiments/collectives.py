"""Collectives: what an all-reduce costs by size and algorithm, and the straight line behind it.

    python experiments/collectives.py                                          two ranks on this machine
    python experiments/collectives.py processes_per_node=4 algorithms=[ring,tree,star] sizes=[4,1M]
    python experiments/collectives.py ops=[all_reduce] dtypes=[float32,bfloat16,int64]
    python experiments/collectives.py transports=[network,tls] launch.backend=builtin launch.tls=true
    make exp NAME=collectives NODES=4                                          on a cluster, with the bytes on its links

Takes about a minute on 2 CPU cores. Nothing is trained: a step is one round of one point (operation, type, size), in
which all sides take their turn, another one first in each round. A side is the library (gloo on CPUs, nccl on GPUs),
the ring below, which only sends and receives, or the built-in backend with an algorithm and a transport. All ranks put
in whole numbers, call the operation and count its bytes, wait for each other, call it again, timed, and compare the
result with the exact one. A call's time is that of its slowest rank, a point's the median over the rounds.

A link takes alpha + beta n seconds for n bytes (Hockney 1994, doi:10.1016/S0167-8191(06)80021-9). With p ranks a ring
sends 2 (p - 1) messages of n / p bytes: an all-reduce takes 2 (p - 1) alpha + 2 (p - 1) / p beta n, and no algorithm
sends fewer bytes from each rank (Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002). Others send fewer messages,
which counts where n is small (Thakur, Rabenseifner and Gropp 2005, doi:10.1177/1094342005051521). The bus bandwidth of
nccl-tests (doc/PERFORMANCE.md) multiplies n / t by 2 (p - 1) / p: it can be compared with a link's, whatever p is.
"""

from __future__ import annotations

from common.api import Run, TrainState, start
from common.data.rounds import Rounds
from common.distributed import collectives
from common.distributed.collective_report import CollectiveReport
from common.distributed.collectives import Call, Point, Side, Vectors
from common.distributed.rendezvous import World
from common.distributed.transport.algorithms import build_by_size
from common.measure import plots
from common.measure.foreign_load import ForeignLoadMeter
from common.measure.timing import time_calls
from configs.collectives import Config

from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor


def shift_in_ring(sent: Tensor, received: Tensor, world: World, group: dist.ProcessGroup | None = None) -> None:
    """Send to the next rank of the ring and receive from the one before, both at once.

    Were all ranks to send first and wait until that is taken, nobody would ever receive.
    """
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    moves = [(dist.isend, sent, after), (dist.irecv, received, before)]
    todo = [dist.P2POp(*move, group) for move in moves if move[1].numel()]  # a vector may be shorter than the ring
    for work in dist.batch_isend_irecv(todo) if todo else []:
        work.wait()


def reduce_scatter_in_ring(chunks: Sequence[Tensor], world: World) -> None:
    """Let every chunk travel once around the ring and be added to at each stop: chunk r is complete at rank r."""
    arrived = torch.empty_like(chunks[0])  # the longest
    for step in range(1, world.size):
        leaves, stays = chunks[(world.rank - step) % world.size], chunks[(world.rank - step - 1) % world.size]
        shift_in_ring(leaves, arrived[: len(stays)], world)
        stays += arrived[: len(stays)]


def all_gather_in_ring(chunks: Sequence[Tensor], world: World) -> None:
    """Let every chunk, which rank r begins with as its own, travel once around the ring and be kept at each stop."""
    for step in range(world.size - 1):
        shift_in_ring(chunks[(world.rank - step) % world.size], chunks[(world.rank - step - 1) % world.size], world)


def make_ring_operations(world: World) -> dict[str, Call]:
    """Make the operations that are rounds of a ring: an all-reduce is a reduce-scatter and then an all-gather."""

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


def make_library_operations(world: World, group: dist.ProcessGroup | None = None) -> dict[str, Call]:
    """Make the operations of a process group as torch.distributed has them."""
    return {
        "sendrecv": lambda x, out: shift_in_ring(x, out, world, group),
        "broadcast": lambda x, out: dist.broadcast(x, 0, group),
        "all_reduce": lambda x, out: dist.all_reduce(x, group=group),
        "reduce_scatter": lambda x, out: dist.reduce_scatter_tensor(out, x, group=group),
        "all_gather": lambda x, out: dist.all_gather_into_tensor(out, x, group=group),
    }


def open_sides(cfg: Config, run: Run) -> dict[str, Side]:
    """Open the sides: the library, the ring above, and the built-in backend by transport and algorithm."""
    world, passed = run.world, partial(collectives.count_interface_bytes, run.world)
    sides = {world.backend: Side(make_library_operations(world), count_interface=passed)}
    if world.backend == "builtin":
        sides["builtin"] = collectives.describe_builtin(sides["builtin"], None)._replace(link="builtin")
        gloo = make_library_operations(world, collectives.open_group(world, "gloo"))
        sides["gloo"] = Side(gloo, count_interface=passed)
    ring, count = build_by_size("ring", world.size), sides[world.backend].count_sent
    sides["isend ring"] = Side(make_ring_operations(world), count, passed, ring, world.backend)
    for transport in cfg.transports if world.device.type == "cpu" and cfg.algorithms else []:
        make = partial(make_library_operations, world)
        sides |= collectives.open_builtin_sides(world, cfg.launch, transport, cfg.algorithms, make)
    for note in collectives.list_notes(sides, cfg.transports):
        run.log_message(note)
    return sides


def measure_sides(
    sides: Mapping[str, Side], first: int, point: Point, vectors: Vectors, world: World
) -> dict[str, list[list[float]]]:
    """Measure each side that has the operation, and check all results.

    Return for each rank, on rank 0: seconds, bytes sent, and bytes that left the network interface.
    """
    found: dict[str, list[list[float]]] = {}
    one = torch.zeros(1, device=world.device)
    for name in [*list(sides)[first:], *list(sides)[:first]]:
        side = sides[name]
        if point.op in side.calls:
            call = side.calls[point.op]
            sent, passed = side.count_sent(), side.count_interface()
            dist.barrier()
            call(*vectors.fill(point))  # not timed: other sides have run since its last turn
            dist.barrier()  # what others have still to send counts, too
            sent, passed = side.count_sent() - sent, side.count_interface() - passed
            x, out = vectors.fill(point)
            meet = partial(side.calls["all_reduce"], one, one)  # a barrier of the library would leave it alone warm
            (seconds,) = time_calls(partial(call, x, out), world.device, 1, warm_up=0, prepare=meet)
            vectors.check(point, x, out, name)
            found[name] = world.gather([seconds, sent, passed])
    return found


def main(cfg: Config, run: Run) -> None:
    world = run.world
    sides = open_sides(cfg, run)
    points = collectives.list_points(cfg.ops, cfg.dtypes, cfg.list_bytes(), world.size)
    vectors = Vectors(cfg.seed, world, run.device)
    table = torch.zeros(cfg.rounds, len(points), len(sides), world.size, 3, dtype=torch.float64)
    state = TrainState([], None, Rounds(points), world, tensors={"measured": table})
    for point in collectives.list_points(cfg.ops, cfg.dtypes[:1], [64], world.size):
        measure_sides(sides, 0, point, vectors, world)  # connections are made at the first message
    links = collectives.fit_links(world)
    others = ForeignLoadMeter(world)

    for step in run.steps(state, loss=0):
        point, index = step.batch, (step.number - 1) % len(points)
        with step:
            found = measure_sides(sides, step.epoch % len(sides), point, vectors, world)
            for number, name in enumerate(sides):
                if world.is_main and name in found:
                    table[step.epoch, index, number] = torch.tensor(found[name], dtype=torch.float64)
                    step.log(**{f"{point.name} {name}": max(seconds for seconds, *_ in found[name])})
            step.log(bytes=float(point.nbytes))
    load = others.report()
    report = CollectiveReport(points, sides, table, links)
    if cfg.plot and world.is_main:
        plots.draw_times_by_size(run.folder.path, report.list_curves())
    run.report(report, load)


if __name__ == "__main__":
    start(main, Config)
