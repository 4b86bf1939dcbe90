"""Settings of experiments/resnet_dataparallel.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from configs.dataparallel import DataParallel
from configs.optional import Sweep
from configs.shared import at_least

ONE_DEVICE = "{} GPUs here: DataParallel only calls the model, as single does; to compare devices, use strategy=ddp"


@dataclass
class Config(Sweep, DataParallel):
    """Settings of nn.DataParallel, DDP and one device."""

    strategy: Literal["single", "data_parallel", "ddp"] = "ddp"
    """single is one process on one device; data_parallel is nn.DataParallel, one process that copies the model to all
    its GPUs in every step; ddp is DistributedDataParallel, one process a device."""
    functional: bool = False
    """Whether data_parallel calls the function nn.parallel.data_parallel; else it wraps the model in the class."""
    last_batch: Literal["keep", "drop"] = "keep"
    """What becomes of the last partial batch of an epoch, which may be smaller than the number of devices."""
    loss_every: int = at_least(1, 100)
    """Batches between two lines of the running loss."""
    compare: bool = True
    """After training on several devices, time the same step on one of them and with the other strategies, in turns.
    A sweep runs the strategies instead, each as a run of its own."""

    @property
    def processes(self) -> int:
        return super().processes if self.strategy == "ddp" else 1

    def check(self) -> None:
        if self.strategy != "ddp":
            wrong = [name for name in ("sync_batchnorm", "processes_per_node") if getattr(self, name)]
            wrong += ["launch.nodes"] if self.launch.nodes > 1 else []
            if wrong:
                raise ValueError(f"{wrong[0]}: strategy={self.strategy} is one process; use strategy=ddp")
        if self.functional and self.strategy != "data_parallel":
            raise ValueError("functional=true is a setting of data_parallel; use strategy=data_parallel")
        super().check()
