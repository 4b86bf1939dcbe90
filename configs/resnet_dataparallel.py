"""Settings of experiments/resnet_dataparallel.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from configs.dataparallel import DataParallel
from configs.optional import Sweep
from configs.shared import at_least

ONE_DEVICE_MESSAGE = (
    "{} GPUs found: DataParallel runs the model unchanged, like single; to compare devices, use strategy=ddp"
)


@dataclass
class Config(Sweep, DataParallel):
    """Settings of nn.DataParallel, DDP and a single device."""

    strategy: Literal["single", "data_parallel", "ddp"] = "ddp"
    """single is one process on one device; data_parallel is nn.DataParallel, one process that copies the model to all
    its GPUs in every step; ddp is DistributedDataParallel, one process per device."""
    functional: bool = False
    """Use the function nn.parallel.data_parallel instead of the class nn.DataParallel."""
    last_batch: Literal["keep", "drop"] = "keep"
    """Keep or drop the last partial batch of an epoch, which may be smaller than the number of devices."""
    loss_every: int = at_least(1, 100)
    """Steps between two messages with the running loss."""
    compare: bool = True
    """After training on several devices, time the same step on a single one and with the other strategies, in turns.
    A sweep instead trains a separate run with each strategy."""

    @property
    def processes(self) -> int:
        return super().processes if self.strategy == "ddp" else 1

    def check(self) -> None:
        if self.strategy != "ddp":
            ddp_settings = {
                "sync_batchnorm": self.sync_batchnorm,
                "processes_per_node": self.processes_per_node,
                "launch.nodes": self.launch.nodes > 1,
            }
            for name, is_set in ddp_settings.items():
                if is_set:
                    raise ValueError(f"{name}: strategy={self.strategy} is a single process; use strategy=ddp")
        if self.functional and self.strategy != "data_parallel":
            raise ValueError("functional=true is a setting of data_parallel; use strategy=data_parallel")
        super().check()
