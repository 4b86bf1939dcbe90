"""Settings of ranks: hosts, devices, and how ranks communicate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from configs.ranges import at_least, between


@dataclass
class Launch:
    """Settings of ranks, hosts and devices."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the ranks. auto uses one GPU per rank if there are enough, otherwise the CPU."""
    backend: Literal["auto", "builtin"] = "auto"
    """Communication backend. auto is nccl on GPUs and gloo on CPUs; builtin is this project's own torch.distributed
    backend for CPUs (common/distributed/builtin)."""
    algorithm: str = "ring"
    """All-reduce algorithm of builtin: ring, halving_doubling, tree, star, sharded_star, or two_level (fewest bytes
    between hosts). Several can be combined by size: tree<65536<ring uses the ring from 65,536 bytes on. auto measures
    the links once, chooses such a combination and stores it in config.yaml (with more than 256 ranks without ring and
    sharded_star, whose transfers are too many to simulate). FILE.py:function is a custom algorithm: function(ranks)
    returns for each rank a list of ('send', 'receive' or 'add', chunk, peer).
    `python -m common.distributed.transport.algorithms` prints an algorithm."""
    transport: Literal["auto", "network"] = "auto"
    """Transport of builtin between ranks of one host. auto is shared memory; network is sockets."""
    tls: bool = False
    """Encrypt the sockets of builtin: TLS 1.3 between ranks that present the certificate of this attempt, which is
    created with the openssl program. The hosts must share the run folder; ranks use it for the rendezvous."""
    mixed: bool = False
    """Train with ranks on GPUs and ranks on CPUs together. On each host the first ranks get one GPU each and the others
    the CPU. gloo communicates through host memory, which also allows GPUs of different vendors."""
    nodes: int = at_least(1, 1)
    """Number of hosts. On a single machine the ranks are divided among this many simulated hosts."""
    threads: int = between(0, 1024, 0)
    """CPU threads per rank. 0 uses the CPUs that SLURM assigned to the rank, otherwise allowed cores / local ranks."""
    interface: str = ""
    """Network interface between hosts; empty uses the one with the route to the first rank."""
    setup_timeout: float = between(1, 3600, 60)
    """Seconds within which every rank must connect, including a rank that an elastic run has restarted."""
    step_timeout: float = between(1, 3600, 120)
    """Maximum seconds of one message or collective during training. A data worker may take half of that for a block of
    batches."""

    @property
    def on_cpu(self) -> bool:
        """Whether the settings exclude GPUs."""
        return self.device == "cpu" or self.backend == "builtin"

    def check(self) -> None:
        """Raise ValueError for combinations that no backend supports."""
        if self.backend == "builtin" and self.device == "cuda":
            raise ValueError(
                "launch.backend=builtin runs on CPUs only; omit launch.device=cuda, or launch.backend to use nccl"
            )
        if self.mixed and (self.device != "auto" or self.backend != "auto"):
            setting = f"launch.device={self.device}" if self.device != "auto" else f"launch.backend={self.backend}"
            raise ValueError(f"launch.mixed=true selects devices and the gloo backend itself; omit {setting}")
        if self.backend == "builtin":
            return
        builtin_defaults = {"algorithm": "ring", "transport": "auto", "tls": False}
        for name, default in builtin_defaults.items():
            value = getattr(self, name)
            if value != default:
                setting = f"launch.{name}={str(value).replace('True', 'true')}"
                raise ValueError(f"{setting} needs launch.backend=builtin; add that or omit launch.{name}")
