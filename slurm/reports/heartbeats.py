"""Heartbeats of the ranks of an attempt, and detection of a straggler. This module does not import torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from statistics import median

from common.measure.straggler import find_straggler
from common.runs.folder import RunFolder, read_json
from common.runs.rank_changes import list_remaining_ranks
from common.runs.result import to_finite_number


@dataclasses.dataclass(frozen=True)
class Heartbeat:
    """The newest heartbeat of a rank."""

    rank: int
    host: str
    step: int
    time: float
    """Time of the heartbeat in seconds since 1970, or 0 if the rank has not written a heartbeat."""
    before_backward: float | None
    """Median seconds from the start of a step to the start of backward, or None if the time was not measured."""
    samples: int | None = None
    """Number of samples per batch in the rank's shard, or None if all shards are equal."""
    is_lost: bool = False
    """Whether an elastic run has lost the rank and continued without it."""


def read_heartbeats(attempt: RunFolder) -> list[Heartbeat]:
    """Return the newest heartbeat of each known rank of an attempt, in rank order.

    A rank is known if the rank has written a heartbeat or a log, or is listed in world.json.
    """
    hosts = read_json(attempt.attempt_folder / "world.json").get("hosts")
    if not isinstance(hosts, list):
        hosts = []
    files = [*attempt.attempt_folder.glob("heartbeat-*.json"), *attempt.attempt_folder.glob("logs/rank-*.log")]
    ranks = {int(path.stem.rpartition("-")[2]) for path in files}
    ranks.update(range(len(hosts)))

    remaining = list_remaining_ranks(attempt)
    heartbeats = []
    for rank in sorted(ranks):
        content = read_json(attempt.attempt_folder / f"heartbeat-{rank}.json")
        host = hosts[rank] if rank < len(hosts) else "?"
        step = int(to_finite_number(content.get("step")) or 0)
        time = to_finite_number(content.get("time")) or 0.0
        before_backward = to_finite_number(content.get("before_backward"))
        samples = int(to_finite_number(content.get("samples")) or 0) or None
        is_lost = remaining is not None and rank not in remaining
        heartbeats.append(Heartbeat(rank, host, step, time, before_backward, samples, is_lost))
    return heartbeats


def describe_shards(ranks: Sequence[Heartbeat]) -> str:
    """Return the ranks' shard sizes as text, or an empty string if all are equal."""
    samples = [str(rank.samples) for rank in ranks if rank.samples and not rank.is_lost]
    return f"shards {'+'.join(samples)}" if samples else ""


def find_slow_rank(ranks: Sequence[Heartbeat]) -> Heartbeat | None:
    """Return the heartbeat of the straggler, or None if there is no straggler.

    A straggler is a rank that takes clearly longer than the other ranks to reach backward. Lost ranks are ignored.
    """
    remaining = [rank for rank in ranks if not rank.is_lost]
    index = find_straggler([rank.before_backward for rank in remaining], [rank.samples for rank in remaining])
    return None if index is None else remaining[index]


def describe_slow_rank(ranks: Sequence[Heartbeat]) -> str:
    """Return a sentence about the straggler, or an empty string if there is no straggler."""
    slow = find_slow_rank(ranks)
    if slow is None or slow.before_backward is None:
        return ""
    others = [rank for rank in ranks if rank is not slow and not rank.is_lost]
    other_times = [rank.before_backward for rank in others if rank.before_backward]
    times = f"{slow.before_backward * 1e3:.1f} ms, compared with {median(other_times) * 1e3:.1f} ms on the other ranks"
    return f"rank {slow.rank} on {slow.host} is slow: backward starts after {times}"
