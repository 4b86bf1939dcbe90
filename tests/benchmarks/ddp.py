"""What data parallelism gains and costs: ResNet-18 at 32 px, global batch 128, on generated images.

    python tests/benchmarks/ddp.py            about four minutes
    python tests/benchmarks/ddp.py 3          three rounds instead of six

Two processes with one thread each against one process with one thread (and with two: the same processors), against
the same step sending nothing, and against the same training written with Accelerate and with Lightning Fabric.
Goals stand beside what was measured; nothing fails because it was slow. Raw samples go to tests/benchmarks/results/.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this tree, wherever installed packages point to

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from common.core import config, seeds
from common.core.errors import user_errors
from common.data import loader as data
from common.data import prepare
from common.data.prepare import Prepared
from common.distributed.rendezvous import World
from common.measure import step_timing
from common.runs.folder import Folder
from common.training import optimizers
from common.training.run import Run
from configs.ddp_multinode import Config
from experiments import ddp_multinode as experiment
from tests.benchmarks.learner import QUIET, ROOT, require_same
from tests.benchmarks.measure import Report, Row, Side, Team, at_least, at_most, interleave

STEPS = 3  # a turn, after one that does not count
TOLERANCE = 1e-3  # of the first losses, which the order of additions changes
IMAGES = ("data.name=generated", "data.samples=640")
SETTINGS = ("model=resnet18", "batch=128", "optim.warmup=0", "optim.decay=constant", *IMAGES)
Step = Callable[[Tensor, Tensor], Tensor]


class Bench:
    """The prepared images and a scratch folder."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.prepared: Prepared = prepare.prepare(self.settings().data)

    def settings(self, *values: str) -> Config:
        return config.load(Config, [*QUIET, *SETTINGS, f"data.cache={self.scratch}", *values])

    def batches(self, cfg: Config, world: World) -> list[tuple[Tensor, Tensor]]:
        images, share = data.Images(self.prepared, "train"), (world.rank, world.size)
        loader = data.Loader(images, cfg.batch, cfg.seed, world.device, torch.float32, shard=share)
        return list(islice(loader, STEPS + 1))

    def model(self, cfg: Config, world: World) -> nn.Module:
        torch.manual_seed(seeds.derive(cfg.seed, "init"))
        return experiment.build(cfg, data.Images(self.prepared, "train"), world)

    def turn(self, world: World, train: Callable[[list[tuple[Tensor, Tensor]]], None], cfg: Config) -> Side:
        batches = self.batches(cfg, world)

        def side() -> float:
            train(batches[:1])
            dist.barrier()
            start = time.perf_counter()
            train(batches[1:])
            dist.barrier()
            return (time.perf_counter() - start) / STEPS

        return side

    def took_down(self, side: str, world: World, losses: list[float]) -> None:
        """Keep the mean over the processes of the first losses, to compare the sides by."""
        value = torch.tensor(losses)
        dist.all_reduce(value)
        if world.is_main:
            torch.save(value / world.size, self.scratch / f"{side}.pt")

    # ---- sides

    def ours(self, name: str, world: World, *values: str, silent: bool = False) -> Side:
        """The experiment's own train_epoch, with its time stamps and its log."""
        cfg = self.settings(f"processes_per_node={world.size}", *values)
        path = Folder.create(self.scratch / name, "bench", config.to_yaml(cfg)).claim().path if world.is_main else None
        run = Run(cfg, Folder(world.broadcast(path), 1), world, self.prepared)
        run.averaged, run.total = True, 10**9
        model = experiment.wrap(cfg, self.model(cfg, world), world)
        if silent:  # wrong for training: each rank keeps its own gradient, the limit to measure against
            cast(Any, model).register_comm_hook(None, lambda _, bucket: completed(bucket.buffer()))
        optimizer = optimizers.make(model.parameters(), cfg.optim)
        times = step_timing.StepTimes(model, world.device)
        steps = 0

        def train(batches: list[tuple[Tensor, Tensor]]) -> None:
            nonlocal steps
            run.flushed = time.perf_counter()  # so that waiting for the turn does not look like slow steps
            loader = cast(data.Loader, batches)
            steps = experiment.train_epoch(cfg, model, optimizer, loader, run, times, steps, 10**9)
            if steps == STEPS + 1:
                run.flush()
                self.took_down(name, world, [row["loss"] for row in run.folder.metrics()][:2] or [0.0, 0.0])

        return self.turn(world, train, cfg)

    def other(
        self, name: str, world: World, prepare_step: Callable[[nn.Module, Any], tuple[nn.Module, Any, Any]]
    ) -> Side:
        """The same training as somebody else's library writes it."""
        cfg = self.settings(f"processes_per_node={world.size}")
        inner = self.model(cfg, world)
        made = torch.optim.SGD(inner.parameters(), lr=cfg.optim.lr, momentum=0.9, nesterov=True, fused=True)
        model, optimizer, backward = prepare_step(inner, made)
        rate, losses = optimizers.rate(cfg.optim, 0, 1, cfg.batch), list[Tensor]()
        model.train()

        def train(batches: list[tuple[Tensor, Tensor]]) -> None:
            for x, y in batches:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                backward(loss)
                for group in optimizer.param_groups:
                    group["lr"] = rate
                optimizer.step()
                losses.append(loss.detach())
            if len(losses) == STEPS + 1:
                self.took_down(name, world, torch.stack(losses[:2]).tolist())

        return self.turn(world, train, cfg)


