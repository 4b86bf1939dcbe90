"""Method of ddp_multinode: DDP and FSDP with any shards."""

from __future__ import annotations

import functools
import itertools
import time
from statistics import median
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common.checkpoint.train_state import TrainState
from common.measure import step_timing
from common.models import networks
from common.models.sample_dropout import SampleDropout, add_dropout
from common.techniques.data_parallel.scaling_report import ScalingReport
from common.techniques.data_parallel.shards import AutoShards
from common.training import run as training_run
from common.training import run_data
from common.training.run import Run
from configs.ddp_multinode import Config
from experiments import ddp_multinode
from tests.harness.parity.method import Outcome, ParityMethod, change_result, collect_state, replace_attributes

CONVNET_SETTINGS = (
    "data.name=generated",
    "data.samples=505",
    "data.image_size=12",
    "data.train_limit=100",  # 4 batches per epoch; 4 samples are left out
    "data.test_limit=101",  # not a multiple of 2 or 4
    "batch=24",
    "eval_batch=16",
    "optim.lr=0.15",  # SGD: Adam would not notice a wrong factor
    "optim.base_batch=24",
    "optim.warmup=5",
    "optim.decay=cosine",
    "clip=2",
    "bucket_mb=0.25",
    "epochs=8",
    "steps=30",
    "seed=7",
    "data.block=3",
)
RESNET_SETTINGS = (
    "data.train_limit=20",
    "data.test_limit=9",
    "batch=4",
    "optim.lr=0.05",
    "optim.base_batch=4",
    "eval_batch=4",
    "epochs=6",
)
RESNET_WIDTH = 8
SLOWDOWN_STEP = 15
"""The step after which rank 1 is slow in cases that begin with "slows_down"."""


def build_model(cfg: Config) -> nn.Sequential:
    """Build the unsplit model in float64, a ResNet with few channels.

    With images of 12 pixels the last layers of the ResNet have 2x2 values, so that BatchNorm is well conditioned.
    """
    shape = (3, cfg.data.image_size, cfg.data.image_size)
    if cfg.model == "resnet18":
        return networks.ResNet("resnet18", shape, 10, width=RESNET_WIDTH, large=False).double()
    return networks.ConvNet(shape, 10).double()


def init_small_network(_: Any, cfg: Config, *shape_and_classes: Any) -> nn.Module:
    return add_dropout(build_model(cfg), cfg.regularization.dropout, cfg.seed)


def train(cfg: Config, run: Run) -> Outcome:
    """Train, and return times, shards, and the state before the last evaluation, which averages buffers."""
    state_before_evaluation: dict[str, Tensor] = {}

    def record_and_score(score: Any, model: nn.Module, run: Run, predict: Any) -> dict[str, float]:
        state_before_evaluation.update(collect_state([model]))
        scores: dict[str, float] = score(model, run, predict)
        return scores

    with replace_attributes((training_run, "score_replicated", record_and_score)):
        ddp_multinode.main(cfg, run)

    assert run.times is not None
    step_times = step_timing.gather_step_times(run.world, run.times)
    if not run.world.is_main:
        return {}
    outcome: Outcome = {"state_before_evaluation": state_before_evaluation}
    outcome["straggler"] = ScalingReport(step_times, run.world.hosts, 0.0).straggler
    outcome["exposed"] = median(step_times[0].exposed) if step_times and step_times[0].exposed else 0.0
    auto_shards = run.find_hook(AutoShards)
    outcome["shards"] = auto_shards.history if auto_shards else []
    return outcome


# ---- changes of the wrapped model


def sum_gradients(replica: nn.Module) -> None:
    """Use the sum of the ranks' gradients instead of the mean."""
    for parameter in replica.parameters():
        parameter.register_hook(lambda gradient: gradient * dist.get_world_size())


def skip_communication(replica: nn.Module) -> None:
    assert isinstance(replica, DistributedDataParallel)
    replica.require_backward_grad_sync = False


def delay_each_step(replica: nn.Module) -> None:
    """Let rank 1 sleep in each forward pass."""
    if dist.get_rank() == 1:
        replica.register_forward_pre_hook(lambda *_: time.sleep(0.1))


def slow_down(replica: nn.Module) -> None:
    """After SLOWDOWN_STEP, let rank 1 need more time for each sample."""
    forward_passes = itertools.count()

    def sleep_per_sample(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if next(forward_passes) >= SLOWDOWN_STEP:
            time.sleep(0.005 * len(inputs[0]))

    if dist.get_rank() == 1:
        replica.register_forward_pre_hook(sleep_per_sample)


def fail_on_rank_1(replica: nn.Module) -> None:
    """Fail before the first step, while rank 0 waits for the gradients of this rank."""
    if dist.get_rank() == 1:
        raise ArithmeticError("planted failure")


# ---- other changes: each function gets the function that it replaces as first argument


def read_first_shard(batches: Any, run: Run, **options: Any) -> Any:
    """Let every rank train on the first shard."""
    return batches(run, **options | {"shard": (0, run.world.size)})


def average_means(main: Any, cfg: Config, run: Run) -> None:
    """Average the means over the ranks' samples, although shards are unequal."""

    def compute_scaled_mean(logits: Tensor, labels: Tensor, reduction: str) -> Tensor:
        return F.cross_entropy(logits, labels) * (cfg.batch / run.world.size)

    with replace_attributes((run_data, "choose_loss", lambda _, cfg, samples: compute_scaled_mean)):
        main(cfg, run)


def apply_dropout_of_torch(_: Any, layer: SampleDropout, x: Tensor) -> Tensor:
    return F.dropout(x, layer.rate, layer.training)


change_replica = functools.partial(change_result, ddp_multinode, "wrap_model")
DDP = ParityMethod(
    name="ddp_cases:DDP",
    schema=Config,
    train=train,
    settings=CONVNET_SETTINGS,
    presets={"model=resnet18": RESNET_SETTINGS},
    replacements=[(ddp_multinode, "init_network", init_small_network)],
    build_model=build_model,
    changes={
        "sums_losses": [change_replica(sum_gradients)],
        "no_communication": [change_replica(skip_communication)],
        "same_share": [(Run, "batches", read_first_shard)],
        "slow_rank": [change_replica(delay_each_step)],
        "slows_down": [change_replica(slow_down)],
        "fails_on_rank_1": [change_replica(fail_on_rank_1)],
        "mean_of_means": [(ddp_multinode, "main", average_means)],
        "equal_buffers": [(TrainState, "shard_weight", 1.0)],
        "torchs_dropout": [(SampleDropout, "forward", apply_dropout_of_torch)],
    },
)
