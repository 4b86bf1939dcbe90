"""Settings for experiments/amp_accum.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from configs.batch_plan import BatchPlan
from configs.dataparallel import Elastic, Replicated, Sharding
from configs.fields import at_least, between, flat
from configs.networks import network_field
from configs.shared import Regularization, Sweep


@dataclass(frozen=True)
class Config(Replicated):
    """Settings for training with mixed precision and gradient accumulation."""

    can_mix_devices: ClassVar[bool] = True
    smallest_settings: ClassVar[tuple[str, ...]] = ("batch=16", "optim.base_batch=16", "optim.warmup=0")

    model: str = network_field("convnet", "mlp", "convnet", "resnet18", "resnet50")
    """Network to train. mlp has two hidden layers (784-128-64-10 on MNIST); convnet has two 3x3 convolutions. The
    ResNets contain BatchNorm, which computes statistics per rank and microbatch, so `accumulate` changes their
    results. FILE.py:Class is a custom network."""
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "bf16"
    """Numeric precision of matrix products and convolutions. bf16 and fp16 use autocast with float32 parameters; fp16
    also scales the loss. tf32 stores tensors in float32 but lets NVIDIA GPUs compute products in TF32. On a CPU, tf32
    is the same as fp32."""
    accumulate: int = at_least(1, 4)
    """Number of microbatches per optimizer step. `batch` is the global batch size of a step, so each rank processes
    batch / accumulate / ranks samples at a time. At the end of an epoch, only a partial microbatch is dropped. If the
    number of microbatches in an epoch is not a multiple of `accumulate`, the last step of the epoch has fewer
    microbatches."""
    no_sync: bool = True
    """All-reduce gradients once per step instead of after every microbatch. Both values of no_sync give the same
    result."""
    channels_last: bool = False
    """Store images and filters in the channels_last memory format, which can speed up convolutions."""
    compile: bool = False
    """Compile the model with torch.compile, which needs a C++ compiler and delays the first step by up to a minute."""
    init_scale: float = between(1e-3, 1e9, 65536)
    """Initial loss scale for precision=fp16. The scale is halved when a gradient overflows (arXiv 1710.03740)."""
    growth_interval: int = at_least(1, 2000)
    """Number of consecutive steps without overflow after which the loss scale is doubled, for precision=fp16."""
    regularization: Regularization = flat(Regularization)
    sharding: Sharding = flat(Sharding)
    elastic: Elastic = field(default_factory=Elastic)
    grid: Sweep = flat(Sweep)

    @property
    def batch_plan(self) -> BatchPlan:
        weights = self.sharding.parse_weights(self.processes)
        return BatchPlan(self.batch, self.processes, self.accumulate, weights)

    def check(self) -> None:
        super().check()
        self.sharding.check(self.batch_plan)
        self.elastic.check(self.processes, self.launch, self.sharding)
        if self.dtype == "float64" and self.precision in ("bf16", "fp16"):
            raise ValueError(
                f"dtype=float64 cannot be combined with precision={self.precision}, because autocast converts only "
                "float32 tensors; use precision=fp32"
            )
        if self.model == "mlp" and self.channels_last:
            raise ValueError("channels_last=true requires convolutions, but model=mlp has none; use model=convnet")
        if self.sharding.shards == ["auto"] and not self.no_sync:
            raise ValueError(
                "shards=auto cannot measure the speed of each rank with no_sync=false, because ranks then wait for "
                "each other within a step; set shards explicitly, such as shards=[3,1], or omit no_sync=false"
            )
