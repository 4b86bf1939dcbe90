"""Settings of elastic runs, which continue without a lost rank."""

from __future__ import annotations

from dataclasses import dataclass, field

from configs.optional import RanksPerNode
from configs.ranges import at_least, between


@dataclass
class Elastic:
    """Settings of elastic runs; `elastic=true` is short for elastic.on=true."""

    on: bool = False
    """Continue without a restart when a rank is killed, stops responding or its host fails: the remaining ranks repeat
    the step and take over its shard of the batch. Losses equal those of an undisturbed run. For ranks on CPUs only; a
    parameter server can only lose ranks that serve no shard."""
    timeout: float = between(0.2, 600, 3)
    """Seconds without a heartbeat after which a rank counts as lost. A thread sends the heartbeats, so a slow step, an
    evaluation or a checkpoint does not interrupt them. A killed rank is detected immediately."""
    min: int = at_least(1, 1)
    """Minimum number of ranks. With fewer, the remaining ranks save and exit with status 75, to be resumed with all."""
    rejoin: int = at_least(0, 3)
    """How many times a lost rank is restarted. It joins between two steps with a copy of another rank's state."""
    spares: int = between(0, 64, 0)
    """Additional hosts that a SLURM job requests to replace lost hosts. Local runs ignore it."""


@dataclass
class ElasticRanks(RanksPerNode):
    """Settings of experiments that can lose any rank without unique state."""

    elastic: Elastic = field(default_factory=Elastic)

    def check(self) -> None:
        super().check()
        if not self.elastic.on:
            return
        ranks = self.processes
        if ranks < 2:
            raise ValueError("elastic=true needs at least two ranks; use processes_per_node=2 or elastic=false")
        if self.elastic.min > ranks:
            raise ValueError(
                f"elastic.min={self.elastic.min} exceeds the {ranks} ranks of the run; use at most elastic.min={ranks}"
            )
        if getattr(self, "shards", []) == ["auto"]:
            raise ValueError("elastic=true changes shards itself; omit shards=auto or set them, such as shards=[3,1]")
        if self.launch.device == "cuda":
            raise ValueError("elastic=true: ranks on GPUs cannot continue without a lost rank; use launch.device=cpu")
        if self.launch.backend == "builtin":
            raise ValueError("elastic=true needs the gloo backend; omit launch.backend=builtin")


def find_elastic(cfg: object) -> Elastic | None:
    """Return the elastic settings of an experiment's config; None if it has none or they are off."""
    settings = getattr(cfg, "elastic", None)
    return settings if isinstance(settings, Elastic) and settings.on else None
