"""Settings for launching ranks: hosts, devices and communication."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from configs.ranges import at_least, between, custom_code

BACKEND_SETUPS = {"builtin": "common.backend.setup"}
"""Module that sets up each communication backend that torch does not contain; see common/ranks/backend_setup."""


@dataclass
class Launch:
    """Settings for the ranks of a run: hosts, devices and communication."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the ranks. auto uses one GPU per rank if there are enough GPUs, otherwise the CPU."""
    backend: Literal["auto", "builtin"] = "auto"
    """Communication backend. auto selects nccl on GPUs and gloo on CPUs. builtin is the torch.distributed backend for
    CPUs that this project implements (common/backend)."""
    algorithm: str = custom_code(
        "ring", "algorithm", "common.backend.algorithms:check_algorithm_of_config", rank_0_only=True
    )
    """All-reduce algorithm of the built-in backend: ring, halving_doubling, tree, star, sharded_star, or two_level
    (which sends the fewest bytes between hosts). Algorithms can be combined by message size: tree<65536<ring uses tree
    for small messages and ring for messages of at least 65,536 bytes. auto measures the links once, chooses such a
    combination and stores it in resolved.yaml. With more than 256 ranks, auto excludes ring and sharded_star, because
    these algorithms have too many transfers to simulate. FILE.py:function is a custom algorithm:
    function(ranks) returns one list per rank, which contains tuples (action, chunk, peer). The action is 'send',
    'receive' or 'add'.
    The command `python -m common.backend.algorithms` prints the transfers of an algorithm."""
    transport: Literal["auto", "network"] = "auto"
    """Transport of the built-in backend between ranks of the same host. auto uses shared memory; network uses
    sockets."""
    tls: bool = False
    """Encrypt the sockets of the built-in backend with TLS 1.3. Every rank must present the certificate of the current
    attempt, which is created with the openssl program. All hosts must share the run folder, because the ranks use it
    for the rendezvous."""
    mixed: bool = False
    """Train with ranks on GPUs and ranks on CPUs together. On each host, the first ranks get one GPU each, and the
    remaining ranks use the CPU. gloo communicates through host memory, so GPUs of different vendors can be combined."""
    nodes: int = at_least(1, 1)
    """Number of hosts. A run on a single machine simulates this number of hosts and divides the ranks among the
    simulated hosts."""
    threads: int = between(0, 1024, 0)
    """Number of CPU threads per rank. 0 uses the number of CPUs that SLURM assigned to the rank or, without SLURM, the
    number of allowed cores divided by the number of ranks on the host."""
    interface: str = ""
    """Network interface for communication between hosts. If no interface is set, hosts use the interface with the route
    to rank 0."""
    setup_timeout: float = between(1, 3600, 60)
    """Maximum seconds that a rank may take to connect. The limit also applies to ranks that an elastic run restarts."""
    step_timeout: float = between(1, 3600, 120)
    """Maximum duration of one message or collective during training, in seconds. A data worker may use half of
    launch.step_timeout to prepare a block of batches."""

    @property
    def excludes_gpus(self) -> bool:
        """Whether these settings exclude the use of GPUs."""
        return self.device == "cpu" or self.backend == "builtin"

    def check(self) -> None:
        """Raise ValueError for a combination of settings that no backend supports."""
        if self.backend == "builtin" and self.device == "cuda":
            raise ValueError(
                "launch.backend=builtin runs on CPUs only; omit launch.device=cuda, or omit launch.backend to use nccl"
            )
        if self.mixed and (self.device != "auto" or self.backend != "auto"):
            setting = f"launch.device={self.device}" if self.device != "auto" else f"launch.backend={self.backend}"
            raise ValueError(f"launch.mixed=true determines the devices and uses the gloo backend; omit {setting}")
        if self.backend == "builtin":
            return
        builtin_defaults = {"algorithm": "ring", "transport": "auto", "tls": False}
        for name, default in builtin_defaults.items():
            value = getattr(self, name)
            if value != default:
                setting = f"launch.{name}={str(value).replace('True', 'true')}"
                raise ValueError(f"{setting} requires launch.backend=builtin; add this setting or omit launch.{name}")
