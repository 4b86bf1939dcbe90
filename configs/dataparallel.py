"""Settings for data parallelism: every rank trains the same model on its own shard of each batch."""

from __future__ import annotations

from dataclasses import dataclass, field

from configs.batch_plan import BatchPlan, format_nearest_multiples, list_divisors
from configs.fields import at_least, between, find_group, flat
from configs.shared import Launch, TrainingExperiment

SUPERVISOR = "common.techniques.elastic.supervisor:open_local_supervisor"
"""Import path of the function that opens the supervisor of local ranks."""
RECOVERY = "common.techniques.elastic.recovery:ElasticRecovery"
"""Import path of the hook with which each rank recovers from the loss of a rank."""


@dataclass(frozen=True)
class RanksPerNode:
    """Setting for experiments with the same number of ranks on each host."""

    processes_per_node: int = at_least(0, 0)
    """Number of ranks per host. 0 uses the number in the cluster profile, or the number that torchrun or srun started.
    Without a cluster profile and without torchrun or srun, 0 means two ranks on a single host, or one rank on each of
    several hosts."""

    @property
    def is_set(self) -> bool:
        """Whether the settings determine the number of ranks, so that no launcher or cluster profile can."""
        return self.processes_per_node != 0

    def count_ranks(self, nodes: int) -> int:
        """Return the number of ranks over all hosts."""
        default = 2 if nodes == 1 else 1
        return nodes * (self.processes_per_node or default)


@dataclass(frozen=True)
class Replicated(TrainingExperiment):
    """Settings for experiments in which all ranks train the same model."""

    ranks: RanksPerNode = flat(RanksPerNode)

    @property
    def processes(self) -> int:
        return self.ranks.count_ranks(self.launch.nodes)

    def check(self) -> None:
        super().check()
        ranks = self.processes
        microbatches = self.batch_plan.microbatches
        if self.batch_plan.weights or self.batch % (ranks * microbatches) == 0:
            return  # unequal shards can divide a batch of any size
        problem = f"batch={self.batch} cannot be divided evenly among {ranks} ranks"
        remedy = f"use batch={format_nearest_multiples(self.batch, ranks * microbatches)}"
        if microbatches > 1:
            raise ValueError(f"{problem} with accumulate={microbatches} microbatches; {remedy}")
        nodes = self.launch.nodes
        smaller_counts = [count for count in list_divisors(self.batch) if count % nodes == 0 and count <= ranks]
        if smaller_counts:
            remedy += f", or processes_per_node={smaller_counts[-1] // nodes}"
        raise ValueError(f"{problem}; {remedy}")


@dataclass(frozen=True)
class Sharding:
    """Setting for experiments whose ranks may differ in speed or in device type."""

    shards: list[str] = field(default_factory=lambda: ["equal"])
    """Division of each batch among the ranks. equal gives every rank the same number of samples. A list of integer
    weights, one per rank, such as [3,1], sets the shares explicitly; a rank with weight 0 gets no samples. auto chooses
    the shares by measuring the speed of each rank before the first step and during training. In all cases, the training
    result is the same as that of a single process."""

    def parse_weights(self, ranks: int) -> tuple[int, ...]:
        """Return the initial relative shard sizes of the ranks, or () for equal shards.

        Raises ValueError if `shards` is invalid.
        """
        text = ",".join(self.shards)
        if text == "equal":
            return ()
        if text == "auto":
            return (1,) * ranks
        if not self.shards or not all(weight.isdecimal() and len(weight) < 10 for weight in self.shards):
            raise ValueError(f"shards=[{text}] must be equal, auto, or one integer >= 0 per rank, such as [3,1]")
        if len(self.shards) != ranks:
            example = ",".join(["3", *["1"] * (ranks - 1)])
            raise ValueError(
                f"shards=[{text}] has length {len(self.shards)}, but there are {ranks} ranks; "
                f"specify one weight per rank, such as [{example}]"
            )
        weights = tuple(map(int, self.shards))
        if not any(weights):
            raise ValueError(f"shards=[{text}] assigns no samples to any rank; at least one weight must be positive")
        return weights

    def check(self, plan: BatchPlan) -> None:
        """Raise ValueError if a batch cannot be divided according to `shards`."""
        if plan.batch % plan.microbatches:
            remedy = f"use batch={format_nearest_multiples(plan.batch, plan.microbatches)}"
            raise ValueError(f"batch={plan.batch} is not divisible by accumulate={plan.microbatches}; {remedy}")
        min_batch = plan.replicas * plan.microbatches
        if self.shards == ["auto"] and plan.batch < min_batch:
            raise ValueError(
                f"shards=auto requires at least one sample per rank in each microbatch (batch={plan.batch}); "
                f"set batch to at least {min_batch} or use fewer ranks"
            )


@dataclass(frozen=True)
class Elastic:
    """Settings for elastic runs. `elastic=true` is short for `elastic.on=true`."""

    on: bool = False
    """Continue without a restart when a rank is killed, a rank stops responding, or a host fails. The remaining ranks
    repeat the interrupted step and take over the lost rank's shard of the batch. The losses are the same as those of an
    uninterrupted run, up to rounding. Elastic runs are limited to ranks on CPUs. A rank that alone holds a part of
    the training state, such as a shard of the parameters, cannot be lost."""
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

    def check(self, ranks: int, launch: Launch, sharding: Sharding | None = None) -> None:
        """Raise ValueError if a run with these ranks cannot be elastic."""
        if not self.on:
            return
        if ranks < 2:
            raise ValueError("elastic=true requires at least two ranks; use processes_per_node=2 or elastic=false")
        if self.min > ranks:
            raise ValueError(
                f"elastic.min={self.min} exceeds the {ranks} ranks of the run; use at most elastic.min={ranks}"
            )
        if sharding is not None and sharding.shards == ["auto"]:
            raise ValueError(
                "elastic=true cannot be combined with shards=auto, because elastic runs adjust the shards themselves; "
                "omit shards=auto, or set explicit shards, such as shards=[3,1]"
            )
        if launch.device == "cuda" or launch.mixed:
            remedy = "omit launch.mixed=true" if launch.mixed else "use launch.device=cpu"
            raise ValueError(
                "elastic=true is not available on GPUs, where ranks cannot continue after another rank is lost; "
                f"{remedy}"
            )
        if launch.backend == "builtin":
            raise ValueError("elastic=true requires the gloo backend; omit launch.backend=builtin")


def get_enabled_elastic_settings(cfg: object) -> Elastic | None:
    """Return the elastic settings of a config, or None if the run is not elastic."""
    settings = find_group(cfg, Elastic)
    return settings if settings is not None and settings.on else None


def count_spare_hosts(cfg: object) -> int:
    """Return the number of hosts that an elastic run requests in addition to its nodes; 0 for other runs."""
    settings = get_enabled_elastic_settings(cfg)
    return settings.spares if settings is not None else 0


def check_sync_batchnorm(sync_batchnorm: bool, model: str) -> None:
    """Raise ValueError if BatchNorm is to be synchronized in a network without BatchNorm layers."""
    if sync_batchnorm and model in ("mlp", "convnet"):
        raise ValueError(
            f"sync_batchnorm=true requires BatchNorm layers, but model={model} has none; use sync_batchnorm=false, or "
            "model=resnet18"
        )
