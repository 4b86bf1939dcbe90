"""A small model with non-contiguous activations and BatchNorm, trained by every engine and schedule on two ranks.

python -m tests.harness.ranks.pipeline_engines
    exits with 0 if gradients, buffers and evaluation equal those of one process
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import time
from collections import OrderedDict
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.ranks.rendezvous import World
from common.techniques.pipeline import partition
from common.techniques.pipeline.executor import PipelineEngine
from common.techniques.pipeline.schedules import Action
from common.techniques.pipeline.torch_engine import TorchPipelineEngine
from configs.pipeline import SCHEDULES, V_SCHEDULES, PipelineConfig
from configs.shared import Launch
from tests.harness.ranks.programs import run_on_ranks

TOLERANCE = 1e-12
# Layers before which four stages are split. torch's engine needs parameters in every stage.
BOUNDARIES_OF_FOUR_STAGES = {"own": ["l2", "l5", "l8"], "torch": ["l3", "l5", "l9"]}


class Transpose(nn.Module):
    """Swap two dimensions. The output shares the memory of the input and is not contiguous."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [Transpose(), Transpose(), nn.Linear(6, 5), Transpose(), nn.BatchNorm1d(5), nn.ReLU(inplace=True)]
    layers += [Transpose(), Transpose(), nn.Linear(7, 4), nn.Flatten(), nn.Linear(20, 3)]
    return nn.Sequential(OrderedDict((f"l{i}", layer) for i, layer in enumerate(layers))).double()


def train_unsplit(x: Tensor, y: Tensor, microbatches: int = 4) -> tuple[nn.Sequential, Tensor]:
    """Return the model in one process after a backward pass, and its logits in evaluation mode."""
    model = make_model()
    # BatchNorm gets microbatches, as in a pipeline
    for inputs, targets in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
        loss = F.cross_entropy(model(inputs), targets) / microbatches
        loss.backward()
    with torch.no_grad():
        return model, model.eval()(x)


def list_cases() -> list[PipelineConfig]:
    cases = []
    for engine, schedule, stages_per_process in itertools.product(("own", "torch"), SCHEDULES, (1, 2)):
        if schedule in V_SCHEDULES and stages_per_process == 1:
            continue
        case = PipelineConfig(
            engine=engine,  # type: ignore[arg-type]
            schedule=schedule,
            stages=2 * stages_per_process,
            stages_per_process=stages_per_process,
            microbatches=4,
        )
        cases.append(case)
        if engine == "own" and stages_per_process == 2:
            cases.append(dataclasses.replace(case, transport="network"))
    return cases


def build_engine(case: PipelineConfig, world: World, boundary: str = "l5", batch: int = 8) -> PipelineEngine:
    boundaries = BOUNDARIES_OF_FOUR_STAGES[case.engine] if case.stages == 4 else [boundary]
    stages = partition.split_into_stages(make_model(), boundaries)
    engine = PipelineEngine if case.engine == "own" else TorchPipelineEngine
    if case.transport == "network":
        world = dataclasses.replace(world, backend="nccl")  # one process group for each kind and direction of messages
    sample = torch.zeros(1, 7, 6, dtype=torch.float64)
    return engine(case, stages, F.cross_entropy, world, batch=batch, sample=sample, dtype=torch.float64)


def compare_with_unsplit(pipe: PipelineEngine, unsplit: nn.Sequential, case: PipelineConfig) -> None:
    """Compare gradients and buffers of this rank's stages with those of the unsplit model."""
    for stage in pipe.local_stages.values():
        for name, parameter in stage.named_parameters():
            gradient = parameter.grad
            expected = unsplit.get_parameter(name).grad
            assert gradient is not None
            assert expected is not None
            difference = (gradient - expected).abs().max().item()
            assert difference < TOLERANCE, (case, name, difference)
        for name, buffer in stage.named_buffers():
            expected_buffer = unsplit.get_buffer(name).double()
            assert torch.allclose(buffer.double(), expected_buffer, atol=TOLERANCE), (case, name)


def compare_cases(world: World) -> None:
    """Compare every case with one process, on this rank."""
    torch.manual_seed(1)
    x = torch.randn(8, 7, 6).double()
    y = torch.randint(3, (8,))
    unsplit, logits = train_unsplit(x, y)
    for case in list_cases():
        pipe = build_engine(case, world)
        pipe.module.train()
        clock_refreshes: list[PipelineEngine] = []
        pipe.clock.refresh_reference_event = partial(clock_refreshes.append, pipe)  # type: ignore[method-assign]
        pipe.step(x, y)
        assert len(clock_refreshes) == 1, (case, "a clock that is not refreshed loses its precision on a GPU")
        compare_with_unsplit(pipe, unsplit, case)

        pipe.module.eval()
        predicted = pipe.predict(x, 8)
        assert predicted is None or torch.allclose(predicted, logits, atol=TOLERANCE), case
        world.gather(None)  # no rank closes its connections before all ranks have received
    compare_late_weight_gradients(world, x, y)


def compare_late_weight_gradients(world: World, x: Tensor, y: Tensor) -> None:
    """Rank 0 sends the activations of its next step before rank 1 has computed the gradients of its weights."""
    unsplit, _ = train_unsplit(x, y, microbatches=2)
    for parameter in unsplit.parameters():
        assert parameter.grad is not None
        parameter.grad *= 2  # the losses of two steps have the sum of the gradients, not the mean
    case = PipelineConfig(schedule="zero_bubble", microbatches=1)
    # The second stage begins with a linear layer, whose weights need the received activation.
    pipe = build_engine(case, world, boundary="l8", batch=4)
    pipe.module.train()
    if world.rank == 1:
        compute_weight_gradients = pipe._compute_weight_gradients

        def compute_late(action: Action) -> None:
            time.sleep(0.2)
            compute_weight_gradients(action)

        pipe._compute_weight_gradients = compute_late  # type: ignore[method-assign]
    for inputs, targets in zip(x.chunk(2), y.chunk(2), strict=True):
        pipe.step(inputs, targets)
    compare_with_unsplit(pipe, unsplit, case)
    world.gather(None)


if __name__ == "__main__":
    sys.exit(run_on_ranks(compare_cases, 2, Launch(device="cpu", threads=1)))
