"""Settings of ranks: hosts, devices, and how ranks communicate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from configs.ranges import at_least, between


@dataclass
class Launch:
    """Settings of ranks, hosts and devices."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes one GPU for each rank where there are enough, else the CPU."""
    backend: Literal["auto", "builtin"] = "auto"
    """How ranks communicate: auto is nccl on GPUs and gloo on CPUs; builtin is this project's own backend of
    torch.distributed, for CPUs (common/distributed/builtin)."""
    algorithm: str = "ring"
    """How builtin adds up tensors over all ranks: ring, halving_doubling, tree, star, sharded_star, two_level (as few
    bytes as possible between hosts); several by size, such as tree<65536<ring: from 65,536 bytes on the ring; auto
    measures the links once and chooses such ones, which then stand in config.yaml (with more than 256 ranks without
    ring and sharded_star, whose moves are then too many to compare); or FILE.py:function, whose function(ranks)
    returns for each rank a list of ('send', 'receive' or 'add', chunk, peer).
    `python -m common.distributed.transport.algorithms` draws one."""
    transport: Literal["auto", "network"] = "auto"
    """What builtin sends through between ranks of one host: auto is its memory, network is sockets."""
    tls: bool = False
    """Whether what builtin sends through sockets is encrypted: TLS 1.3 between ranks that show the certificate of this
    attempt, which the openssl program makes. The hosts must share the run folder, through which ranks then meet."""
    mixed: bool = False
    """Whether ranks on GPUs and ranks on CPUs train together: on each host the first ranks take its GPUs, one each, and
    the others the CPU. gloo carries everything, through host memory; it also joins GPUs of different vendors."""
    nodes: int = at_least(1, 1)
    """Number of hosts. On one machine its ranks are divided among as many simulated ones."""
    threads: int = between(0, 1024, 0)
    """CPU threads of each rank; 0 takes what SLURM gave each rank, else allowed cores / local ranks."""
    interface: str = ""
    """Network interface between hosts; empty takes the one that leads to the first rank."""
    setup_timeout: float = between(1, 3600, 60)
    """Seconds until every rank must have arrived, also one that an elastic run has started again."""
    step_timeout: float = between(1, 3600, 120)
    """Seconds that one message or collective may take once training runs. A data worker may take half of that for a
    block of batches."""

    @property
    def on_cpu(self) -> bool:
        """Return whether the settings leave GPUs out."""
        return self.device == "cpu" or self.backend == "builtin"

    def check(self) -> None:
        """Raise ValueError for settings of one backend that are given with another one."""
        if self.backend == "builtin" and self.device == "cuda":
            raise ValueError("launch.backend=builtin is for CPUs; leave launch.device=cuda out, or use nccl by auto")
        if self.mixed and (self.device != "auto" or self.backend != "auto"):
            other = f"launch.device={self.device}" if self.device != "auto" else f"launch.backend={self.backend}"
            raise ValueError(f"launch.mixed=true chooses devices, and gloo to join them; leave {other} out")
        own = {"algorithm": "ring", "transport": "auto", "tls": False}
        given = [name for name, usual in own.items() if getattr(self, name) != usual]
        if self.backend != "builtin" and given:
            value = str(getattr(self, given[0])).replace("True", "true")
            raise ValueError(f"launch.{given[0]}={value} is for launch.backend=builtin; add that, or leave it out")
