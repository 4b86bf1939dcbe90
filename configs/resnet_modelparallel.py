"""Settings of experiments/resnet_modelparallel.py."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from configs.batch_plan import BatchPlan, list_divisors
from configs.optional import InitialWeights, Sweep
from configs.pipeline import BUILT_IN, PipelineConfig, Stages
from configs.shared import RESNETS, at_least, between

DEVICE = re.compile(r"cpu|cuda:\d+")


@dataclass
class Config(Sweep, Stages, InitialWeights):
    """Settings of model parallelism: unsplit, naively split, or as a pipeline."""

    model: Literal["toy", "resnet18", "resnet50", "resnet101"] = "resnet18"
    """toy has two linear layers, 10-10-5 with data.name=vectors. The ResNets take images of any set; from 64 pixels on
    they begin as for ImageNet."""
    width: int = between(1, 4096, 64)
    """Channels of a ResNet's first group of blocks; the later ones have 2, 4 and 8 times as many."""
    channels_last: bool = False
    """Whether a ResNet's weights and activations lie pixel by pixel, which suits large ones, or channel by channel."""
    loss: Literal["cross_entropy", "mse"] = "cross_entropy"
    """mse, for model=toy: the mean squared difference from random targets, a vector drawn for each class. Evaluation
    reports cross-entropy and accuracy in any case."""
    mode: Literal["single", "naive", "pipelined"] = "pipelined"
    """single trains the unsplit model; naive lets one stage work at a time; pipelined lets all work, by `schedule`."""
    split_size: int = at_least(0, 0)
    """Samples in a microbatch. 0 takes the whole batch with single and naive, a quarter of it with pipelined."""
    engine: Literal["auto", "own", "torch"] = "auto"
    """own is the built-in engine, common/pipeline/executor.py; torch is torch.distributed.pipelining; auto takes the
    built-in one where it has the schedule."""
    devices: list[str] = field(default_factory=lambda: ["auto"])
    """A device for each stage, such as [cuda:0,cuda:1]: one process works on all of them. [] takes one rank a stage;
    auto does so, too, unless a local start sees GPUs; where there is one, all stages are on it."""
    split_sizes: list[str] = field(default_factory=lambda: ["4", "8", "16", "32"])
    """With sweep=true, the sizes of microbatches that the pipelined mode is run with."""
    replicas: int = between(1, 4096, 1)
    """Copies of the pipeline, each trained on its shard of the batch: stages x replicas = ranks. On several hosts the
    stages of a copy stay on one host."""
    memory_cap: int = at_least(0, 0)
    """MB that each rank may take for training, beside what it has after its start; 0 sets no limit. It shows what
    a model needs: address space that can be written on the CPU, memory of tensors on a GPU."""

    @property
    def in_one_process(self) -> bool:
        """Return whether several devices belong to one process."""
        return self.mode != "single" and self.devices not in ([], ["auto"])

    @property
    def processes(self) -> int:
        return 1 if self.in_one_process else self.make_pipeline_config().processes * self.replicas

    @property
    def microbatch(self) -> int:
        """Return the samples of a microbatch, as split_size says or by the mode."""
        shard = self.batch // self.replicas
        return self.split_size or (max(1, shard // 4) if self.mode == "pipelined" else shard)

    @property
    def batch_plan(self) -> BatchPlan:
        return BatchPlan(self.batch, self.replicas, max(1, self.batch // self.replicas // self.microbatch))

    def make_pipeline_config(self) -> PipelineConfig:
        own = {one.name: getattr(self, one.name) for one in fields(Stages)}
        if self.mode != "pipelined":
            own["schedule"] = "naive"
        if self.mode == "single":
            own |= {"stages": 1, "stages_per_process": 1, "split": []}
        built_in = self.mode == "single" or own["schedule"] in BUILT_IN or ":" in own["schedule"]
        choice = "auto" if self.mode == "single" else self.engine
        engine: Any = ("own" if built_in else "torch") if choice == "auto" else choice
        return PipelineConfig(**own, engine=engine, microbatches=self.batch_plan.microbatches)

    @property
    def estimated_parameters(self) -> float:
        return RESNETS.get(self.model, 0) * (self.width / 64) ** 2

    def fit_devices(self, gpus: int) -> None:
        fits = self.mode != "single" and self.launch.nodes == self.stages_per_process == self.replicas == 1
        fits = fits and self.engine == "auto" and self.make_pipeline_config().schedule in ("gpipe", "naive")
        if self.devices == ["auto"] and gpus and fits and not self.launch.on_cpu:
            self.devices = [f"cuda:{stage % gpus}" for stage in range(self.stages)]

    def check(self) -> None:
        if self.batch % self.replicas:
            what = f"batch={self.batch} cannot be shared evenly by replicas={self.replicas}"
            raise ValueError(f"{what}; valid values of replicas are {', '.join(map(str, list_divisors(self.batch)))}")
        if self.replicas > 1 and self.replicas % self.launch.nodes:
            what = f"replicas={self.replicas} cannot be shared evenly by launch.nodes={self.launch.nodes}"
            remedy = "set replicas to a multiple of the nodes"
            raise ValueError(f"{what}: a replica's stages stay on one host; {remedy}")
        shard = self.batch_plan.shard
        if shard % self.microbatch:
            what = f"batch={shard} does not divide into microbatches of split_size={self.microbatch}"
            raise ValueError(f"{what}; valid sizes are {', '.join(map(str, list_divisors(shard)))}")
        if self.loss == "mse" and self.model != "toy":
            raise ValueError(f"loss=mse: model={self.model} is trained with cross-entropy; use model=toy")
        if self.channels_last and self.width < 16 and self.model in RESNETS:  # a defect of oneDNN
            what = f"channels_last=true with width={self.width}: oneDNN (CPU) writes past its memory, in gradients"
            raise ValueError(f"{what} of 1x1 convolutions with stride 2 and few channels; set width=16 or more")
        if self.sweep and not (self.split_sizes and all(size.isdecimal() and int(size) for size in self.split_sizes)):
            raise ValueError(f"split_sizes=[{','.join(self.split_sizes)}]: write sizes as [8,16,32]")
        if self.in_one_process:
            self.check_devices()
        try:
            self.make_pipeline_config().check_pipeline(shard)
        except ValueError as error:
            hint = "; microbatches are batch / split_size" if "microbatches" in str(error) else ""
            raise ValueError(f"{error}{hint}") from None
        super().check()

    def check_devices(self) -> None:
        """Raise ValueError where `devices` does not fit the other settings."""
        wrong = [name for name in self.devices if not DEVICE.fullmatch(name)]
        if wrong:
            raise ValueError(f"devices: {wrong[0]} is no device; write a list as [cuda:0,cuda:1], or auto")
        if len(self.devices) != self.stages:
            what = f"devices=[{','.join(self.devices)}] names {len(self.devices)} devices for stages={self.stages}"
            raise ValueError(f"{what}; name one for each stage, or set stages")
        if self.launch.nodes > 1 or self.stages_per_process > 1 or self.replicas > 1:
            raise ValueError("devices= belong to one process on one host; leave it out for one rank a stage")
        if self.make_pipeline_config().schedule not in ("gpipe", "naive") or self.engine != "auto":
            what = f"schedule={self.schedule}: one process works through its devices as gpipe does"
            raise ValueError(f"{what}; set devices=[] for other schedules and engines")
