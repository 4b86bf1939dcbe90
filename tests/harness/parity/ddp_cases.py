"""Train many data-parallel cases with one number of ranks in one launch, for parity tests.

    python -m tests.harness.parity.ddp_cases OUT_FILE CACHE RANKS key=value,key=value ...   one argument for each case

A case may begin with one of MISTAKES, which is then planted in the run.
"""

from __future__ import annotations

import functools
import itertools
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common.checkpoint.train_state import TrainState
from common.config import config
from common.data.prepare import PreparedDataset
from common.measure import step_timing
from common.models import networks
from common.models.sample_dropout import SampleDropout, add_dropout
from common.ranks.ranks import Ranks
from common.ranks.rendezvous import World
from common.runs.folder import RunFolder
from common.techniques.data_parallel.scaling_report import ScalingReport
from common.techniques.data_parallel.shards import AutoShards
from common.training import evaluate
from common.training import run as training_run
from common.training.run import Run
from configs.ddp_multinode import Config
from experiments import ddp_multinode
from tests.harness.parity import reference
from tests.harness.parity.cases import full_state, prepare_for, save_cases, split_case, sums_of_ranks, train_script
from tests.harness.parity.reference import differences

CONVNET = {
    "data.name": "generated",
    "data.samples": "505",
    "data.image_size": "12",
    "data.train_limit": "100",  # 4 batches per epoch; 4 samples are left out
    "data.test_limit": "101",  # not a multiple of 2 or 4
    "dtype": "float64",
    "launch.threads": "1",
    "batch": "24",
    "eval_batch": "16",
    "optim.lr": "0.15",  # SGD: Adam would not notice a wrong factor
    "optim.base_batch": "24",
    "optim.warmup": "5",
    "optim.decay": "cosine",
    "clip": "2",
    "bucket_mb": "0.25",
    "epochs": "8",
    "steps": "30",
    "seed": "7",
    "data.block": "3",
    "checkpoint.every_seconds": "0",
}
RESNET = CONVNET | {
    "model": "resnet18",
    "data.train_limit": "20",
    "data.test_limit": "9",
    "batch": "4",
    "optim.lr": "0.05",
    "optim.base_batch": "4",
    "eval_batch": "4",
    "epochs": "6",
}
WIDTH = 8
SLOW_FROM = 15  # the step after which rank 1 is slow
MISTAKES = (
    *("sums_losses", "no_communication", "same_share", "slow_rank"),
    *("mean_of_means", "equal_buffers", "torchs_dropout"),
)
SLOWS_DOWN = "slows_down"
"""Not a mistake: after SLOW_FROM steps, rank 1 needs more time for each sample."""


def settings(text: str) -> tuple[Config, str]:
    """Return the config of a case and its mistake, or an empty string."""
    arguments = split_case(text)
    mistake = arguments.pop(0) if "=" not in arguments[0] else ""
    assert mistake in ("", *MISTAKES, SLOWS_DOWN)
    overrides = dict(argument.split("=") for argument in arguments)
    defaults = RESNET if overrides.get("model") == "resnet18" else CONVNET
    return config.build_config(Config, [defaults | overrides]), mistake


def unsplit(cfg: Config) -> nn.Sequential:
    """Build the unsplit model in float64, a ResNet with few channels.

    With images of 12 pixels the last layers of the ResNet have 2x2 values, so that BatchNorm is well conditioned.
    """
    shape = (3, cfg.data.image_size, cfg.data.image_size)
    if cfg.model == "resnet18":
        return networks.ResNet("resnet18", shape, 10, width=WIDTH, large=False).double()
    return networks.ConvNet(shape, 10).double()


class OneShard(Run):
    """A run in which every rank trains on the first shard."""

    def batches(self, **options: Any) -> Any:
        return super().batches(**options | {"shard": (0, self.world.size)})


