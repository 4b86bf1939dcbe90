"""Heartbeats of the ranks of an attempt: progress, and the straggler. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from statistics import median

from common.measure.straggler import find_straggler
from common.runs import result
from common.runs.folder import Folder, read_json


@dataclasses.dataclass(frozen=True)
class Heartbeat:
    """A rank's newest sign of life."""

    rank: int
    host: str
    step: int
    time: float
    """Seconds since 1970; 0 where there is none."""
    before_backward: float | None
    """Seconds of its newest steps until backward begins, where they are measured."""
    samples: int | None = None
    """Its samples of a batch, where the shards of the ranks are unequal."""


def read_heartbeats(attempt: Folder) -> list[Heartbeat]:
    """Read the heartbeats of all known ranks of an attempt, in their order."""
    hosts = read_json(attempt.attempt / "world.json").get("hosts")
    hosts = hosts if isinstance(hosts, list) else []
    names = [*attempt.attempt.glob("heartbeat-*.json"), *(attempt.attempt / "logs").glob("rank-*.log")]
    numbers = {int(path.stem.rpartition("-")[2]) for path in names} | set(range(len(hosts)))
    found = []
    for rank in sorted(numbers):
        beat = read_json(attempt.attempt / f"heartbeat-{rank}.json")
        host, early = hosts[rank] if rank < len(hosts) else "?", beat.get("before_backward")
        step, time, samples = (result.to_number(beat.get(name)) or 0.0 for name in ("step", "time", "samples"))
        found.append(Heartbeat(rank, host, int(step), time, result.to_number(early), int(samples) or None))
    return found


def describe_shards(ranks: Sequence[Heartbeat]) -> str:
    """Describe the shards of the ranks; empty where they are equal."""
    samples = [str(rank.samples) for rank in ranks if rank.samples]
    return f"shards {'+'.join(samples)}" if samples else ""


def find_slow_rank(ranks: Sequence[Heartbeat]) -> Heartbeat | None:
    """Find the rank that needs clearly longer than the others until backward begins."""
    found = find_straggler([rank.before_backward for rank in ranks], [rank.samples for rank in ranks])
    return None if found is None else ranks[found]


def describe_slow_rank(ranks: Sequence[Heartbeat]) -> str:
    """Describe the straggler in a sentence; empty where there is none."""
    slow = find_slow_rank(ranks)
    if slow is None or slow.before_backward is None:
        return ""
    others = median(rank.before_backward for rank in ranks if rank is not slow and rank.before_backward)
    times = f"{slow.before_backward * 1e3:.1f} ms until backward, the others {others * 1e3:.1f} ms"
    return f"rank {slow.rank} on {slow.host} is slow: {times}"
