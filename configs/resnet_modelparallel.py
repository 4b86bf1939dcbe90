"""Settings for experiments/resnet_modelparallel.py."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Self

from configs.batch_plan import BatchPlan, list_divisors
from configs.fields import at_least, between, flat
from configs.memory import Memory, StateSharding
from configs.networks import RESNETS, network_field
from configs.pipeline import MicrobatchError, PipelineConfig, PipelineExperiment, Stages, list_recompute_refusals
from configs.shared import InitialWeights, Regularization, Sweep
from configs.strategies import Refusal, Strategies

DEVICE = re.compile(r"cpu|cuda:\d+")
TWO_STAGES = {"stages_per_process": "2"}
STRATEGIES = Strategies(
    degrees={
        "replicas": ({}, {"zero1": "true"}),
        "stages": (
            {"schedule": "gpipe"},
            {"mode": "naive"},
            {"schedule": "1f1b"},
            {"schedule": "zero_bubble"},
            {"schedule": "interleaved_1f1b"} | TWO_STAGES,
            {"schedule": "zbv"} | TWO_STAGES,
            {"schedule": "dualpipev"} | TWO_STAGES,
        ),
    },
    undivided={"stages": {"mode": "single"}},
    options=({}, {"recompute": "blocks"}),
    # BatchNorm needs microbatches of the same size in all strategies, so that the losses are equal.
    run={
        "width": "16",
        "split_size": "8",
        "devices": "[]",
        "plot": "false",
        "data.test_limit": "64",
        "steps": "16",
    },
)


@dataclass(frozen=True)
class Config(PipelineExperiment):
    """Settings for model parallelism: an unsplit model, naive model parallelism, or a pipeline."""

    smallest_settings: ClassVar[tuple[str, ...]] = ("width=8", "batch=16", "split_size=8", "plot=false")
    strategies: ClassVar[Strategies] = STRATEGIES
    refused: ClassVar[tuple[Refusal, ...]] = list_recompute_refusals(has_schedule="mode=pipelined")

    model: str = network_field("resnet18", "toy", "resnet18", "resnet50", "resnet101")
    """Network to train. toy has two linear layers (10-10-5 with data.name=vectors). The ResNets accept the images of
    any data set and have the ImageNet stem for images of 64 pixels or more. FILE.py:Class is a custom network, a
    subclass of nn.Sequential whose children are the layers. If the targets are class labels, loss=mse is available for
    toy only: the targets are then random vectors, one per class, and an evaluation reports cross-entropy and
    accuracy."""
    width: int = between(1, 4096, 64)
    """Number of channels in the first group of blocks of a ResNet. The later groups have 2, 4 and 8 times as many
    channels."""
    channels_last: bool = False
    """Store a ResNet in the channels_last memory format, which speeds up large networks."""
    mode: Literal["single", "naive", "pipelined"] = "pipelined"
    """Execution of the stages. single trains the unsplit model; naive runs one stage at a time; pipelined runs all
    stages in parallel according to `schedule`."""
    split_size: int = at_least(0, 0)
    """Number of samples per microbatch. 0 uses all samples of a replica in single and naive mode. In pipelined mode, 0
    uses a quarter of them, rounded down, but at least one."""
    engine: Literal["auto", "own", "torch"] = "auto"
    """Pipeline engine. own is the built-in engine (common/techniques/pipeline/executor.py); torch is
    torch.distributed.pipelining. auto uses the built-in engine, or a single process if `devices` lists several
    devices."""
    devices: list[str] = field(default_factory=lambda: ["auto"])
    """One device per stage, such as [cuda:0,cuda:1]. A single process then uses all listed devices. [] uses one rank
    per stage. For one pipeline with mode=naive or schedule=gpipe in a local run with GPUs, auto uses all visible GPUs
    from one process; a single GPU holds all stages. In all other cases, auto uses one rank per stage."""
    split_sizes: list[str] = field(default_factory=lambda: ["4", "8", "16", "32"])
    """Values of split_size that a sweep (sweep=true) measures in pipelined mode."""
    replicas: int = between(1, 4096, 1)
    """Number of copies of the pipeline. Each copy is trained on its own shard of the batch, and all stages of a copy
    are on one host. The total number of ranks is the number of ranks per pipeline times `replicas`."""
    memory_cap: int = at_least(0, 0)
    """Maximum memory in MB that each rank may allocate for training, beyond what it uses after startup; 0 sets no
    limit. The limit applies to writable address space on a CPU and to tensors on a GPU."""
    pipeline: Stages = flat(Stages)
    regularization: Regularization = flat(Regularization)
    memory: Memory = flat(Memory)
    state_sharding: StateSharding = flat(StateSharding)
    initial: InitialWeights = flat(InitialWeights)
    grid: Sweep = flat(Sweep)

    @property
    def can_draw_targets(self) -> bool:
        """Whether loss=mse replaces class labels with random target vectors."""
        return self.model == "toy"

    @property
    def in_one_process(self) -> bool:
        """Whether a single process uses all devices."""
        return self.mode != "single" and self.devices not in ([], ["auto"])

    @property
    def processes(self) -> int:
        return 1 if self.in_one_process else self.make_pipeline_config().processes * self.replicas

    @property
    def microbatch(self) -> int:
        """Number of samples per microbatch: `split_size`, or the default of `mode` if `split_size` is 0."""
        if self.split_size:
            return self.split_size
        shard = self.batch // self.replicas
        return max(1, shard // 4) if self.mode == "pipelined" else shard

    @property
    def batch_plan(self) -> BatchPlan:
        shard = self.batch // self.replicas
        return BatchPlan(self.batch, self.replicas, max(1, shard // self.microbatch))

    def make_pipeline_config(self) -> PipelineConfig:
        settings = self.pipeline
        pipeline = PipelineConfig(
            transport=settings.transport,
            schedule=settings.schedule if self.mode == "pipelined" else "naive",
            stages=settings.stages,
            stages_per_process=settings.stages_per_process,
            split=settings.split,
            balance=settings.balance,
            plot=settings.plot,
            microbatches=self.batch_plan.microbatches,
        )
        if self.mode == "single":
            return replace(pipeline, stages=1, stages_per_process=1, split=[], engine="own")
        return replace(pipeline, engine="own" if self.engine == "auto" else self.engine)

    @property
    def estimated_parameters(self) -> float:
        return RESNETS.get(self.model, 0) * (self.width / 64) ** 2

    @property
    def replicas_per_host(self) -> float:
        return self.replicas / self.launch.nodes

    def adapt_to_gpus(self, gpus: int) -> Self:
        if self.devices != ["auto"] or not gpus or self.launch.excludes_gpus or self.mode == "single":
            return self
        is_one_pipeline = self.launch.nodes == self.pipeline.stages_per_process == self.replicas == 1
        if is_one_pipeline and self.supports_one_process():
            return replace(self, devices=[f"cuda:{stage % gpus}" for stage in range(self.pipeline.stages)])
        return self

    def supports_one_process(self) -> bool:
        """Return whether a single process can execute the schedule with the selected engine."""
        return self.engine == "auto" and self.make_pipeline_config().schedule in ("gpipe", "naive")

    def check(self) -> None:
        if self.batch % self.replicas:
            raise ValueError(
                f"batch={self.batch} cannot be divided evenly among replicas={self.replicas}; "
                f"valid values of replicas are {format_divisors(self.batch)}"
            )
        nodes = self.launch.nodes
        if self.replicas > 1 and self.replicas % nodes:
            problem = f"replicas={self.replicas} cannot be divided evenly among launch.nodes={nodes}"
            remedy = "use a multiple of launch.nodes"
            raise ValueError(f"{problem}: the stages of a replica must be on one host; {remedy}")
        shard = self.batch_plan.shard
        if shard % self.microbatch:
            raise ValueError(
                f"the {shard} samples of a replica cannot be divided evenly into microbatches of "
                f"split_size={self.microbatch} samples; "
                f"valid sizes are {format_divisors(shard)}"
            )
        if self.loss == "mse" and not self.can_draw_targets and ":" not in self.data.name:
            raise ValueError(f"loss=mse is not available for model={self.model}; use model=toy or loss=cross_entropy")
        if self.channels_last and self.width < 16 and self.model in RESNETS:  # avoids a bug in oneDNN
            raise ValueError(
                f"channels_last=true with width={self.width} is unsafe: on CPUs, oneDNN writes out of bounds when it "
                "computes gradients of 1x1 convolutions with stride 2 and few channels; use width=16 or more"
            )
        sizes = self.split_sizes
        if self.grid.sweep and not (sizes and all(size.isdecimal() and int(size) for size in sizes)):
            raise ValueError(f"split_sizes=[{','.join(sizes)}] must be a list of positive integers, such as [8,16,32]")
        if self.in_one_process:
            self.check_devices()
        pipeline = self.make_pipeline_config()
        try:
            pipeline.check(shard)
        except MicrobatchError as error:
            raise ValueError(f"{error}; the number of microbatches is batch / replicas / split_size") from None
        self.memory.check(self.model)
        self.state_sharding.check(self.replicas, "replicas=2 or more")
        super().check()

    def check_devices(self) -> None:
        """Raise ValueError if `devices` is incompatible with other settings."""
        for name in self.devices:
            if not DEVICE.fullmatch(name):
                raise ValueError(f"devices: {name} is not a valid device; use a list such as [cuda:0,cuda:1], or auto")
        stages = self.pipeline.stages
        if len(self.devices) != stages:
            raise ValueError(
                f"devices=[{','.join(self.devices)}] lists {len(self.devices)} devices for stages={stages}; "
                "name one device per stage, use devices=auto, or change stages"
            )
        if self.launch.nodes > 1 or self.pipeline.stages_per_process > 1 or self.replicas > 1:
            raise ValueError("devices= needs a single process on one host; omit devices to use one rank per stage")
        if not self.supports_one_process():
            raise ValueError(
                f"schedule={self.pipeline.schedule} engine={self.engine}: a single process with several devices "
                "supports only schedule=gpipe with engine=auto; use devices=[] for other schedules and engines"
            )


def format_divisors(number: int) -> str:
    """Format all divisors of a number as a comma-separated list."""
    return ", ".join(map(str, list_divisors(number)))
