"""Settings for experiments/param_server.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from configs.dataparallel import Elastic, Replicated
from configs.fields import at_least, flat
from configs.networks import network_field
from configs.shared import Regularization


@dataclass(frozen=True)
class Config(Replicated):
    """Settings for training with parameter servers."""

    smallest_settings: ClassVar[tuple[str, ...]] = ("batch=16", "optim.base_batch=16", "optim.warmup=0", "plot=false")

    model: str = network_field("convnet", "mlp", "convnet", "resnet18")
    """Network to train. mlp has two hidden layers (784-128-64-10 on MNIST); convnet has two 3x3 convolutions. resnet18
    has the CIFAR stem; its BatchNorm layers compute statistics over one worker's share of the batch. FILE.py:Class is a
    custom network."""
    mode: Literal["sync", "async", "bounded"] = "sync"
    """How servers apply the gradients that workers push. sync applies the pushes of all workers together, and all
    workers wait for this update. async applies each push on arrival, and a worker that has finished takes the next
    share of the data. bounded is async with a maximum `staleness`."""
    staleness: int = at_least(0, 0, only="mode=bounded")
    """Maximum staleness of a push with mode=bounded. Staleness is the number of parameter versions that a server
    creates between a worker's pull and the application of its push. At most staleness + 1 workers compute at the same
    time; with 0, workers compute one after another."""
    servers: int = at_least(1, 1)
    """Number of servers. The first `servers` ranks each serve one shard of the parameters. Every rank is also a
    worker."""
    damp: bool = False
    """Divide the learning rate of a push by its staleness (arXiv 1511.05950). `damp` is not available with
    mode=sync."""
    record: bool = False
    """At the end of the run, write the requests that each server processed, in order, to served-<rank>.json in the
    attempt folder."""
    compare: bool = False
    """After training, time the same steps with DDP on the same ranks, and report the samples/s of DDP."""
    plot: bool = True
    """At the end of the run, plot how often each staleness value occurred."""
    regularization: Regularization = flat(Regularization)
    elastic: Elastic = field(default_factory=Elastic)

    def check(self) -> None:
        ranks = self.processes
        # This check precedes the check of the batch size, whose remedy assumes a valid number of ranks.
        if self.servers > ranks:
            raise ValueError(
                f"servers={self.servers} exceeds the {ranks} ranks, and each rank serves at most one shard; "
                f"use at most servers={ranks}"
            )
        super().check()
        self.elastic.check(ranks, self.launch)
        if self.damp and self.mode == "sync":
            raise ValueError(
                "damp=true has no effect with mode=sync, because no push is stale; omit damp or use mode=async"
            )
        if self.elastic.on:
            self.check_elastic()
        if self.optim.name not in ("sgd", "adam", "adamw") or self.optim.decayed != "all":
            raise ValueError(
                f"optim.name={self.optim.name} with optim.decayed={self.optim.decayed} is not supported, because "
                "a server stores parameters as a vector without layers; use sgd, adam or adamw, and optim.decayed=all"
            )
        if self.launch.device != "cpu":
            raise ValueError(
                f"launch.device={self.launch.device} is not supported: messages arrive in any order, but nccl "
                "requires a fixed order; use launch.device=cpu"
            )

    def check_elastic(self) -> None:
        """Raise ValueError for settings that prevent the run from continuing after losing a rank."""
        if self.mode != "sync":
            raise ValueError(
                f"elastic=true needs reproducible results, which mode={self.mode} does not provide; "
                "use mode=sync or omit elastic"
            )
        if self.servers == self.processes:
            raise ValueError(
                f"elastic=true needs ranks that are not servers, but servers={self.servers} makes every rank a server; "
                "use fewer servers or more ranks"
            )
        if self.log.gradient_norm == "true" and not self.regularization.clip:
            raise ValueError(
                "elastic=true cannot log the mean gradient norm of the workers unless the servers clip gradients; "
                "omit log.gradient_norm or set clip"
            )
        for name in ("record", "compare"):
            if getattr(self, name):
                raise ValueError(f"{name}=true needs the same workers during the whole run; omit {name} or elastic")
