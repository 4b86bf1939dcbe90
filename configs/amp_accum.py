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
    """mlp has two hidden layers, on MNIST 784-128-64-10; convnet has two 3x3 convolutions; the ResNets have
    BatchNorm, whose statistics are those of one process's microbatch: there `accumulate` changes the result."""
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "bf16"
    """What products of matrices and convolutions are computed in. bf16 and fp16: autocast, parameters stay float32;
    fp16 scales the loss. tf32: float32 with products rounded by NVIDIA GPUs; on a CPU it is fp32."""
    accumulate: int = at_least(1, 4)
    """Microbatches of one optimizer step. `batch` stays the step's global batch: each rank works on
    batch / accumulate / ranks samples at a time. An epoch leaves out less than one microbatch; if its number of
    microbatches is no multiple of this, its last step has fewer."""
    no_sync: bool = True
    """Whether ranks all-reduce gradients once a step; else after every microbatch. Both give the same step."""
    channels_last: bool = False
    """Keep images and filters with the colours of a pixel side by side, as fast convolutions want them."""
    compile: bool = False
    """Compile the model (torch.compile); needs a C++ compiler, and up to a minute before the first step."""
    clip: float = between(0, 1e6, 0)
    """Longest gradient (Euclidean norm over all parameters, of the whole batch, unscaled); 0 clips nothing."""
    init_scale: float = between(1e-3, 1e9, 65536)
    """fp16: the loss scale at first; halved whenever a gradient overflows (arXiv 1710.03740)."""
    growth_interval: int = at_least(1, 2000)
    """fp16: steps in a row without overflow after which the scale is doubled."""

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
            what = (
                "shards=auto measures how fast each rank is, and with no_sync=false they wait for each other in between"
            )
            raise ValueError(f"{what}; write the shards, such as shards=[3,1], or leave no_sync=false out")
