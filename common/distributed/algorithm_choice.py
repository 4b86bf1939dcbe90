"""The all-reduce algorithm of a run: `launch.algorithm=auto` is measured once in its life and stands in config.yaml.

Sums of floating-point numbers depend on their order: a resumed run is equal to the bit only with the same algorithms.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from common.core.config import read_config_file
from common.distributed.builtin.registration import replace_algorithm
from common.distributed.rendezvous import World
from common.distributed.transport import algorithms
from common.distributed.transport.cost import Line, Lines, choose_by_size, fit_line
from common.runs.folder import write_atomic
from configs.launch import Launch

NAME = "launch.algorithm"
SIZES = (8, 1 << 16, 1 << 20)  # bytes of the messages that are measured
REPEATS = 5

Measured = list[list[float]]
"""(bytes, seconds) of messages of each size."""


def resolve_algorithm(launch: Launch, run: Path, world: World) -> None:
    """Let the ranks all-reduce as the run does: as it has measured, or by the file that it keeps. All ranks call it.

    The choice of `auto` goes into `launch` and into config.yaml, where a later attempt finds it.
    """
    if world.transport is None:
        return
    if launch.algorithm == "auto":
        launch.algorithm = choose_algorithm_once(run / "config.yaml", world)
    replace_algorithm(world.transport, algorithms.use_kept_file(launch, run / "code").algorithm)


def choose_algorithm_once(file: Path, world: World) -> str:
    """Return what config.yaml says, else what measuring shows, and write that there. All ranks call it."""
    known = world.broadcast(read_config_file(file).get(NAME) if world.is_main else None)
    if known in (None, "auto"):
        choice = world.broadcast(choose_by_link_speeds(world))
        if world.is_main:
            print(f"{NAME}=auto: {describe_choice(choice)}", flush=True)
            if known:
                store_choice(file, choice)
        return str(choice)
    return str(known)


def choose_by_link_speeds(world: World) -> str:
    """Return the algorithms of the least predicted time on rank 0, an empty text elsewhere. All ranks call it."""
    found = world.gather(measure_links(world))
    assert world.transport is not None
    if not world.is_main or world.size == 1:
        return "ring" if world.is_main else ""
    hosts = world.transport.hosts
    lines: dict[bool, list[Line]] = {False: [], True: []}
    for rank, measured in enumerate(found):
        if measured:
            lines[hosts[rank] == hosts[(rank + 1) % world.size]].append(fit_line([(n, t) for n, t in measured]))
    # an all-reduce waits for the slowest link
    between, within = (max(of, key=lambda line: line.predict_seconds(SIZES[-1]), default=None) for of in lines.values())
    either = between or within
    assert either is not None
    return choose_by_size(Lines(either, within), algorithms.NAMES, world.size, hosts)


def measure_links(world: World) -> Measured:
    """Measure the link from this rank to the next one; empty where the other way round is measured already.

    One link is measured at a time. All ranks call it.
    """
    found: Measured = []
    for rank in range(world.size if world.size > 2 else world.size - 1):
        after = (rank + 1) % world.size
        if world.rank == rank:
            found = [[nbytes, measure_message(nbytes, after, first=True)] for nbytes in SIZES]
        elif world.rank == after:
            for nbytes in SIZES:
                measure_message(nbytes, rank, first=False)
        dist.barrier()
    return found


def measure_message(nbytes: int, peer: int, *, first: bool) -> float:
    """Return the seconds of a message: half of those to a rank and back, the median of several."""
    value, times = torch.zeros(nbytes, dtype=torch.uint8), list[float]()
    for _ in range(REPEATS + 1):  # the first one starts threads
        start = time.perf_counter()
        for sends in (first, not first):
            if sends:
                dist.send(value, peer)
            else:
                dist.recv(value, peer)
        times.append((time.perf_counter() - start) / 2)
    return median(times[1:])


def describe_choice(choice: str) -> str:
    """Return algorithms by size in words."""
    first, *others = choice.split("<")
    more = [f"{name} from {int(bound):,} bytes on" for bound, name in zip(others[::2], others[1::2], strict=True)]
    return ", ".join([first, *more])


def store_choice(file: Path, choice: str) -> None:
    """Replace the algorithm in a run's config.yaml. Raises UserError where the disk refuses."""
    tree = OmegaConf.load(file)
    OmegaConf.update(tree, NAME, choice)
    write_atomic(file, OmegaConf.to_yaml(tree))
