"""Report on the servers of a parameter server: pushes, bytes transferred, and staleness in this attempt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from common.ranks.rendezvous import World
from common.runs.result import ReportData
from common.system.text import format_count
from common.techniques.parameter_server.server import ShardServer, StalenessPolicy

MAX_TABLE_STALENESS = 8  # maximum number of staleness values in the table


class ServerCounts(NamedTuple):
    """Number of pushes that one server has applied, and number of bytes that it has received and sent."""

    pushes: int
    received: int
    """Size of all received gradients in bytes, including those from the server's own rank, which need no message."""
    sent: int
    """Size of all sent parameters in bytes, including those for the server's own rank, which need no message."""
    staleness: dict[str, int]
    """Number of pushes by staleness. The keys are strings because the counts are sent as JSON."""


def gather_server_counts(world: World, server: ShardServer | None) -> list[ServerCounts]:
    """Return the counts of all servers on rank 0. All ranks must call this function."""
    counts = None
    if server is not None:
        shard_bytes = server.shard.values.nbytes
        pushes = server.staleness.total()
        staleness = {str(age): count for age, count in server.staleness.items()}
        counts = ServerCounts(pushes, pushes * shard_bytes, server.pulls * shard_bytes, staleness)._asdict()
    return [ServerCounts(**gathered) for gathered in world.gather(counts) if gathered is not None]


class ServerReport:
    """Report on all servers of a run."""

    def __init__(self, policy: StalenessPolicy, servers: Sequence[ServerCounts]) -> None:
        self.policy = policy
        self.servers = servers
        self.staleness: Counter[int] = Counter()
        """Total number of pushes to all servers, by staleness."""
        for server in servers:
            self.staleness.update({int(age): count for age, count in server.staleness.items()})

    @property
    def mean_staleness(self) -> float:
        """Mean staleness over all pushes."""
        total_staleness = sum(age * count for age, count in self.staleness.items())
        return total_staleness / max(1, self.staleness.total())

    def compute_staleness_shares(self) -> dict[int, float]:
        """Return, for each staleness from 0 to the maximum, the fraction (0 to 1) of pushes that had this staleness."""
        ages = range(max(self.staleness, default=-1) + 1)
        return {age: self.staleness[age] / self.staleness.total() for age in ages}

    def rows(self) -> Mapping[str, str]:
        """Return the rows of the final table."""
        limit = f" with a staleness of at most {self.policy.max_staleness}" if self.policy.mode == "bounded" else ""
        served = []
        for rank, server in enumerate(self.servers):
            pushes = format_count(server.pushes, "gradient")
            received = f"{server.received / 1e6:.1f}"
            sent = f"{server.sent / 1e6:.1f}"
            served.append(f"rank {rank}: {pushes}, {received} MB received, {sent} MB sent")
        shares = self.compute_staleness_shares()
        columns = [f"{age}: {share:.0%}" for age, share in shares.items() if share]
        if len(columns) > MAX_TABLE_STALENESS:
            columns[MAX_TABLE_STALENESS:] = ["..."]
        return {
            "mode": f"{self.policy.mode}{limit}, {format_count(self.policy.workers, 'worker')}, "
            f"{format_count(len(self.servers), 'server')}",
            "served": "  ".join(served),
            "staleness": f"mean {self.mean_staleness:.2f}, maximum {max(self.staleness, default=0)}  "
            f"({'  '.join(columns)})",
        }

    def result(self) -> ReportData:
        """Return the measurements for result.json."""
        measured: dict[str, Any] = {
            "pushes": [server.pushes for server in self.servers],
            "bytes_received": [server.received for server in self.servers],
            "bytes_sent_by_servers": [server.sent for server in self.servers],
            "staleness_counts": {str(age): count for age, count in sorted(self.staleness.items())},
            "staleness_mean": self.mean_staleness,
            "staleness_most": max(self.staleness, default=0),
        }
        return ReportData(measured=measured)
