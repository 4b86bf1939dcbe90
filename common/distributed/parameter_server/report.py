"""Report of a parameter server: pushes, bytes and staleness at each server in this attempt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from common.core.text import format_count
from common.distributed.parameter_server.server import ShardServer, StalenessPolicy
from common.distributed.rendezvous import World
from common.runs.result import ReportData

MAX_TABLE_STALENESS = 8  # values of staleness in the table


class ServerCounts(NamedTuple):
    """Counts of what one server has served."""

    pushes: int
    received: int
    """Bytes of gradients, including those of the server's own rank, which need no message."""
    sent: int
    """Bytes of parameters, likewise."""
    staleness: dict[str, int]
    """Number of pushes by staleness. The keys are text because the counts travel as JSON."""


def gather_served(world: World, server: ShardServer | None) -> list[ServerCounts]:
    """Return the counts of each server on rank 0; all ranks call it."""
    counts = None
    if server is not None:
        shard_bytes = server.shard.values.nbytes
        pushes = server.staleness.total()
        staleness = {str(age): count for age, count in server.staleness.items()}
        counts = ServerCounts(pushes, pushes * shard_bytes, server.pulls * shard_bytes, staleness)._asdict()
    return [ServerCounts(**gathered) for gathered in world.gather(counts) if gathered is not None]


class ServerReport:
    """Report of all servers of a run."""

    def __init__(self, policy: StalenessPolicy, servers: Sequence[ServerCounts]) -> None:
        self.policy = policy
        self.servers = servers
        self.staleness: Counter[int] = Counter()
        """Number of pushes by staleness, over all servers."""
        for server in servers:
            self.staleness.update({int(age): count for age, count in server.staleness.items()})

    @property
    def mean(self) -> float:
        """Mean staleness of a push."""
        total_staleness = sum(age * count for age, count in self.staleness.items())
        return total_staleness / max(1, self.staleness.total())

    def compute_shares(self) -> dict[int, float]:
        """Return the share of pushes (0 to 1) for each staleness up to the maximum."""
        ages = range(max(self.staleness, default=-1) + 1)
        return {age: self.staleness[age] / self.staleness.total() for age in ages}

    def rows(self) -> Mapping[str, str]:
        """Return the rows of the final table."""
        limit = f" with staleness of at most {self.policy.max_staleness}" if self.policy.mode == "bounded" else ""
        served = []
        for rank, server in enumerate(self.servers):
            pushes = format_count(server.pushes, "gradient")
            served.append(f"rank {rank}: {pushes}, {server.received / 1e6:.1f} MB in, {server.sent / 1e6:.1f} MB out")
        shares = self.compute_shares()
        columns = [f"{age}: {share:.0%}" for age, share in shares.items() if share]
        if len(columns) > MAX_TABLE_STALENESS:
            columns[MAX_TABLE_STALENESS:] = ["..."]
        return {
            "mode": f"{self.policy.mode}{limit}, {format_count(self.policy.workers, 'worker')}, "
            f"{format_count(len(self.servers), 'server')}",
            "served": "  ".join(served),
            "staleness": f"mean {self.mean:.2f}, most {max(self.staleness, default=0)}  ({'  '.join(columns)})",
        }

    def result(self) -> ReportData:
        """Return the measurements for result.json."""
        measured: dict[str, Any] = {
            "pushes": [server.pushes for server in self.servers],
            "bytes_received": [server.received for server in self.servers],
            "bytes_sent_by_servers": [server.sent for server in self.servers],
            "staleness_counts": {str(age): count for age, count in sorted(self.staleness.items())},
            "staleness_mean": self.mean,
            "staleness_most": max(self.staleness, default=0),
        }
        return ReportData(measured=measured)
