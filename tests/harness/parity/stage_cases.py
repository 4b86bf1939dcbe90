"""Methods of the experiments with stages: mnist_pipeline and resnet_modelparallel."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from common.models.networks import ResNet, SimpleNN
from common.models.sample_dropout import add_dropout
from common.techniques.pipeline import model_split
from common.techniques.pipeline.executor import PipelineEngine
from configs import mnist_pipeline as mnist
from configs import resnet_modelparallel as resnet
from experiments import mnist_pipeline, resnet_modelparallel
from tests.harness.parity.method import ParityMethod, change_result

PIPELINE_SETTINGS = (
    "log.gradient_norm=true",
    "data.name=digits",
    "data.train_limit=76",  # 3 batches of 24 per epoch; 4 samples are dropped
    "data.test_limit=100",
    "width=32",
    "depth=8",
    "batch=24",
    "microbatches=6",
    "eval_batch=32",  # three full batches and one of 4
    "optim.lr=0.02",  # SGD: Adam would hide a wrong factor
    "epochs=5",
    "steps=14",
    "seed=7",
    "data.block=3",
    "clip=1",
    "dropout=0.1",
)

RESNET_SETTINGS = (
    "log.gradient_norm=true",
    "data.name=generated",
    "data.samples=43",  # 5 batches of 8 per epoch, so that training and evaluation alternate
    "data.image_size=16",  # 2x2 in the last layers: with fewer values, BatchNorm is ill-conditioned
    "model=resnet18",
    "width=8",
    "batch=8",
    "split_size=2",
    "eval_batch=5",
    "optim.lr=0.02",
    "epochs=2",
    "steps=10",
    "seed=7",
    "plot=false",
    "data.block=3",
    "clip=1",
    "dropout=0.1",
)


@torch.no_grad()
def initialise(model: nn.Module) -> None:
    """Use He initialisation. With torch's default, so deep a network learns almost nothing in 14 steps."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(6**0.5)


def build_mlp(cfg: Any) -> nn.Module:
    model = SimpleNN(cfg.width, cfg.depth)
    initialise(model)
    return add_dropout(model, cfg.regularization.dropout, cfg.seed).double()


def build_resnet(cfg: Any) -> nn.Module:
    image_shape = (3, cfg.data.image_size, cfg.data.image_size)
    model = ResNet(cfg.model, image_shape, 10, width=cfg.width)
    return add_dropout(model, cfg.regularization.dropout, cfg.seed).double()


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


MISTAKES = {
    "lose_relu": [change_result(model_split, "build_pipeline_engine", lose_relu)],
    "lose_microbatch": [change_result(model_split, "build_pipeline_engine", lose_microbatch)],
}
PIPELINE = ParityMethod(
    name="stage_cases:PIPELINE",
    schema=mnist.Config,
    train=mnist_pipeline.main,
    settings=PIPELINE_SETTINGS,
    ranks_setting="",
    replacements=[change_result(mnist_pipeline, "SimpleNN", initialise)],
    changes=MISTAKES,
    build_model=build_mlp,
)
RESNET = ParityMethod(
    name="stage_cases:RESNET",
    schema=resnet.Config,
    train=resnet_modelparallel.main,
    settings=RESNET_SETTINGS,
    ranks_setting="",
    changes=MISTAKES,
    build_model=build_resnet,
)
