"""Settings of experiments/amp_accum.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from configs.batch_plan import BatchPlan
from configs.dataparallel import Sharded
from configs.elastic import ElasticRanks
from configs.optional import Sweep
from configs.shared import at_least, between


@dataclass
class Config(Sweep, ElasticRanks, Sharded):
    """Settings of mixed precision and gradient accumulation."""

    model: Literal["mlp", "convnet", "resnet18", "resnet50"] = "convnet"
    """mlp has two hidden layers (784-128-64-10 on MNIST); convnet has two 3x3 convolutions; the ResNets have BatchNorm
    with statistics per rank and microbatch, so `accumulate` changes their result."""
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "bf16"
    """Precision of matrix products and convolutions. bf16 and fp16 use autocast with float32 parameters; fp16 also
    scales the loss. tf32 is float32 with products rounded by NVIDIA GPUs; on a CPU it equals fp32."""
    accumulate: int = at_least(1, 4)
    """Microbatches per optimizer step. `batch` remains the global batch of a step: each rank processes
    batch / accumulate / ranks samples at a time. Only a partial microbatch at the end of an epoch is dropped; if the
    number of microbatches in an epoch is not a multiple of this value, its last step has fewer."""
    no_sync: bool = True
    """All-reduce gradients once per step instead of after every microbatch. Both give the same result."""
    channels_last: bool = False
    """Store images and filters in the channels_last memory format, which speeds up convolutions."""
    compile: bool = False
    """Compile the model (torch.compile). Needs a C++ compiler and up to a minute before the first step."""
    clip: float = between(0, 1e6, 0)
    """Maximum gradient norm (Euclidean, over all parameters, whole batch, unscaled); 0 disables clipping."""
    init_scale: float = between(1e-3, 1e9, 65536)
    """fp16: initial loss scale; it is halved when a gradient overflows (arXiv 1710.03740)."""
    growth_interval: int = at_least(1, 2000)
    """fp16: consecutive steps without overflow after which the scale is doubled."""

    @property
    def batch_plan(self) -> BatchPlan:
        return BatchPlan(self.batch, self.processes, self.accumulate, self.parse_shards())

    def check(self) -> None:
        super().check()
        if self.dtype == "float64" and self.precision in ("bf16", "fp16"):
            raise ValueError(f"dtype=float64: precision={self.precision} rounds float32 only; use precision=fp32")
        if self.model == "mlp" and self.channels_last:
            raise ValueError("channels_last=true: model=mlp has no convolutions; use model=convnet")
        if self.shards == ["auto"] and not self.no_sync:
            raise ValueError(
                "shards=auto cannot measure the speed of a rank with no_sync=false, where ranks wait for each other "
                "within a step; set shards explicitly, such as shards=[3,1], or omit no_sync=false"
            )
