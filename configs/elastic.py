"""Settings for elastic runs, which continue training after losing a rank."""

from __future__ import annotations

from dataclasses import dataclass, field

from configs.optional import RanksPerNode
from configs.ranges import at_least, between

SUPERVISOR = "common.techniques.elastic.supervisor:open_local_supervisor"
"""Import path of the function that opens the supervisor of local ranks."""
RECOVERY = "common.techniques.elastic.recovery:ElasticRecovery"
"""Import path of the hook with which each rank recovers from the loss of a rank."""


@dataclass
class Elastic:
    """Settings for elastic runs. `elastic=true` is short for `elastic.on=true`."""

    on: bool = False
    """Continue without a restart when a rank is killed, a rank stops responding, or a host fails. The remaining ranks
    repeat the interrupted step and take over the lost rank's shard of the batch. The losses are the same as those of an
    uninterrupted run, up to rounding. Elastic runs are limited to ranks on CPUs. A rank that alone
    holds a part of the training state, such as a shard of the parameters, cannot be lost."""
    timeout: float = between(0.2, 600, 3)
    """Seconds without a heartbeat after which a rank is considered lost. A separate thread sends the heartbeats, so
    slow steps, evaluations and checkpoints do not interrupt them. A killed rank is detected immediately."""
    min: int = at_least(1, 1)
    """Minimum number of ranks. If fewer ranks remain, the remaining ranks save a checkpoint and exit with status 75.
    The run can then be resumed with all ranks."""
    rejoin: int = at_least(0, 3)
    """Maximum number of restarts per lost rank. A restarted rank joins between two steps with a copy of another rank's
    state."""
    spares: int = between(0, 64, 0)
    """Number of spare hosts that a SLURM job requests to replace lost hosts. Local runs have no spare hosts."""


@dataclass
class ElasticRanks(RanksPerNode):
    """Settings for experiments that can continue after losing any rank that holds no unique state."""

    elastic: Elastic = field(default_factory=Elastic)

    def check(self) -> None:
        super().check()
        if not self.elastic.on:
            return
        ranks = self.processes
        if ranks < 2:
            raise ValueError("elastic=true requires at least two ranks; use processes_per_node=2 or elastic=false")
        if self.elastic.min > ranks:
            raise ValueError(
                f"elastic.min={self.elastic.min} exceeds the {ranks} ranks of the run; use at most elastic.min={ranks}"
            )
        if getattr(self, "shards", []) == ["auto"]:
            raise ValueError(
                "elastic=true cannot be combined with shards=auto, because elastic runs adjust the shards themselves; "
                "omit shards=auto, or set explicit shards, such as shards=[3,1]"
            )
        if self.launch.device == "cuda":
            raise ValueError(
                "elastic=true is not available on GPUs, where ranks cannot continue after another rank is lost; "
                "use launch.device=cpu"
            )
        if self.launch.backend == "builtin":
            raise ValueError("elastic=true requires the gloo backend; omit launch.backend=builtin")


def get_enabled_elastic_settings(cfg: object) -> Elastic | None:
    """Return the elastic settings of a config, or None if the run is not elastic."""
    settings = getattr(cfg, "elastic", None)
    return settings if isinstance(settings, Elastic) and settings.on else None
