"""Settings of experiments/ddp_multinode.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from configs.dataparallel import DataParallel, Sharded
from configs.elastic import ElasticRanks
from configs.shared import at_least, between


@dataclass
class Config(ElasticRanks, Sharded, DataParallel):
    """Settings of DDP and FSDP2."""

    strategy: Literal["ddp", "fsdp"] = "ddp"
    """ddp keeps the whole model on every rank; fsdp (fully_shard) shards every parameter over the ranks."""
    communication: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    """Gradient compression of ddp: none, half precision, or a product of two low-rank matrices (arXiv 1905.13727)."""
    powersgd_rank: int = at_least(1, 2, only="communication=powersgd")
    """Rank of the PowerSGD matrices. PowerSGD starts after ten steps."""
    bucket_mb: float = between(0.01, 10_000, 25)
    """Size of the gradient buckets of ddp in MB. A bucket is sent as soon as backward has filled it."""
    gradient_as_bucket_view: bool = True
    """Let gradients be views of the buckets of ddp, which saves a copy and its memory."""
    static_graph: bool = False
    """Declare to ddp that every step uses the same parameters in the same order."""
    find_unused_parameters: bool = False
    """Let ddp search every step for parameters without a gradient. Costs time; only for models that skip parameters."""
    clip: float = between(0, 1e6, 0)
    """Maximum gradient norm (Euclidean, over all parameters, whole batch); 0 disables clipping."""
    compare: bool = False
    """After training, time the same step in a single process and report the parallel efficiency."""

    def check(self) -> None:
        super().check()
        is_fsdp = self.strategy == "fsdp"
        if self.elastic.on and (is_fsdp or self.communication == "powersgd"):
            setting = "strategy=fsdp" if is_fsdp else "communication=powersgd"
            raise ValueError(f"elastic=true: with {setting} a lost rank loses part of the state; omit {setting}")
        if is_fsdp:
            self.check_fsdp()
        if self.shards == ["auto"] and (is_fsdp or self.sync_batchnorm):
            setting = "strategy=fsdp" if is_fsdp else "sync_batchnorm=true"
            raise ValueError(
                f"shards=auto cannot measure the speed of a rank with {setting}, where ranks wait for each other "
                f"within a step; set shards explicitly, such as shards=[3,1], or omit {setting}"
            )

    def check_fsdp(self) -> None:
        """Raise ValueError for settings that fully_shard does not support."""
        ddp_settings = {
            "static_graph": self.static_graph,
            "find_unused_parameters": self.find_unused_parameters,
            "communication": self.communication != "none",
        }
        for name, is_set in ddp_settings.items():
            if is_set:
                raise ValueError(f"{name} is a setting of ddp; use strategy=ddp or omit it")
        if self.launch.mixed:
            raise ValueError("launch.mixed=true: strategy=fsdp needs devices of one kind; use strategy=ddp")