def completed(value: Tensor) -> torch.futures.Future[Tensor]:
    """A future that holds its value already."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(value)
    return future


def announce(world: World) -> None:
    """What torchrun would have set: the libraries look there. The group that exists already is the one they use."""
    places = {"RANK": world.rank, "LOCAL_RANK": world.rank, "WORLD_SIZE": world.size, "LOCAL_WORLD_SIZE": world.size}
    os.environ.update({name: str(value) for name, value in places.items()} | {"GROUP_RANK": "0"})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", TORCHELASTIC_RUN_ID="bench", ACCELERATE_USE_CPU="1")


def accelerate(model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any, Any]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == dist.get_world_size()
    model, optimizer = accelerator.prepare(model, optimizer)
    return model, optimizer, accelerator.backward


def fabric(model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any, Any]:
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import TorchElasticEnvironment

    runner = Fabric(
        accelerator="cpu", devices=dist.get_world_size(), strategy="ddp", plugins=[TorchElasticEnvironment()]
    )
    runner.launch()
    assert runner.world_size == dist.get_world_size()
    model, optimizer = runner.setup(model, optimizer)
    return model, optimizer, runner.backward


def main(rounds: int) -> None:
    with user_errors(), tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        bench = Bench(Path(scratch))
        report = Report("ddp", ROOT / "tests" / "benchmarks" / "results")

        def two(world: World) -> dict[str, Side]:
            announce(world)
            return {
                "ours": bench.ours("ours", world),
                "silent": bench.ours("silent", world, silent=True),
                "accelerate": bench.other("accelerate", world, accelerate),
                "fabric": bench.other("fabric", world, fabric),
                "looks": bench.ours("looks", world, "find_unused_parameters=true"),
            }

        teams = [
            Team(2, 1, two),
            Team(1, 1, lambda world: {"one": bench.ours("one", world)}),
            Team(1, 2, lambda world: {"one with two threads": bench.ours("one with two threads", world)}),
        ]
        taken = interleave(teams, rounds=rounds, drop=1)
        first = {side: torch.load(bench.scratch / f"{side}.pt").tolist() for side in taken.seconds}
        for side in ("accelerate", "fabric", "looks"):
            require_same(side, first[side], first["ours"], TOLERANCE)
        rows = [
            Row(
                f"ms/step: {side}",
                f"{taken.median(side) * 1e3:.1f}",
                note=f"{median(taken.cores[side]):.1f} cores busy",
            )
            for side in taken.seconds
        ]
        rows += [
            at_most("ours / Accelerate", taken.ratio("ours", "accelerate"), 1.01),
            at_most("ours / Fabric", taken.ratio("ours", "fabric"), 1.01),
            at_least("efficiency against sending nothing", taken.ratio("silent", "ours"), 0.85),
            Row(
                "efficiency against one process",
                str(taken.ratio("one", "ours", 0.5)),
                note="of two times its samples/s",
            ),
            Row("one process with two threads / ours", str(taken.ratio("one with two threads", "ours"))),
            Row("find_unused_parameters=true / ours", str(taken.ratio("looks", "ours"))),
        ]
        report.section(f"ddp in two processes with one thread each: {' '.join(SETTINGS)}", rows, {"": taken})
        print(f"\nraw samples: {report.file.relative_to(ROOT)}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 6)
