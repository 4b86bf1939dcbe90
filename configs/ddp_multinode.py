"""Settings for experiments/ddp_multinode.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from configs.dataparallel import DataParallel, Sharded
from configs.elastic import ElasticRanks
from configs.shared import at_least, between


@dataclass
class Config(ElasticRanks, Sharded, DataParallel):
    """Settings for training with DDP or FSDP2."""

    smallest_settings: ClassVar[tuple[str, ...]] = ("batch=16", "optim.base_batch=16", "optim.warmup=0")

    strategy: Literal["ddp", "fsdp"] = "ddp"
    """ddp keeps the whole model on every rank; fsdp (fully_shard) shards every parameter across the ranks."""
    communication: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    """Compression of the gradients that DDP all-reduces. fp16 and bf16 send gradients in half precision; powersgd sends
    two low-rank matrices whose product approximates a gradient (arXiv 1905.13727)."""
    powersgd_rank: int = at_least(1, 2, only="communication=powersgd")
    """Rank of PowerSGD's low-rank matrices. Compression starts after ten steps."""
    bucket_mb: float = between(0.01, 10_000, 25)
    """Size of DDP's gradient buckets in MB. A bucket is all-reduced as soon as the backward pass has filled the
    bucket."""
    gradient_as_bucket_view: bool = True
    """Use views of DDP's buckets as gradients, which saves memory and a copy."""
    static_graph: bool = False
    """Declare to DDP that every step uses the same parameters in the same order."""
    find_unused_parameters: bool = False
    """In every step, let DDP search for parameters that get no gradient. The search takes time. Only models that do not
    use all of their parameters in every step need the search."""
    clip: float = between(0, 1e6, 0)
    """Maximum gradient norm; 0 disables clipping. The norm is the Euclidean norm over the gradients of all parameters,
    for the whole batch."""
    compare: bool = False
    """After training, time the same step in a single process and report the parallel efficiency."""

    def check(self) -> None:
        super().check()
        is_fsdp = self.strategy == "fsdp"
        if self.elastic.on and (is_fsdp or self.communication == "powersgd"):
            setting = "strategy=fsdp" if is_fsdp else "communication=powersgd"
            raise ValueError(
                f"elastic=true cannot be combined with {setting}, because losing a rank would lose part of the state; "
                f"omit {setting}"
            )
        if is_fsdp:
            self.check_fsdp()
        if self.shards == ["auto"] and (is_fsdp or self.sync_batchnorm):
            setting = "strategy=fsdp" if is_fsdp else "sync_batchnorm=true"
            raise ValueError(
                f"shards=auto cannot measure the speed of each rank with {setting}, because ranks then wait for each "
                f"other within a step; set shards explicitly, such as shards=[3,1], or omit {setting}"
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
                raise ValueError(f"{name} applies to DDP only; use strategy=ddp or omit {name}")
        if self.launch.mixed:
            raise ValueError(
                "launch.mixed=true cannot be combined with strategy=fsdp, which requires devices of one type; "
                "use strategy=ddp"
            )
