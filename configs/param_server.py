"""Settings of experiments/param_server.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from configs.dataparallel import Replicated
from configs.elastic import ElasticRanks
from configs.shared import at_least


@dataclass
class Config(ElasticRanks, Replicated):
    """Settings of the parameter server."""

    model: Literal["mlp", "convnet", "resnet18"] = "convnet"
    """mlp has two hidden layers (784-128-64-10 on MNIST); convnet has two 3x3 convolutions; resnet18 has the CIFAR stem
    and BatchNorm with statistics of one worker's share of the batch."""
    mode: Literal["sync", "async", "bounded"] = "sync"
    """sync applies the pushes of all workers together, and all workers wait for that; async applies each push on
    arrival, and a worker that has finished takes the next share of the data; bounded is async with a maximum
    `staleness`."""
    staleness: int = at_least(0, 0, only="mode=bounded")
    """bounded: maximum staleness of a push, the number of parameter versions that a server creates between a worker's
    pull and the application of its push. At most staleness + 1 workers compute at the same time; 0 makes them
    sequential."""
    servers: int = at_least(1, 1)
    """Number of ranks, beginning with rank 0, that serve one shard of the parameters each. Every rank is a worker."""
    damp: bool = False
    """Divide the learning rate of a push by its staleness (arXiv 1511.05950). Not available with sync."""
    record: bool = False
    """At the end, write the requests of each server, in order, to served-<rank>.json in the attempt folder."""
    compare: bool = False
    """After training, time the same steps with DDP on the same ranks to compare samples/s."""
    plot: bool = True
    """At the end, plot how often each staleness occurred."""

    def check(self) -> None:
        ranks = self.processes
        if self.servers > ranks:  # before the check of the batch, whose remedy assumes a valid number of ranks
            raise ValueError(
                f"servers={self.servers} exceeds the {ranks} ranks; a rank serves at most one shard; "
                f"use at most servers={ranks}"
            )
        super().check()
        if self.damp and self.mode == "sync":
            raise ValueError(
                "damp=true has no effect with mode=sync, where no push is stale; omit it or use mode=async"
            )
        if self.elastic.on:
            self.check_elastic()
        if self.optim.name not in ("sgd", "adam", "adamw") or self.optim.decayed != "all":
            raise ValueError(
                f"optim.name={self.optim.name} with optim.decayed={self.optim.decayed}: servers have no layers; "
                "use sgd, adam or adamw, and optim.decayed=all"
            )
        if self.launch.device != "cpu":
            raise ValueError(
                f"launch.device={self.launch.device}: messages have no fixed order, which nccl does not support; "
                "use launch.device=cpu"
            )

    def check_elastic(self) -> None:
        """Raise ValueError for settings with which the run cannot continue without a rank."""
        if self.mode != "sync":
            raise ValueError(
                f"elastic=true: results of mode={self.mode} are not reproducible; use mode=sync or omit elastic"
            )
        if self.servers == self.processes:
            raise ValueError(
                f"elastic=true: every rank is a server (servers={self.servers}), and no server may be lost; "
                "use fewer servers or more ranks"
            )
        for name in ("record", "compare"):
            if getattr(self, name):
                raise ValueError(f"{name}=true needs the same workers during the whole run; omit it or elastic")
