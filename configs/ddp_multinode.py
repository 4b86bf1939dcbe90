"""Settings of experiments/ddp_multinode.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from configs.shared import Experiment, at_least, between, divisors


@dataclass
class Config(Experiment):
    model: Literal["convnet", "resnet18"] = "convnet"
    """convnet has two 3x3 convolutions; resnet18 is ResNet-18 with the CIFAR stem. Both take images of any set."""
    processes_per_node: int = at_least(0, 0)
    """Processes on each host; 0 means two on one host and one on each of several."""
    strategy: Literal["ddp", "fsdp"] = "ddp"
    """ddp keeps the whole model in every process; fsdp (fully_shard) keeps a share of every parameter."""
    sync_batchnorm: bool = False
    """Whether BatchNorm takes its statistics over the whole batch; else over each process's share."""
    communication: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    """What ddp makes of gradients on their way: nothing, half precision, or a product of two thin matrices."""
    powersgd_rank: int = at_least(1, 2)
    """Columns of PowerSGD's matrices; it begins after ten steps."""
    bucket_mb: float = between(0.01, 10_000, 25)
    """ddp sends gradients in pieces of so many MB, each as soon as backward has filled it."""
    gradient_as_bucket_view: bool = True
    """Whether gradients lie in ddp's buckets, which saves a copy and its memory."""
    static_graph: bool = False
    """Promise to ddp that every step uses the same parameters in the same way."""
    find_unused_parameters: bool = False
    """Let ddp look in every step for parameters without a gradient. Costs time; only for models that skip some."""
    clip: float = between(0, 1e6, 0)
    """Longest gradient (Euclidean norm over all parameters, of the whole batch); 0 clips nothing."""
    compare: bool = False
    """After training, time the same step in one process alone, and report the efficiency against it."""

    @property
    def processes(self) -> int:
        nodes = self.launch.nodes
        return nodes * (self.processes_per_node or (2 if nodes == 1 else 1))

    def check(self) -> None:
        super().check()
        if self.batch % self.processes:
            lower = self.batch // self.processes * self.processes
            sizes = [str(size) for size in (lower, lower + self.processes) if size]
            counts = [d for d in divisors(self.batch) if d % self.launch.nodes == 0]
            fewer = [d // self.launch.nodes for d in counts if d <= self.processes][-1:]
            hint = f", or processes_per_node={fewer[0]}" if fewer else ""
            raise ValueError(
                f"batch={self.batch} cannot be shared evenly by {self.processes} processes; "
                f"use batch={' or '.join(sizes)}{hint}"
            )
        if self.sync_batchnorm and self.model == "convnet":
            raise ValueError("sync_batchnorm=true: model=convnet has no BatchNorm; use model=resnet18")
        if self.strategy == "fsdp":
            wrong = [name for name in ("static_graph", "find_unused_parameters") if getattr(self, name)]
            wrong += ["communication"] if self.communication != "none" else []
            if wrong:
                raise ValueError(f"{wrong[0]} is a setting of ddp; use strategy=ddp or leave it out")
