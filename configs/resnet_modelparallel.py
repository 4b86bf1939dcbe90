"""Settings of experiments/resnet_modelparallel.py."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from configs.pipeline import OWN, PipelineConfig, Stages
from configs.shared import RESNETS, BatchPlan, Experiment, Sweep, at_least, between, divisors

DEVICE = re.compile(r"cpu|cuda:\d+")


@dataclass
class Config(Sweep, Stages, Experiment):
    model: Literal["toy", "resnet18", "resnet50", "resnet101"] = "resnet18"
    """toy has two linear layers, 10-10-5 with data.name=vectors. The ResNets take images of any set; from 64 pixels on
    they begin as for ImageNet."""
    width: int = between(1, 4096, 64)
    """Channels of a ResNet's first group of blocks; the later ones have 2, 4 and 8 times as many."""
    weights: str = "none"
    """File with a state dict to begin with, under our names or torchvision's; none begins at random."""
    channels_last: bool = False
    """Whether a ResNet's weights and activations lie pixel by pixel, which suits large ones, or channel by channel."""
    mode: Literal["single", "naive", "pipelined"] = "pipelined"
    """single trains the unsplit model; naive lets one stage work at a time; pipelined lets all work, by `schedule`."""
    split_size: int = at_least(0, 0)
    """Samples in a microbatch. 0 takes the whole batch with single and naive, a quarter of it with pipelined."""
    engine: Literal["auto", "own", "torch"] = "auto"
    """own is common/pipeline/executor.py, torch is torch.distributed.pipelining; auto takes our own where it has the
    schedule."""
    devices: list[str] = field(default_factory=lambda: ["auto"])
    """A device for each stage, such as [cuda:0,cuda:1]: one process works on all of them. [] takes one process a stage;
    auto does so, too, unless a local start sees GPUs; where there is one, all stages are on it."""
    split_sizes: list[str] = field(default_factory=lambda: ["4", "8", "16", "32"])
    """With sweep=true, the sizes of microbatches that the pipelined mode is run with."""
    replicas: int = between(1, 4096, 1)
    """Copies of the pipeline, each trained on its share of the batch: stages x replicas = processes. On several hosts
    the stages of a copy stay on one host."""
    memory_cap: int = at_least(0, 0)
    """MB that each process may take for training, beside what it has after its start; 0 sets no limit. It shows what
    a model needs: address space that is written on the CPU, memory of tensors on a GPU."""

    @property
    def in_one_process(self) -> bool:
        """Whether several devices belong to one process."""
        return self.mode != "single" and self.devices not in ([], ["auto"])

    @property
    def processes(self) -> int:
        return 1 if self.in_one_process else self.pipeline().processes * self.replicas

    @property
    def takes_vectors(self) -> bool:
        return self.model == "toy"

    @property
    def microbatch(self) -> int:
        """Samples in a microbatch, as split_size says or by the mode."""
        shard = self.batch // self.replicas
        return self.split_size or (max(1, shard // 4) if self.mode == "pipelined" else shard)

    @property
    def plan(self) -> BatchPlan:
        return BatchPlan(self.batch, self.replicas, max(1, self.batch // self.replicas // self.microbatch))

    def pipeline(self) -> PipelineConfig:
        schedule = self.schedule if self.mode == "pipelined" else "naive"
        known = schedule in OWN or ":" in schedule
        single = self.mode == "single"
        return PipelineConfig(
            transport=self.transport,
            schedule=schedule,
            stages=1 if single else self.stages,
            stages_per_process=1 if single else self.stages_per_process,
            split=[] if single else self.split,
            balance=self.balance,
            engine=("own" if known or single else "torch") if self.engine == "auto" or single else self.engine,
            microbatches=self.plan.microbatches,
        )

    @property
    def parameters(self) -> float:
        return RESNETS.get(self.model, 0) * (self.width / 64) ** 2

    def paths(self) -> dict[str, str]:
        return super().paths() | ({"weights": self.weights} if self.weights != "none" else {})

    def adapt(self, gpus: int) -> None:
        fits = self.mode != "single" and self.launch.nodes == self.stages_per_process == self.replicas == 1
        fits = fits and self.engine == "auto" and self.pipeline().schedule in ("gpipe", "naive")
        if self.devices == ["auto"] and gpus and fits and self.launch.device != "cpu":
            self.devices = [f"cuda:{stage % gpus}" for stage in range(self.stages)]

    def check(self) -> None:
        if self.batch % self.replicas:
            raise ValueError(
                f"batch={self.batch} cannot be shared evenly by replicas={self.replicas}; "
                f"valid values of replicas are {', '.join(map(str, divisors(self.batch)))}"
            )
        if self.replicas > 1 and self.replicas % self.launch.nodes:
            raise ValueError(
                f"replicas={self.replicas} cannot be shared evenly by launch.nodes={self.launch.nodes}: a replica's "
                "stages stay on one host; set replicas to a multiple of the nodes"
            )
        shard = self.plan.shard
        if shard % self.microbatch:
            near = [str(d) for d in divisors(shard)]
            raise ValueError(
                f"batch={shard} does not divide into microbatches of split_size={self.microbatch}; "
                f"valid sizes are {', '.join(near)}"
            )
        if self.sweep and not (self.split_sizes and all(size.isdecimal() and int(size) for size in self.split_sizes)):
            raise ValueError(f"split_sizes=[{','.join(self.split_sizes)}]: write sizes as [8,16,32]")
        if self.in_one_process:
            self.check_devices()
        try:
            self.pipeline().check_pipeline(shard)
        except ValueError as error:
            hint = "; microbatches are batch / split_size" if "microbatches" in str(error) else ""
            raise ValueError(f"{error}{hint}") from None
        super().check()

    def check_devices(self) -> None:
        wrong = [name for name in self.devices if not DEVICE.fullmatch(name)]
        if wrong:
            raise ValueError(f"devices: {wrong[0]} is no device; write a list as [cuda:0,cuda:1], or auto")
        if len(self.devices) != self.stages:
            raise ValueError(
                f"devices=[{','.join(self.devices)}] names {len(self.devices)} devices for stages={self.stages}; "
                "name one for each stage, or set stages"
            )
        if self.launch.nodes > 1 or self.stages_per_process > 1 or self.replicas > 1:
            raise ValueError("devices= belong to one process on one host; leave it out for a process a stage")
        if self.pipeline().schedule not in ("gpipe", "naive") or self.engine != "auto":
            raise ValueError(
                f"schedule={self.schedule}: one process works through its devices as gpipe does; "
                "set devices=[] for other schedules and engines"
            )
