"""Train many cases of an experiment with stages, of one world size, in one launch, for the parity tests to compare.

    python -m tests.harness.parity NAME OUT_FILE CACHE PROCESSES key=value,key=value ...      one argument a case

A case may begin with one of MISTAKES, which it then makes.
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
from tests.harness import reference
from tests.harness.cases import prepare_for, save_cases, train_script

PIPELINE = {
    "data.name": "digits",
    "data.train_limit": "76",  # 3 batches of 24 an epoch, and 4 samples left out
    "data.test_limit": "100",
    "dtype": "float64",
    "width": "32",
    "depth": "8",
    "batch": "24",
    "microbatches": "6",
    "eval_batch": "32",  # three full batches and one of 4
    "optim.lr": "0.02",  # SGD: Adam would not notice a wrong factor
    "epochs": "5",
    "steps": "14",
    "seed": "7",
    "data.block": "3",
    "checkpoint.every_seconds": "0",
}

RESNET = {
    "data.name": "generated",
    "data.samples": "43",  # 5 batches of 8 an epoch: train and eval in turns
    "data.image_size": "16",  # 2x2 in the last layers: BatchNorm needs some values to be well conditioned
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
class Trained:
    """How the cases of an experiment are trained."""

    schema: type[Any]
    settings: dict[str, str]
    unsplit: Callable[[Any], nn.Module]
    """The model that the stages are partitioned from, in float64."""
    script: Any
    widened: bool = False
    """Whether `widen` is to be called on the model."""


def unsplit_pipeline(cfg: Any) -> nn.Module:
    model = SimpleNN(cfg.width, cfg.depth).double()
    widen(model.parameters())
    return model


def unsplit_resnet(cfg: Any) -> nn.Module:
    return ResNet(cfg.model, (3, cfg.data.image_size, cfg.data.image_size), 10, width=cfg.width).double()


@torch.no_grad()
def widen(parameters: Iterable[torch.Tensor]) -> None:
    """Scale weights to He's initialisation: with torch's, a network this deep learns next to nothing in 14 steps."""
    for parameter in parameters:
        if parameter.dim() > 1:
            parameter.mul_(6**0.5)


def lose_relu(pipe: PipelineEngine) -> None:
    """Put a plain linear layer with the same parameters in place of the second stage's first one."""
    if 1 in pipe.local_stages:
        layer: Any = pipe.local_stages[1][0]
        plain = nn.Linear(1, 1)
        plain.weight, plain.bias = layer.weight, layer.bias
        pipe.local_stages[1][0] = plain


def lose_microbatch(pipe: PipelineEngine) -> None:
    """Let the gradient of each step's last microbatch be zero."""
    passed = itertools.count(1)

    def forget(stage: nn.Module, given: Any, out: Tensor) -> None:
        if stage.training and next(passed) % pipe.microbatches == 0:
            out.register_hook(torch.zeros_like)

    if pipe.has_last_stage:
        pipe.local_stages[pipe.stage_count - 1].register_forward_hook(forget)


MISTAKES: dict[str, Callable[[PipelineEngine], None]] = {"lose_relu": lose_relu, "lose_microbatch": lose_microbatch}
EXPERIMENTS = {
    "mnist_pipeline": Trained(mnist.Config, PIPELINE, unsplit_pipeline, mnist_pipeline, widened=True),
    "resnet_modelparallel": Trained(resnet.Config, RESNET, unsplit_resnet, resnet_modelparallel),
}


def settings(name: str, text: str) -> tuple[Any, str]:
    """The settings of a case, and the mistake it makes, if any."""
    words = re.split(r",(?![^\[]*\])", text)
    mistake = words.pop(0) if "=" not in words[0] else ""
    assert not mistake or mistake in MISTAKES
    kind = EXPERIMENTS[name]
    return config.build_config(kind.schema, [kind.settings | dict(word.split("=") for word in words)]), mistake


def train(
    kind: Trained, cfg: Any, mistake: str, world: World, prepared: prepare.PreparedDataset, folder: RunFolder
) -> dict[str, Any]:
    """One case on this rank; on rank 0 its losses, joined parameters and scores."""
    build = model_split.build_pipeline_engine

    def build_otherwise(*given: Any) -> PipelineEngine:
        pipe = build(*given)
        if kind.widened:
            widen(pipe.module.parameters())
        if mistake:
            MISTAKES[mistake](pipe)
        return pipe

    run = Run(cfg, folder, Ranks(world), prepared)
    found = train_script(kind.script, run, (model_split, "build_pipeline_engine", build_otherwise))
    torch.save(found["state"], folder.path / f"state-{world.rank}.pt")
    dist.barrier()
    if not world.is_main:
        return {}
    states = [torch.load(folder.path / f"state-{rank}.pt", weights_only=True) for rank in range(world.size)]
    return found | {"state": {name: value for state in states for name, value in state.items()}}


@functools.cache
def expected(cache: Path, name: str, case: str) -> dict[str, Any]:
    """The unsplit model trained by the bare loop, a ResNet in the microbatches that its BatchNorm sees in this case."""
    cfg, _ = settings(name, case)
    prepared = prepare_for(cfg, str(cache))
    torch.manual_seed(1234)
    model = EXPERIMENTS[name].unsplit(cfg)
    return reference.trained(cfg, model, prepared, piece=getattr(cfg, "microbatch", 0))


def main(name: str, *words: str) -> int:
    return save_cases(partial(settings, name), partial(train, EXPERIMENTS[name]), *words, counted="")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
