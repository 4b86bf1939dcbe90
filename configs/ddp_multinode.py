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
    """ddp keeps the whole model on every rank; fsdp (fully_shard) keeps a shard of every parameter."""
    communication: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    """How ddp sends gradients: as they are, in half precision, or as a product of thin matrices (arXiv 1905.13727)."""
    powersgd_rank: int = at_least(1, 2, only="communication=powersgd")
    """Columns of PowerSGD's matrices; it begins after ten steps."""
    bucket_mb: float = between(0.01, 10_000, 25)
    """Size in MB of the buckets in which ddp sends gradients, each as soon as backward has filled it."""
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

    def check(self) -> None:
        super().check()
        if self.elastic.on and (self.strategy == "fsdp" or self.communication == "powersgd"):
            own = "strategy=fsdp" if self.strategy == "fsdp" else "communication=powersgd"
            raise ValueError(f"elastic=true: with {own} a part of the state is lost with a rank; leave {own} out")
        if self.strategy == "fsdp":
            wrong = [name for name in ("static_graph", "find_unused_parameters") if getattr(self, name)]
            wrong += ["communication"] if self.communication != "none" else []
            if wrong:
                raise ValueError(f"{wrong[0]} is a setting of ddp; use strategy=ddp or leave it out")
            if self.launch.mixed:
                raise ValueError("launch.mixed=true: strategy=fsdp needs one kind of device; use strategy=ddp")
        meets = ["strategy=fsdp"] if self.strategy == "fsdp" else ["sync_batchnorm=true"] if self.sync_batchnorm else []
        if self.shards == ["auto"] and meets:
            what = (
                f"shards=auto measures how fast each rank is, and with {meets[0]} ranks wait for each other in between"
            )
            raise ValueError(f"{what}; write the shards, such as shards=[3,1], or leave {meets[0]} out")
