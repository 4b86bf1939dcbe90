"""Settings of runs that go on without a rank that is lost."""

from __future__ import annotations

from dataclasses import dataclass, field

from configs.optional import RanksPerNode
from configs.ranges import at_least, between


@dataclass
class Elastic:
    """Settings of going on without a lost rank; `elastic=true` is short for elastic.on=true."""

    on: bool = False
    """Go on in flight when a rank is killed or does not answer, or its host is gone: the others do the step again, and
    take its shard of the batch. Losses stay those of the undisturbed run. Ranks on CPUs only; of a parameter server
    only those that serve no shard."""
    timeout: float = between(0.2, 600, 3)
    """Seconds without a heartbeat after which a rank is lost. Heartbeats come from a thread: a slow step, an evaluation
    or a checkpoint is no silence. A rank that is killed is noticed at once."""
    min: int = at_least(1, 1)
    """Fewest ranks to go on with; with fewer, the rest save and end with status 75, to be resumed with all."""
    rejoin: int = at_least(0, 3)
    """How often a lost rank is started again, to join between two steps with a copy of another rank's state."""
    spares: int = between(0, 64, 0)
    """Hosts that a job asks for beside those it needs, for ranks of a host that is lost; used by SLURM alone."""


@dataclass
class ElasticRanks(RanksPerNode):
    """Settings of ranks of which any may be lost, but those with a part of the state that no other one has."""

    elastic: Elastic = field(default_factory=Elastic)

    def check(self) -> None:
        super().check()
        if not self.elastic.on:
            return
        if self.processes < 2:
            what = "elastic=true needs at least two ranks: with a single one nobody is left to go on"
            raise ValueError(f"{what}; use processes_per_node=2, or elastic=false")
        if self.elastic.min > self.processes:
            what = f"elastic.min={self.elastic.min}, and the run has {self.processes} ranks"
            raise ValueError(f"{what}; use at most elastic.min={self.processes}")
        if getattr(self, "shards", []) == ["auto"]:
            raise ValueError("elastic=true changes shards itself; leave shards=auto out, or write them: shards=[3,1]")
        if self.launch.device == "cuda":
            raise ValueError("elastic=true: ranks on GPUs cannot go on without each other; use launch.device=cpu")
        if self.launch.backend == "builtin":
            raise ValueError("elastic=true is for the backend gloo; leave launch.backend=builtin out")


def find_elastic(cfg: object) -> Elastic | None:
    """Return the elastic settings of an experiment's config; None where it has none, or they are off."""
    found = getattr(cfg, "elastic", None)
    return found if isinstance(found, Elastic) and found.on else None
