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
    """mlp has two hidden layers, on MNIST 784-128-64-10; convnet has two 3x3 convolutions; resnet18 has the CIFAR
    stem, and BatchNorm, whose statistics are those of one worker's share of the batch."""
    mode: Literal["sync", "async", "bounded"] = "sync"
    """sync applies the pushes of all workers together, and all wait for that; async applies each push when it comes,
    and a worker that is done takes the next share of the data; bounded is async within `staleness`."""
    staleness: int = at_least(0, 0, only="mode=bounded")
    """bounded: the largest staleness of a push, which is the number of versions of the parameters that a server makes
    between a worker's pull and the application of its push. At most staleness + 1 workers compute at a time: with 0
    one after the other."""
    servers: int = at_least(1, 1)
    """Ranks that serve a shard of the parameters each, the first ones; every rank is a worker."""
    damp: bool = False
    """Apply a push at the learning rate divided by its staleness (arXiv 1511.05950); with sync nothing is stale."""
    record: bool = False
    """At the end, write what each server has served, in its order, to served-<rank>.json in the attempt's folder."""
    compare: bool = False
    """After training, time the same steps with DDP on the same ranks, to compare the samples/s."""
    plot: bool = True
    """At the end, draw how often each staleness occurred."""

    def check(self) -> None:
        if self.servers > self.processes:  # before the batch: its remedy would suit the wrong number of ranks
            what = f"servers={self.servers}: a rank serves one shard at most, and there are {self.processes} ranks"
            raise ValueError(f"{what}; use at most servers={self.processes}")
        super().check()
        if self.damp and self.mode == "sync":
            raise ValueError("damp=true: with mode=sync no push is stale; leave it out, or use mode=async")
        if self.elastic.on:
            self.check_elastic()
        if self.optim.name not in ("sgd", "adam", "adamw") or self.optim.decayed != "all":
            what = f"optim.name={self.optim.name} with optim.decayed={self.optim.decayed}"
            raise ValueError(f"{what}: servers know no layers; use sgd, adam or adamw, and optim.decayed=all")
        if self.launch.device != "cpu":
            what = f"launch.device={self.launch.device}: messages come in no fixed order, for which nccl is not made"
            raise ValueError(f"{what}; use launch.device=cpu")

    def check_elastic(self) -> None:
        """Raise ValueError where the run could not go on without a rank."""
        if self.mode != "sync":
            what = f"elastic=true: mode={self.mode} has no undisturbed result that a run could equal"
            raise ValueError(f"{what}; use mode=sync, or leave elastic out")
        if self.servers == self.processes:
            what = f"elastic=true: every rank serves (servers={self.servers}), and no server may be lost"
            raise ValueError(f"{what}; use fewer servers or more ranks")
        wrong = [name for name in ("record", "compare") if getattr(self, name)]
        if wrong:
            raise ValueError(f"{wrong[0]}=true needs the same workers from start to end; leave it or elastic out")