def make_mistake(model: nn.Module, mistake: str, world: World) -> nn.Module:
    """Plant a mistake in a wrapped model."""
    if mistake == "sums_losses":
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient * world.size)
    if mistake == "no_communication":
        assert isinstance(model, DistributedDataParallel)
        model.require_backward_grad_sync = False
    if mistake == "slow_rank" and world.rank == 1:
        model.register_forward_pre_hook(lambda *_: time.sleep(0.1))
    if mistake == SLOWS_DOWN and world.rank == 1:
        steps = itertools.count()

        def slow_down(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if next(steps) >= SLOW_FROM:
                time.sleep(0.005 * len(inputs[0]))

        model.register_forward_pre_hook(slow_down)
    return model


def list_replacements(mistake: str, cfg: Config, world: World) -> list[tuple[Any, str, Any]]:
    """Return the attributes that a mistake replaces: (owner, name, replacement)."""

    def average_means(logits: Tensor, labels: Tensor, reduction: str) -> Tensor:
        return F.cross_entropy(logits, labels) * (cfg.batch / world.size)  # the mean over this rank's samples

    if mistake == "mean_of_means":
        return [(ddp_multinode, "F", SimpleNamespace(cross_entropy=average_means))]
    if mistake == "torchs_dropout":
        return [(SampleDropout, "forward", lambda layer, x: F.dropout(x, layer.rate, layer.training))]
    if mistake == "equal_buffers":
        return [(TrainState, "shard_weight", 1.0)]
    return []


def train(cfg: Config, mistake: str, world: World, prepared: PreparedDataset, folder: RunFolder) -> dict[str, Any]:
    """Train one case on this rank; return its losses, full state and scores on rank 0."""
    run_class = OneShard if mistake == "same_share" else Run
    run = run_class(cfg, folder, Ranks(world), prepared)
    state_before_evaluation: dict[str, Tensor] = {}
    wrap = ddp_multinode.wrap_model
    score = evaluate.score_replicated

    def wrap_with_mistake(cfg: Config, model: nn.Module, run: Run) -> nn.Module:
        return make_mistake(wrap(cfg, model, run), mistake, world)

    def record_and_score(model: nn.Module, run: Run, predict: Any) -> dict[str, float]:
        state_before_evaluation.update(full_state([model]))
        return score(model, run, predict)

    outcome = train_script(
        ddp_multinode,
        run,
        (ddp_multinode, "init_network", lambda cfg, *_: add_dropout(unsplit(cfg), cfg.dropout, cfg.seed)),
        (ddp_multinode, "wrap_model", wrap_with_mistake),
        (training_run, "score_replicated", record_and_score),
        *list_replacements(mistake, cfg, world),
    )
    assert run.times is not None
    step_times = step_timing.gather_step_times(world, run.times)
    outcome["sums"] = sums_of_ranks(outcome["state"])
    if not world.is_main:
        return {}

    outcome["before"] = state_before_evaluation
    outcome["straggler"] = None
    if mistake == "slow_rank":
        outcome["straggler"] = ScalingReport(step_times, world.hosts, 0.0).straggler
    outcome["exposed"] = min(step_times[0].exposed, default=0.0) if step_times else 0.0
    auto_shards = run.find_hook(AutoShards)
    outcome["shards"] = auto_shards.history if auto_shards else []
    outcome["written"] = list_written_shards(folder, world.size)
    return outcome


def list_written_shards(folder: RunFolder, ranks: int) -> list[tuple[int, tuple[int, ...]]]:
    """Return the shards that the metrics contain, each with the step after the row."""
    shards = []
    for row in folder.read_attempt_rows():
        if "shard_0" in row:
            shards.append((row["global_step"] + 1, tuple(row[f"shard_{rank}"] for rank in range(ranks))))
    return shards


@functools.cache
def expected(cache: Path, case: str, shares: int | tuple[int, ...] = 1) -> dict[str, Any]:
    """Train the unsplit model in one process by the bare loop; each share has its own BatchNorm buffers."""
    cfg, _ = settings(case)
    prepared = prepare_for(cfg, str(cache))
    torch.manual_seed(1234)
    return reference.trained(cfg, unsplit(cfg), prepared, shares=shares)


def wrong(outcome: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Return the differences from the reference and between the ranks."""
    problems = differences(outcome, expected)
    for name in ("test_accuracy", "test_samples"):
        if outcome["scores"][name] != expected["scores"][name]:
            problems.append(name)
    if len(set(outcome["sums"])) > 1:
        problems.append("the ranks have different models")
    return problems


if __name__ == "__main__":
    sys.exit(save_cases(settings, train, *sys.argv[1:]))
