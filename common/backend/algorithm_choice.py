"""Choose the all-reduce algorithm of a run and store the choice.

With `launch.algorithm=auto`, the links between ranks are measured once per run, and the chosen algorithm is stored in
resolved.yaml. Floating-point sums depend on the order of the summands, and this order depends on the algorithm.
Therefore, a resumed run is bit-identical to an uninterrupted run only if it uses the stored algorithm.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from common.backend import algorithms
from common.backend.cost import MessageTimeLine, MessageTimeLines, choose_algorithms_by_size, fit_message_time_line
from common.backend.torch_registration import replace_all_reduce_algorithm
from common.config.changed_settings import CHANGES_FILE, read_changes, read_last_changes
from common.config.config import read_settings
from common.ranks.rendezvous import World
from common.runs.claims import Claim
from common.runs.folder import RunFolder
from common.runs.resolved_settings import record_choice_of_attempt, record_resolved_settings, warn_of_lost_choice
from configs.shared import Launch

CONFIG_KEY = "launch.algorithm"
MESSAGE_BYTES = (8, 1 << 16, 1 << 20)  # sizes of the messages whose transfer times are measured
REPEATS = 5

LinkTimes = list[list[float]]
"""A pair [bytes, seconds] for each measured message size."""


def set_all_reduce_algorithm(launch: Launch, run: Path, world: World) -> None:
    """Set the all-reduce algorithm of the run on this rank.

    All ranks must call this function. If `launch.algorithm` is `auto`, the chosen algorithm is stored in the run folder
    `run` for later attempts.
    """
    if launch.algorithm == "auto":
        launch = replace(launch, algorithm=load_or_choose_algorithm(run, world))
    replace_all_reduce_algorithm(world.transport, launch.algorithm)


def load_or_choose_algorithm(run: Path, world: World) -> str:
    """Return the all-reduce algorithm of a run folder, or choose and store one if the setting is `auto`.

    An attempt that was resumed with `auto` instead of another algorithm chooses its own, which is stored with the
    changed settings of the attempt. If SLURM or torchrun restarts its ranks, they use this choice. All ranks must call
    this function. Raises UserError if the choice cannot be written.
    """
    stored = None
    is_changed = False
    if world.is_main:
        is_changed = CONFIG_KEY in read_last_changes(run)
        stored = find_choice_before_restart(run) if is_changed else read_settings(run).get(CONFIG_KEY)
    stored = world.broadcast(stored)
    if stored not in (None, "auto"):
        if is_changed:
            record_choice_of_attempt(run, CONFIG_KEY, str(stored))
        return str(stored)
    choice = world.broadcast(choose_algorithm_by_link_speeds(world))
    if world.is_main:
        print(f"{CONFIG_KEY}=auto: using {describe_algorithm_choice(choice)}", flush=True)
    if is_changed:
        record_choice_of_attempt(run, CONFIG_KEY, choice)
    elif world.is_main:
        warn_of_lost_choice(run, CONFIG_KEY)
        record_resolved_settings(run, {CONFIG_KEY: choice})
    return str(choice)


def find_choice_before_restart(run: Path) -> str | None:
    """Return the algorithm of the previous attempt if SLURM or torchrun has restarted its ranks; otherwise, None.

    The restarted ranks get the settings with which the previous attempt was started, such as `auto`.
    """
    *_, previous, newest = [None, None, *RunFolder(run).list_attempts()]
    if previous is None or newest is None:
        return None
    previous_claim = Claim.read(previous)
    newest_claim = Claim.read(newest)
    if previous_claim is None or newest_claim is None:
        return None
    if not newest_claim.starter or newest_claim.starter != previous_claim.starter:
        return None
    changes = read_changes(previous.attempt_folder / CHANGES_FILE)
    _, algorithm = changes.get(CONFIG_KEY, (None, read_settings(run).get(CONFIG_KEY)))
    return algorithm


def choose_algorithm_by_link_speeds(world: World) -> str:
    """Return, on rank 0, the all-reduce algorithm with the shortest predicted time for each vector size.

    The result has the format of `launch.algorithm`, and is an empty string on all other ranks. All ranks must call this
    function.
    """
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
        lines.append(fit_message_time_line([(nbytes, seconds) for nbytes, seconds in times]))

    within_hosts = find_slowest_line(lines_within_hosts)
    slowest = find_slowest_line(lines_between_hosts) or within_hosts
    assert slowest is not None
    return choose_algorithms_by_size(
        MessageTimeLines(slowest, within_hosts), algorithms.ALGORITHM_NAMES, world.size, hosts
    )


def find_slowest_line(lines: list[MessageTimeLine]) -> MessageTimeLine | None:
    """Return the line for the link on which large messages take longest, or None if there are no links.

    The slowest link determines how long an all-reduce takes, so its line is used to predict the time.
    """
    return max(lines, key=lambda line: line.predict_seconds(MESSAGE_BYTES[-1]), default=None)


def measure_links(world: World) -> LinkTimes:
    """Measure how long messages take on the link between this rank and the next rank.

    With two ranks, rank 0 measures the only link, and rank 1 returns an empty list. Links are measured one at a time.
    All ranks must call this function.
    """
    times: LinkTimes = []
    links = world.size if world.size > 2 else world.size - 1
    for rank in range(links):
        next_rank = (rank + 1) % world.size
        if world.rank == rank:
            times = [[nbytes, measure_message_seconds(nbytes, next_rank, sends_first=True)] for nbytes in MESSAGE_BYTES]
        elif world.rank == next_rank:
            for nbytes in MESSAGE_BYTES:
                measure_message_seconds(nbytes, rank, sends_first=False)
        dist.barrier()
    return times


def measure_message_seconds(nbytes: int, peer: int, *, sends_first: bool) -> float:
    """Return the transfer time of a message in seconds: half of the median round-trip time."""
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
    return median(times[1:])  # the first round trip also starts threads, so it is excluded


def describe_algorithm_choice(choice: str) -> str:
    """Describe which algorithm is used for which vector size, as in `tree, ring for 65,536 bytes or more`."""
    parts = choice.split("<")
    description = parts[0]
    for bound, name in zip(parts[1::2], parts[2::2], strict=True):
        description += f", {name} for {int(bound):,} bytes or more"
    return description
