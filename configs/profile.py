"""Profiles of SLURM clusters: one YAML file a cluster in configs/cluster/."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from configs.shared import at_least, between


@dataclass
class Profile:
    """Settings of a cluster, and what a job asks for there."""

    partition: str = ""
    """Partition; empty takes the cluster's default. So for every empty value here."""
    account: str = ""
    """Account that is charged."""
    qos: str = ""
    """Quality of service."""
    constraint: str = ""
    """Features that the hosts must have."""
    exclude: str = ""
    """Hosts not to use, as in node[03-05]."""
    wckey: str = ""
    """Workload key; some sites refuse jobs that name one."""
    time: int = between(1, 525_600, 60)
    """Time limit in minutes."""
    memory_gb: float = between(0, 100_000, 0)
    """Memory of each host in GB; 0 asks for none."""
    cpus: int = at_least(1, 1)
    """Processors of each rank, its data workers included."""
    processes: int = at_least(0, 0)
    """Ranks on each host; 0 means one a GPU, or one where there are no GPUs."""
    gpus: int = at_least(0, 0)
    """GPUs of each host."""
    gpus_as: Literal["gpus-per-node", "gres"] = "gpus-per-node"
    """How this cluster wants GPUs to be asked for."""
    gpu_type: str = ""
    """Kind of GPU, as in a100."""
    requeue: bool = True
    """true: SLURM may start the job again after preemption or a host's failure."""
    signal_seconds: int = between(1, 3600, 240)
    """Seconds before the time limit at which the job gets a stop request."""
    setup: list[str] = field(default_factory=list)
    """Shell lines that run before the ranks start, as in [module load cuda]."""
    container: list[str] = field(default_factory=list)
    """Arguments for srun that start the ranks in a container, as in [--container-image=...]."""

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each host."""
        return self.processes or max(1, self.gpus)

    def check(self) -> None:
        """Raise ValueError where the values do not fit together."""
        if self.signal_seconds >= 60 * self.time:
            what = f"signal_seconds={self.signal_seconds} is no shorter than time={self.time} minutes"
            remedy = "raise time or lower signal_seconds"
            raise ValueError(f"{what}: the job would get a stop request as soon as it starts; {remedy}")
        if self.gpus and self.processes > self.gpus:
            raise ValueError(f"processes={self.processes} on a host with gpus={self.gpus}; each rank needs its own")
