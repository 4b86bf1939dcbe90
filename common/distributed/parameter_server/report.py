"""Report of a parameter server: pushes, bytes and staleness at each server, in this attempt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from common.core.text import format_count
from common.distributed.parameter_server.server import Policy, Server
from common.distributed.rendezvous import World
from common.runs.result import Facts

SHOWN = 8  # values of staleness in the table


class Served(NamedTuple):
    """Counts of what one server has served."""

    pushes: int
    received: int
    """Bytes of gradients, those of the server's own rank included, which need no message."""
    sent: int
    """Bytes of parameters, likewise."""
    staleness: dict[str, int]
    """Pushes by their staleness, which is text as between ranks all keys are."""


def gather_served(world: World, server: Server | None) -> list[Served]:
    """Return on rank 0 what each server has served; all ranks call it."""
    own = None
    if server is not None:
        size, pushes = server.shard.values.nbytes, sum(server.staleness.values())
        own = Served(
            pushes, pushes * size, server.pulls * size, {str(age): count for age, count in server.staleness.items()}
        )._asdict()
    return [Served(**given) for given in world.gather(own) if given is not None]


class ServerReport:
    """Report of all servers of a run."""

    def __init__(self, policy: Policy, served: Sequence[Served]) -> None:
        self.policy, self.served = policy, served
        self.staleness: Counter[int] = Counter()
        for one in served:
            self.staleness.update({int(age): count for age, count in one.staleness.items()})

    @property
    def mean(self) -> float:
        """Mean staleness of a push."""
        return sum(age * count for age, count in self.staleness.items()) / max(1, self.staleness.total())

    def compute_shares(self) -> dict[int, float]:
        """Return the share of the pushes (0 to 1) with each staleness, from 0 to the highest."""
        return {age: self.staleness[age] / self.staleness.total() for age in range(max(self.staleness, default=-1) + 1)}

    def rows(self) -> Mapping[str, str]:
        """Return the rows of the final table."""
        policy, shares = self.policy, [(age, share) for age, share in self.compute_shares().items() if share]
        limit = f" with staleness of at most {policy.staleness}" if policy.mode == "bounded" else ""
        counts = f"{format_count(policy.workers, 'worker')}, {format_count(len(self.served), 'server')}"
        each = (
            f"rank {rank}: {format_count(one.pushes, 'gradient')}, {one.received / 1e6:.1f} MB in, "
            f"{one.sent / 1e6:.1f} MB out"
            for rank, one in enumerate(self.served)
        )
        listed = "  ".join(f"{age}: {share:.0%}" for age, share in shares[:SHOWN])
        more = "  ..." if len(shares) > SHOWN else ""
        return {
            "mode": f"{policy.mode}{limit}, {counts}",
            "served": "  ".join(each),
            "staleness": f"mean {self.mean:.2f}, most {max(self.staleness, default=0)}  ({listed}{more})",
        }

    def result(self) -> Facts:
        """Return what goes into result.json."""
        measured: dict[str, Any] = {
            "pushes": [one.pushes for one in self.served],
            "bytes_received": [one.received for one in self.served],
            "bytes_sent_by_servers": [one.sent for one in self.served],
            "staleness_counts": {str(age): count for age, count in sorted(self.staleness.items())},
            "staleness_mean": self.mean,
            "staleness_most": max(self.staleness, default=0),
        }
        return Facts(measured=measured)
