"""Train many cases of an experiment with stages in one launch, for parity tests to compare.

    python -m tests.harness.parity.stage_cases NAME OUT_FILE CACHE PROCESSES key=value,key=value ...
        one argument per case

A case may begin with one of MISTAKES, which is planted.
"""

from __future__ import annotations

import functools
import itertools
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.config import config
from common.data import prepare
from common.models.networks import ResNet, SimpleNN
from common.ranks.ranks import Ranks
from common.ranks.rendezvous import World
from common.runs.folder import RunFolder
from common.techniques.pipeline import model_split
from common.techniques.pipeline.executor import PipelineEngine
from common.training.run import Run
from configs import mnist_pipeline as mnist
from configs import resnet_modelparallel as resnet
from experiments import mnist_pipeline, resnet_modelparallel
from tests.harness.parity import reference
from tests.harness.parity.cases import prepare_for, save_cases, train_script

PIPELINE = {
    "data.name": "digits",
    "data.train_limit": "76",  # 3 batches of 24 per epoch; 4 samples are dropped
    "data.test_limit": "100",
    "dtype": "float64",
    "width": "32",
    "depth": "8",
    "batch": "24",
    "microbatches": "6",
    "eval_batch": "32",  # three full batches and one of 4
    "optim.lr": "0.02",  # SGD: Adam would hide a wrong factor
    "epochs": "5",
    "steps": "14",
    "seed": "7",
    "data.block": "3",
    "checkpoint.every_seconds": "0",
}

RESNET = {
    "data.name": "generated",
    "data.samples": "43",  # 5 batches of 8 per epoch, so that training and evaluation alternate
    "data.image_size": "16",  # 2x2 in the last layers: with fewer values, BatchNorm is ill-conditioned
    "dtype": "float64",
    "model": "resnet18",
    "width": "8",
    "batch": "8",
    "split_size": "2",
    "eval_batch": "5",
    "optim.lr": "0.02",
    "epochs": "2",
    "steps": "10",
    "seed": "7",
    "launch.threads": "1",
    "plot": "false",
    "data.block": "3",
    "checkpoint.every_seconds": "0",
}


@dataclass(frozen=True)
class TrainingMethod:
    """How the cases of an experiment are trained."""

    schema: type[Any]
    settings: dict[str, str]
    unsplit: Callable[[Any], nn.Module]
    """The model that the stages are partitioned from, in float64."""
    script: Any
    widened: bool = False
    """Whether `widen` is called on the model."""


def unsplit_pipeline(cfg: Any) -> nn.Module:
    model = SimpleNN(cfg.width, cfg.depth).double()
    widen(model.parameters())
    return model


def unsplit_resnet(cfg: Any) -> nn.Module:
    image_shape = (3, cfg.data.image_size, cfg.data.image_size)
    return ResNet(cfg.model, image_shape, 10, width=cfg.width).double()


@torch.no_grad()
def widen(parameters: Iterable[torch.Tensor]) -> None:
    """Scale weights to He initialisation. With torch's default, so deep a network learns almost nothing in 14 steps."""
    for parameter in parameters:
        if parameter.dim() > 1:
            parameter.mul_(6**0.5)


def lose_relu(pipe: PipelineEngine) -> None:
    """Replace the first layer of the second stage with a linear layer without ReLU and the same parameters."""
    if 1 in pipe.local_stages:
        layer: Any = pipe.local_stages[1][0]
        linear = nn.Linear(1, 1)
        linear.weight = layer.weight
        linear.bias = layer.bias
        pipe.local_stages[1][0] = linear


def lose_microbatch(pipe: PipelineEngine) -> None:
    """Set the gradient of each step's last microbatch to zero."""
    microbatch_numbers = itertools.count(1)

    def drop_gradient(stage: nn.Module, inputs: Any, output: Tensor) -> None:
        if stage.training and next(microbatch_numbers) % pipe.microbatches == 0:
            output.register_hook(torch.zeros_like)

    if pipe.has_last_stage:
        pipe.local_stages[pipe.stage_count - 1].register_forward_hook(drop_gradient)


MISTAKES: dict[str, Callable[[PipelineEngine], None]] = {"lose_relu": lose_relu, "lose_microbatch": lose_microbatch}
EXPERIMENTS = {
    "mnist_pipeline": TrainingMethod(mnist.Config, PIPELINE, unsplit_pipeline, mnist_pipeline, widened=True),
    "resnet_modelparallel": TrainingMethod(resnet.Config, RESNET, unsplit_resnet, resnet_modelparallel),
}


def settings(name: str, text: str) -> tuple[Any, str]:
    """Return the config of a case, and the name of its mistake or an empty string."""
    assignments = re.split(r",(?![^\[]*\])", text)
    mistake = assignments.pop(0) if "=" not in assignments[0] else ""
    assert not mistake or mistake in MISTAKES
    method = EXPERIMENTS[name]
    changes = dict(assignment.split("=") for assignment in assignments)
    return config.build_config(method.schema, [method.settings | changes]), mistake


def train(
    method: TrainingMethod, cfg: Any, mistake: str, world: World, prepared: prepare.PreparedDataset, folder: RunFolder
) -> dict[str, Any]:
    """Train a case on this rank. Return its losses, the parameters of all stages and its scores on rank 0."""
    build = model_split.build_pipeline_engine

    def build_changed_engine(*arguments: Any) -> PipelineEngine:
        pipe = build(*arguments)
        if method.widened:
            widen(pipe.module.parameters())
        if mistake:
            MISTAKES[mistake](pipe)
        return pipe

    run = Run(cfg, folder, Ranks(world), prepared)
    trained = train_script(method.script, run, (model_split, "build_pipeline_engine", build_changed_engine))
    torch.save(trained["state"], folder.path / f"state-{world.rank}.pt")
    dist.barrier()
    if not world.is_main:
        return {}
    state: dict[str, Tensor] = {}
    for rank in range(world.size):
        state |= torch.load(folder.path / f"state-{rank}.pt", weights_only=True)
    return trained | {"state": state}


@functools.cache
def expected(cache: Path, name: str, case: str) -> dict[str, Any]:
    """Train the unsplit model with the reference loop, a ResNet in the microbatches that its BatchNorm gets."""
    cfg, _ = settings(name, case)
    prepared = prepare_for(cfg, str(cache))
    torch.manual_seed(1234)
    model = EXPERIMENTS[name].unsplit(cfg)
    return reference.trained(cfg, model, prepared, piece=getattr(cfg, "microbatch", 0))


def main(name: str, *arguments: str) -> int:
    return save_cases(partial(settings, name), partial(train, EXPERIMENTS[name]), *arguments, counted="")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
