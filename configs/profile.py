"""Profiles of SLURM clusters: one YAML file per cluster in configs/cluster/."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from configs.shared import at_least, between


@dataclass
class Profile:
    """Settings of a cluster and of the resources that a job requests."""

    partition: str = ""
    """Partition. Empty uses the default of the cluster, as for every empty value below."""
    account: str = ""
    """Account that is charged."""
    qos: str = ""
    """Quality of service."""
    constraint: str = ""
    """Required features of the hosts."""
    exclude: str = ""
    """Hosts to exclude, as in node[03-05]."""
    wckey: str = ""
    """Workload characterization key. Some sites reject jobs that set one."""
    time: int = between(1, 525_600, 60)
    """Time limit in minutes."""
    memory_gb: float = between(0, 100_000, 0)
    """Memory per host in GB; 0 requests none."""
    cpus: int = at_least(1, 1)
    """CPUs per rank, including its data workers."""
    processes: int = at_least(0, 0)
    """Ranks per host; 0 uses one per GPU, or one on hosts without GPUs."""
    gpus: int = at_least(0, 0)
    """GPUs per host."""
    gpus_as: Literal["gpus-per-node", "gres"] = "gpus-per-node"
    """SLURM option with which this cluster requests GPUs."""
    gpu_type: str = ""
    """GPU type, as in a100."""
    requeue: bool = True
    """Allow SLURM to requeue the job after preemption or a node failure."""
    signal_seconds: int = between(1, 3600, 240)
    """Seconds before the time limit at which the job receives a stop request."""
    setup: list[str] = field(default_factory=list)
    """Shell commands that run before the ranks start, as in [module load cuda]."""
    container: list[str] = field(default_factory=list)
    """srun arguments that start the ranks in a container, as in [--container-image=...]."""

    @property
    def ranks_per_node(self) -> int:
        """Ranks per host."""
        return self.processes or max(1, self.gpus)

    def check(self) -> None:
        """Raise ValueError for incompatible values."""
        if self.signal_seconds >= 60 * self.time:
            problem = f"signal_seconds={self.signal_seconds} is not shorter than time={self.time} minutes"
            raise ValueError(
                f"{problem}: the job would receive a stop request at its start; raise time or lower signal_seconds"
            )
        if self.gpus and self.processes > self.gpus:
            raise ValueError(f"processes={self.processes} exceeds gpus={self.gpus} per host; each rank needs one GPU")
