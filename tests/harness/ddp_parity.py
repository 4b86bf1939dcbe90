"""Train many data-parallel cases of one world size in one launch, for the parity tests to compare.

    python -m tests.harness.ddp_parity OUT_FILE CACHE PROCESSES key=value,key=value ...      one argument a case

A case may begin with one of MISTAKES: it then makes that mistake.
"""

from __future__ import annotations

import functools
import itertools
import re
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
from tests.harness import reference
from tests.harness.cases import full_state, prepare_for, save_cases, sums_of_ranks, train_script
from tests.harness.reference import differences

CONVNET = {
    "data.name": "generated",
    "data.samples": "505",
    "data.image_size": "12",
    "data.train_limit": "100",  # 4 batches an epoch, and 4 samples left out
    "data.test_limit": "101",  # no multiple of 2 or 4
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
SLOWS_DOWN = "slows_down"  # rank 1, by each sample, from a step on; no mistake


def settings(text: str) -> tuple[Config, str]:
    """The settings of a case, and the mistake it makes, if any."""
    words = re.split(r",(?![^\[]*\])", text)
    mistake = words.pop(0) if "=" not in words[0] else ""
    assert not mistake or mistake in (*MISTAKES, SLOWS_DOWN)
    chosen = dict(word.split("=") for word in words)
    base = RESNET if chosen.get("model") == "resnet18" else CONVNET
    return config.build_config(Config, [base | chosen]), mistake


def unsplit(cfg: Config) -> nn.Sequential:
    """The model in float64; a ResNet has few channels. At 12 pixels its last layers see 2x2: BatchNorm needs some
    values to be well conditioned."""
    shape = (3, cfg.data.image_size, cfg.data.image_size)
    if cfg.model == "resnet18":
        return networks.ResNet("resnet18", shape, 10, width=WIDTH, large=False).double()
    return networks.ConvNet(shape, 10).double()


class OneShard(Run):
    """Every rank trains on the first shard."""

    def batches(self, **options: Any) -> Any:
        return super().batches(**options | {"shard": (0, self.world.size)})


def make_mistake(model: nn.Module, mistake: str, world: World) -> nn.Module:
    """The wrapped model, which makes a mistake."""
    if mistake == "sums_losses":
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient * world.size)
    if mistake == "no_communication":
        assert isinstance(model, DistributedDataParallel)
        model.require_backward_grad_sync = False
    if mistake == "slow_rank" and world.rank == 1:
        model.register_forward_pre_hook(lambda *_: time.sleep(0.1))
    if mistake == SLOWS_DOWN and world.rank == 1:
        passed = itertools.count()
        model.register_forward_pre_hook(lambda _, x: time.sleep(0.005 * len(x[0]) * (next(passed) >= SLOW_FROM)))
    return model


def train(cfg: Config, mistake: str, world: World, prepared: PreparedDataset, folder: RunFolder) -> dict[str, Any]:
    """One case on this rank; on rank 0 its losses, full state and scores."""
    run = (OneShard if mistake == "same_share" else Run)(cfg, folder, Ranks(world), prepared)
    before: dict[str, Tensor] = {}
    wrap, classify = ddp_multinode.wrap_model, evaluate.score_replicated

    def wrap_wrongly(cfg: Config, model: nn.Module, run: Run) -> nn.Module:
        return make_mistake(wrap(cfg, model, run), mistake, world)

    def look_before(model: nn.Module, run: Run, predict: Any) -> dict[str, float]:
        before.update(full_state([model]))
        return classify(model, run, predict)

    def average_means(logits: Tensor, labels: Tensor, reduction: str) -> Tensor:
        return F.cross_entropy(logits, labels) * (cfg.batch / world.size)  # the mean over its own samples

    changes: list[tuple[Any, str, Any]] = []
    if mistake == "mean_of_means":
        changes.append((ddp_multinode, "F", SimpleNamespace(cross_entropy=average_means)))
    if mistake == "torchs_dropout":
        changes.append((SampleDropout, "forward", lambda layer, x: F.dropout(x, layer.rate, layer.training)))
    if mistake == "equal_buffers":
        changes.append((TrainState, "shard_weight", 1.0))
    found = train_script(
        ddp_multinode,
        run,
        (ddp_multinode, "init_network", lambda cfg, *_: add_dropout(unsplit(cfg), cfg.dropout, cfg.seed)),
        (ddp_multinode, "wrap_model", wrap_wrongly),
        (training_run, "score_replicated", look_before),
        *changes,
    )
    assert run.times is not None
    ranks, sums = step_timing.gather_step_times(world, run.times), sums_of_ranks(found["state"])
    slow = ScalingReport(ranks, world.hosts, 0.0).straggler if mistake == "slow_rank" else None
    exposed = min(ranks[0].exposed, default=0.0) if ranks else 0.0
    auto_shards = run.find_hook(AutoShards)
    shards = auto_shards.history if auto_shards else []
    named = {"sums": sums, "before": before, "straggler": slow, "exposed": exposed, "shards": shards}
    rows = [row for row in folder.read_attempt_rows() if "shard_0" in row] if world.is_main else []
    written = [(row["global_step"] + 1, tuple(row[f"shard_{rank}"] for rank in range(world.size))) for row in rows]
    return found | named | {"written": written} if world.is_main else {}


@functools.cache
def expected(cache: Path, case: str, shares: int | tuple[int, ...] = 1) -> dict[str, Any]:
    """One process that trains the unsplit model by the bare loop; shares have BatchNorm buffers of their own."""
    cfg, _ = settings(case)
    prepared = prepare_for(cfg, str(cache))
    torch.manual_seed(1234)
    return reference.trained(cfg, unsplit(cfg), prepared, shares=shares)


def wrong(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """What differs from the reference, or between the processes."""
    counts = ("test_accuracy", "test_samples")
    unequal = [name for name in counts if found["scores"][name] != expected["scores"][name]]
    apart = ["processes hold different models"] if len(set(found["sums"])) > 1 else []
    return differences(found, expected) + unequal + apart


if __name__ == "__main__":
    sys.exit(save_cases(settings, train, *sys.argv[1:]))
