"""mnist_pipeline as a thing to measure: its own model, optimizer, run folder and training loop, fed from anywhere."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from common.core import config, seeds
from common.data import loader as data
from common.data import prepare
from common.distributed.rendezvous import World
from common.runs.folder import Folder
from common.training import optimizers
from common.training.run import Run
from configs.mnist_pipeline import Config
from experiments import mnist_pipeline as experiment
from tests.benchmarks.measure import Report

ROOT = config.ROOT
UNSPLIT = ("stages=1", "microbatches=1")
QUIET = ("log.progress=none", "log.level=error", "wandb.mode=disabled", "checkpoint.every_seconds=0")
Batch = tuple[Tensor | None, Tensor | None]


class Bench:
    """The prepared data, a scratch folder, and the report."""

    def __init__(self, scratch: Path) -> None:
        self.scratch, self.report = scratch, Report("mnist_pipeline", ROOT / "tests" / "benchmarks" / "results")
        self.prepared = prepare.prepare(self.settings().data)
        self.report.content["data"] = self.prepared.name
        print(f"data: {self.prepared.name}")

    @functools.cached_property
    def images(self) -> data.Images:
        """The training part. For forked processes: to make it is to compute, which forbids forking afterwards."""
        return data.Images(self.prepared, "train")

    def settings(self, *values: str) -> Config:
        return config.load(Config, [*QUIET, *values])

    def learner(self, world: World, name: str, *values: str, total: int = 10**6) -> Learner:
        return Learner(self, world, name, self.settings(*values), total)

    def batches(self, cfg: Config, count: int) -> list[Batch]:
        loader = data.Loader(self.images, cfg.batch, cfg.seed, torch.device("cpu"), torch.float32, block=1)
        return list(islice(loader, count))


class Learner:
    """The experiment's model, optimizer and run folder, ready for its own train_epoch."""

    def __init__(self, bench: Bench, world: World, name: str, cfg: Config, total: int) -> None:
        torch.manual_seed(seeds.derive(cfg.seed, "init"))
        runs = bench.scratch / name
        path = world.broadcast(
            Folder.create(runs, "bench", config.to_yaml(cfg)).claim().path if world.is_main else None
        )
        self.cfg, self.step, self.world = cfg, 0, world
        self.run = Run(cfg, Folder(path, 1), world, bench.prepared)
        self.pipe = experiment.build(cfg, world, self.run, torch.float32)
        self.optimizer = optimizers.make(self.pipe.module.parameters(), cfg.optim)
        self.run.source, self.run.total, self.total = self.pipe.last_rank, total, total

    def train(self, batches: Any) -> None:
        """Train on the batches, which may come from any loader."""
        loader = cast(data.Loader, batches)
        self.step = experiment.train_epoch(self.cfg, self.pipe, self.optimizer, loader, self.run, self.step, self.total)

    def ends(self, batches: Sequence[Batch]) -> list[Batch]:
        """What this process needs of the batches."""
        return [(x if self.pipe.has_first else None, y if self.pipe.has_last else None) for x, y in batches]


def require_same(what: str, one: Sequence[float], other: Sequence[float], tolerance: float) -> None:
    """Stop unless two trainings came out the same: times of different work are not to be compared."""
    worst = max(abs(a - b) / max(abs(b), 1e-2) for a, b in zip(one, other, strict=True))
    if not worst <= tolerance:
        raise AssertionError(f"{what}: results differ by {worst:.1e}, allowed {tolerance:.0e}")


def weights(model: torch.nn.Module) -> list[float]:
    return [total for p in model.parameters() for total in (p.sum().item(), p.abs().sum().item())]
