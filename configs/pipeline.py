"""Settings of pipeline parallelism, for every experiment that partitions a model into stages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from configs.batch_plan import format_nearest_multiples, list_divisors
from configs.shared import between

BUILT_IN = ("naive", "gpipe", "1f1b")
TORCH = (*BUILT_IN, "interleaved_1f1b", "zero_bubble")


@dataclass
class Stages:
    """Settings of every experiment with stages."""

    transport: Literal["auto", "network"] = "auto"
    """How the built-in engine's messages travel: auto takes shared memory between ranks of one host (CPU)."""
    schedule: str = "gpipe"
    """naive, gpipe (arXiv 1811.06965), 1f1b (both engines), interleaved_1f1b (arXiv 2104.04473), zero_bubble (arXiv
    2401.10241; both with engine=torch), or FILE.py:function, a schedule of your own for the built-in engine."""
    stages: int = between(1, 64, 2)
    """Stages that the model is partitioned into; 1 trains the unsplit model."""
    stages_per_process: int = between(1, 64, 1)
    """Stages that one rank holds; stage s is on rank s modulo the number of ranks."""
    split: list[str] = field(default_factory=list)
    """Layers that begin a new stage, such as [fc2]; empty balances the stages by `balance`."""
    balance: Literal["parameters", "time"] = "parameters"
    """What an automatic split evens out: parameter counts, or the measured time of each layer."""
    plot: bool = False
    """Draw one step as timeline.png in the run folder; takes half a second at the end."""

    @property
    def memory_bytes(self) -> float:
        """Return the bytes of a host's ranks, of which each builds the whole model and then keeps its own stages."""
        host: Any = self
        built = host.processes // host.launch.nodes * host.parameter_bytes
        trained = getattr(host, "replicas", 1) * host.parameter_bytes * host.optim.tensors_per_parameter
        return max(built, trained / host.launch.nodes)

    def make_pipeline_config(self) -> PipelineConfig:
        """Return the settings of the engine."""
        raise NotImplementedError


@dataclass
class PipelineConfig(Stages):
    """Settings of the engine that executes a schedule."""

    engine: Literal["own", "torch"] = "own"
    """own is the built-in engine, common/pipeline/executor.py; torch is torch.distributed.pipelining."""
    microbatches: int = between(1, 4096, 4)
    """Equal parts of a batch that pass through the stages one behind the other."""

    def make_pipeline_config(self) -> PipelineConfig:
        return self

    @property
    def processes(self) -> int:
        return self.stages // self.stages_per_process

    def check_pipeline(self, batch: int) -> None:
        """Raise ValueError where the settings do not fit together or do not fit the batch."""
        if self.stages % self.stages_per_process:
            raise ValueError(
                f"stages={self.stages} is no multiple of stages_per_process={self.stages_per_process}; "
                f"valid values of stages_per_process are {list_divisors(self.stages)}"
            )
        if batch % self.microbatches:
            below = max(d for d in list_divisors(batch) if d <= self.microbatches)
            above = min(d for d in list_divisors(batch) if d >= min(self.microbatches, batch))
            near = " or ".join(str(d) for d in sorted({below, above}))
            what = f"batch={batch} does not divide into microbatches={self.microbatches}"
            sizes = format_nearest_multiples(batch, self.microbatches)
            raise ValueError(f"{what}; use microbatches={near}, or batch={sizes}")
        if self.split and len(self.split) != self.stages - 1:
            raise ValueError(
                f"split={self.split} makes {len(self.split) + 1} stages, stages={self.stages}; "
                f"name {self.stages - 1} layers, set stages={len(self.split) + 1}, or split=[] to balance them"
            )
        self.check_schedule()

    def check_schedule(self) -> None:
        """Raise ValueError for a schedule that is unknown or that the engine does not have."""
        custom = ":" in self.schedule
        if not custom and self.schedule not in TORCH:
            raise ValueError(f"schedule={self.schedule} is unknown; use {', '.join(TORCH)} or FILE.py:function")
        if self.engine == "own" and not custom and self.schedule not in BUILT_IN:
            names = ", ".join(BUILT_IN)
            raise ValueError(f"schedule={self.schedule} needs engine=torch; the built-in engine has {names}")
        if self.engine == "torch":
            if custom:
                what = f"schedule={self.schedule} needs the built-in engine, engine=own"
                raise ValueError(f"{what}; engine=torch has {', '.join(TORCH)}")
            if self.stages == 1:
                raise ValueError("engine=torch needs at least 2 stages; set stages=2, or engine=own (built in)")
            self.check_torch_schedule()

    def check_torch_schedule(self) -> None:
        """Raise ValueError where the microbatches do not suit a schedule of torch.distributed.pipelining."""
        ranks, count = self.processes, self.microbatches
        if self.schedule == "1f1b" and self.stages_per_process == 1 and count < self.stages:
            what = "engine=torch schedule=1f1b needs at least as many microbatches as stages"
            raise ValueError(f"{what}; set microbatches to {self.stages} or more")
        in_rounds = ("interleaved_1f1b", "zero_bubble", *(["1f1b"] if self.stages_per_process > 1 else []))
        if self.schedule in in_rounds and count % max(1, count // ranks):
            what = f"engine=torch schedule={self.schedule} needs microbatches={count} to be a multiple of"
            raise ValueError(f"{what} {count // ranks} (microbatches // ranks); {count // ranks * ranks} is")
