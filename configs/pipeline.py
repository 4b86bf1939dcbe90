"""Settings for pipeline parallelism: experiments that partition a model into stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from configs.batch_plan import format_nearest_multiples, list_divisors
from configs.fields import between, chosen_from, custom_code
from configs.shared import TrainingExperiment
from configs.strategies import Refusal

SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv", "dualpipev")
V_SCHEDULES = ("zbv", "dualpipev")
"""Schedules in which rank r of p ranks holds the stages r and 2p - 1 - r."""
SPLIT_BACKWARD_SCHEDULES = ("zero_bubble", "zbv", "dualpipev")
"""Schedules that compute the gradients of a stage's input and of its weights in two passes."""


def list_recompute_refusals(has_schedule: str) -> tuple[Refusal, ...]:
    """Return the refusals of recomputation with a schedule that splits backward passes.

    `has_schedule` is the condition without which the setting `schedule` has no effect.
    """
    return tuple(
        Refusal(
            "recompute!=none", f"schedule={schedule}",
            "recompute={recompute} cannot be combined with schedule={schedule}, which splits each backward pass: both "
            "parts would recompute the blocks",
            "use schedule=1f1b or interleaved_1f1b, or omit recompute", third=has_schedule,
        )
        for schedule in SPLIT_BACKWARD_SCHEDULES
    )  # fmt: skip


class MicrobatchError(ValueError):
    """Error of settings that are incompatible with the number of microbatches."""


@dataclass(frozen=True)
class Stages:
    """Settings for every experiment that partitions a model into stages."""

    transport: Literal["auto", "network"] = "auto"
    """Transport of the built-in engine. On CPUs, auto uses shared memory between ranks of the same host, unless
    launch.transport=network."""
    schedule: str = custom_code(
        "gpipe", "schedule", "common.techniques.pipeline.custom_schedules:check_schedule_of_config"
    )
    """Pipeline schedule: naive, gpipe (arXiv 1811.06965), 1f1b (2006.09503), interleaved_1f1b (2104.04473), zero_bubble
    (ZB-H1, 2401.10241), zbv (2401.10241) or dualpipev (2412.19437). The built-in engine also accepts a custom schedule
    as FILE.py:function."""
    stages: int = between(1, 64, 2)
    """Number of stages of the model; 1 trains the unsplit model."""
    stages_per_process: int = between(1, 64, 1)
    """Number of stages per rank. Stage s is placed on rank s modulo the number of ranks. zbv and dualpipev need two
    stages per rank: of p ranks, rank r holds the stages r and 2p - 1 - r."""
    split: list[str] = chosen_from("stages", "stages_per_process", "balance")
    """Names of the layers that start a new stage, such as [fc2]. If the list is empty, the stages are balanced
    according to `balance`."""
    balance: Literal["parameters", "time"] = "parameters"
    """Quantity that an automatic split balances across stages: parameter counts or the measured times of layers."""
    plot: bool = False
    """Draw a timeline of one step as timeline.png in the run folder. Drawing takes half a second at the end of the
    run."""


@dataclass(frozen=True)
class PipelineConfig(Stages):
    """Settings for the engine that executes the pipeline schedule."""

    engine: Literal["own", "torch"] = "own"
    """Pipeline engine. own is the built-in engine (common/techniques/pipeline/executor.py); torch is
    torch.distributed.pipelining."""
    microbatches: int = between(1, 4096, 4)
    """Number of microbatches, the equal parts of a batch that pass through the stages in sequence."""

    @property
    def processes(self) -> int:
        """Number of ranks per pipeline."""
        return self.stages // self.stages_per_process

    def check(self, batch: int) -> None:
        """Raise ValueError for settings that are incompatible with each other or with the batch."""
        if self.stages % self.stages_per_process:
            raise ValueError(
                f"stages={self.stages} is not divisible by stages_per_process={self.stages_per_process}; "
                f"valid values of stages_per_process are {list_divisors(self.stages)}"
            )
        if batch % self.microbatches:
            problem = f"batch={batch} is not divisible by microbatches={self.microbatches}"
            divisors = list_divisors(batch)
            # the valid numbers of microbatches that are closest to the configured number
            lower = max(d for d in divisors if d <= self.microbatches)
            higher = min(d for d in divisors if d >= min(self.microbatches, batch))
            counts = str(lower) if lower == higher else f"{lower} or {higher}"
            sizes = format_nearest_multiples(batch, self.microbatches)
            raise MicrobatchError(f"{problem}; use microbatches={counts}, or batch={sizes}")
        if self.split and len(self.split) != self.stages - 1:
            problem = f"split={self.split} makes {len(self.split) + 1} stages, but stages={self.stages}"
            remedy = f"name {self.stages - 1} layers, set stages={len(self.split) + 1}"
            raise ValueError(f"{problem}; {remedy}, or use split=[] to balance the stages automatically")
        self.check_schedule()

    def check_schedule(self) -> None:
        """Raise ValueError if the schedule is unknown or the engine does not support it."""
        is_custom = ":" in self.schedule
        names = ", ".join(SCHEDULES)
        if not is_custom and self.schedule not in SCHEDULES:
            raise ValueError(f"schedule={self.schedule} is unknown; use {names} or FILE.py:function")
        if self.schedule in V_SCHEDULES:
            self.check_v_schedule()
        if self.engine == "torch":
            if is_custom:
                raise ValueError(
                    f"schedule={self.schedule} needs engine=own (built-in engine); engine=torch supports {names}"
                )
            if self.stages == 1:
                raise ValueError("engine=torch needs at least 2 stages; use stages=2 or engine=own (built-in engine)")
            self.check_torch_schedule()

    def check_v_schedule(self) -> None:
        """Raise ValueError if a schedule with stages in the shape of a V does not support the number of stages."""
        if self.stages_per_process != 2:
            remedy = "set stages_per_process=2"
            if self.stages < 4 or self.stages % 2:
                remedy += f" and an even number of stages, such as stages={2 * self.processes}"
            raise ValueError(f"schedule={self.schedule} needs two stages per rank; {remedy}")
        if self.schedule == "dualpipev" and self.microbatches < self.stages:
            raise MicrobatchError(
                "schedule=dualpipev needs at least as many microbatches as stages; "
                f"use at least {self.stages} microbatches"
            )

    def check_torch_schedule(self) -> None:
        """Raise ValueError if torch.distributed.pipelining does not support the number of microbatches."""
        count = self.microbatches
        if self.schedule == "1f1b" and self.stages_per_process == 1:
            if count < self.stages:
                raise MicrobatchError(
                    "engine=torch with schedule=1f1b needs at least as many microbatches as stages; "
                    f"use at least {self.stages} microbatches"
                )
            return
        if self.schedule in ("1f1b", "interleaved_1f1b", "zero_bubble"):
            # torch divides the microbatches into this number of rounds of equal size
            rounds = max(1, count // self.processes)
            if count % rounds:
                problem = f"with engine=torch schedule={self.schedule}, microbatches={count} must be a multiple of"
                remedy = f"use microbatches={rounds * self.processes}"
                raise MicrobatchError(f"{problem} {rounds} (microbatches // ranks); {remedy}")


@dataclass(frozen=True)
class PipelineExperiment(TrainingExperiment):
    """Settings for experiments that partition a model into stages."""

    splits_network: ClassVar[bool] = True
    rank_settings: ClassVar[str] = "the number of stages"

    def make_pipeline_config(self) -> PipelineConfig:
        """Return the settings of the pipeline engine."""
        raise NotImplementedError

    @property
    def replicas_per_host(self) -> float:
        return 1 / self.launch.nodes
