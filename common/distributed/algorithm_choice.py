"""All-reduce algorithm of a run: `launch.algorithm=auto` is measured once per run and stored in config.yaml.

Sums of floating-point numbers depend on their order. A resumed run is bit-identical only with the same algorithms.
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
from common.distributed.transport.cost import MessageTimeLine, MessageTimeLines, choose_by_size, fit_line
from common.runs.folder import write_atomic
from configs.launch import Launch

CONFIG_KEY = "launch.algorithm"
MESSAGE_BYTES = (8, 1 << 16, 1 << 20)  # sizes of the measured messages
REPEATS = 5

LinkTimes = list[list[float]]
"""[bytes, seconds] of a message of each size."""


def set_all_reduce_algorithm(launch: Launch, run: Path, world: World) -> None:
    """Set the run's all-reduce algorithm on this rank. All ranks call it.

    The choice of `auto` is stored in `launch` and, for later attempts, in config.yaml of the run folder.
    """
    if world.transport is None:
        return
    if launch.algorithm == "auto":
        launch.algorithm = load_or_choose_algorithm(run / "config.yaml", world)
    replace_algorithm(world.transport, algorithms.use_stored_algorithm_file(launch, run / "code").algorithm)


def load_or_choose_algorithm(config_file: Path, world: World) -> str:
    """Return the algorithm of config.yaml, or choose one and store it there. All ranks call it."""
    stored = read_config_file(config_file).get(CONFIG_KEY) if world.is_main else None
    stored = world.broadcast(stored)
    if stored not in (None, "auto"):
        return str(stored)
    choice = world.broadcast(choose_by_link_speeds(world))
    if world.is_main:
        print(f"{CONFIG_KEY}=auto: {describe_choice(choice)}", flush=True)
        if stored:
            store_choice(config_file, choice)
    return str(choice)


def choose_by_link_speeds(world: World) -> str:
    """Return the fastest algorithms by the predicted time on rank 0, an empty text elsewhere. All ranks call it."""
    times_by_rank = world.gather(measure_links(world))
    assert world.transport is not None
    if not world.is_main:
        return ""
    if world.size == 1:
        return "ring"

    hosts = world.transport.hosts
    lines_within_hosts: list[MessageTimeLine] = []
    lines_between_hosts: list[MessageTimeLine] = []
    for rank, times in enumerate(times_by_rank):
        if not times:
            continue
        is_within_host = hosts[rank] == hosts[(rank + 1) % world.size]
        lines = lines_within_hosts if is_within_host else lines_between_hosts
        lines.append(fit_line([(nbytes, seconds) for nbytes, seconds in times]))

    within_hosts = find_slowest_line(lines_within_hosts)
    slowest = find_slowest_line(lines_between_hosts) or within_hosts
    assert slowest is not None
    return choose_by_size(MessageTimeLines(slowest, within_hosts), algorithms.ALGORITHM_NAMES, world.size, hosts)


def find_slowest_line(lines: list[MessageTimeLine]) -> MessageTimeLine | None:
    """Return the line of the slowest link, which an all-reduce waits for; None without links."""
    return max(lines, key=lambda line: line.predict_seconds(MESSAGE_BYTES[-1]), default=None)


def measure_links(world: World) -> LinkTimes:
    """Measure the link from this rank to the next rank; empty if it is measured in the opposite direction.

    One link is measured at a time. All ranks call it.
    """
    times: LinkTimes = []
    links = world.size if world.size > 2 else world.size - 1
    for rank in range(links):
        next_rank = (rank + 1) % world.size
        if world.rank == rank:
            times = [[nbytes, measure_message(nbytes, next_rank, sends_first=True)] for nbytes in MESSAGE_BYTES]
        elif world.rank == next_rank:
            for nbytes in MESSAGE_BYTES:
                measure_message(nbytes, rank, sends_first=False)
        dist.barrier()
    return times


def measure_message(nbytes: int, peer: int, *, sends_first: bool) -> float:
    """Return the seconds of a message: half of the median round trip."""
    message = torch.zeros(nbytes, dtype=torch.uint8)
    times: list[float] = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        for sends in (sends_first, not sends_first):
            if sends:
                dist.send(message, peer)
            else:
                dist.recv(message, peer)
        times.append((time.perf_counter() - start) / 2)
    return median(times[1:])  # the first round trip starts threads


def describe_choice(choice: str) -> str:
    """Describe algorithms by size, such as `tree, ring from 65,536 bytes on`."""
    parts = choice.split("<")
    description = parts[0]
    for bound, name in zip(parts[1::2], parts[2::2], strict=True):
        description += f", {name} from {int(bound):,} bytes on"
    return description


def store_choice(config_file: Path, choice: str) -> None:
    """Store the algorithm in a run's config.yaml. Raises UserError if the file cannot be written."""
    tree = OmegaConf.load(config_file)
    OmegaConf.update(tree, CONFIG_KEY, choice)
    write_atomic(config_file, OmegaConf.to_yaml(tree))
