"""Profiles of SLURM clusters: one YAML file per cluster in configs/cluster/."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from configs.fields import at_least, between


@dataclass(frozen=True)
class Profile:
    """Settings for a SLURM cluster and for the resources that a job requests on it."""

    partition: str = ""
    """SLURM partition of the job. An empty value selects the default partition of the cluster."""
    account: str = ""
    """SLURM account that is charged for the job. An empty value selects the default account of the user."""
    qos: str = ""
    """SLURM quality of service (QOS) of the job. An empty value selects the default QOS."""
    constraint: str = ""
    """SLURM features that the hosts of the job must have."""
    exclude: str = ""
    """Hosts that the job must not use, such as node[03-05]."""
    wckey: str = ""
    """SLURM workload characterization key (WCKey). Some sites reject jobs that specify a key."""
    time: int = between(1, 525_600, 60)
    """Time limit of the job in minutes."""
    memory_gb: float = between(0, 100_000, 0)
    """Memory to request per host in GB; 0 omits the request."""
    cpus: int = at_least(1, 1)
    """Number of CPUs per rank, including those for the rank's data workers."""
    processes: int = at_least(0, 0)
    """Number of ranks per host. 0 uses one rank per GPU, or one rank on hosts without GPUs."""
    gpus: int = at_least(0, 0)
    """Number of GPUs to request per host."""
    gpus_as: Literal["gpus-per-node", "gres"] = "gpus-per-node"
    """SLURM option for requesting GPUs on this cluster."""
    gpu_type: str = ""
    """GPU type to request, such as a100. An empty value accepts any type."""
    requeue: bool = True
    """Allow SLURM to requeue the job after preemption or a node failure."""
    signal_seconds: int = between(1, 3600, 240)
    """Number of seconds before the time limit at which the job receives a stop request."""
    setup: list[str] = field(default_factory=list)
    """Shell commands that run before the ranks start, such as [module load cuda]."""
    container: list[str] = field(default_factory=list)
    """srun arguments that start the ranks in a container, such as [--container-image=...]."""

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks per host."""
        return self.processes or max(1, self.gpus)

    def check(self) -> None:
        """Raise ValueError if settings are incompatible."""
        if self.signal_seconds >= 60 * self.time:
            problem = f"signal_seconds={self.signal_seconds} must be less than time={self.time} minutes"
            raise ValueError(
                f"{problem}; otherwise, the job receives a stop request when it starts; "
                "raise time or lower signal_seconds"
            )
        if self.gpus and self.processes > self.gpus:
            raise ValueError(
                f"processes={self.processes} exceeds gpus={self.gpus} per host, but each rank needs one GPU; "
                "lower processes or raise gpus"
            )
