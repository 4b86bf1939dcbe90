"""Data-parallel training written with Accelerate and with Lightning Fabric, as sides of a comparison."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from common.data import loader as data
from common.data import prepare
from common.data.samples import Images
from common.models import networks
from common.ranks.rendezvous import World
from common.system import seeds
from common.techniques.data_parallel.ddp import make_unsynchronized_buffer_options
from common.training import learning_rate
from tests.benchmarks.measure import Samples, Side, Team, require_same

STEPS = 3  # a turn, after one that does not count
Step = Callable[[Tensor, Tensor, bool], Tensor]
Library = Callable[[nn.Module, Any, int, bool, float | None], Step]


def announce(world: World) -> None:
    """Set the variables of torchrun: the libraries read them, and use the group that exists already."""
    variables = {
        "RANK": f"{world.rank}",
        "LOCAL_RANK": f"{world.rank}",
        "WORLD_SIZE": f"{world.size}",
        "LOCAL_WORLD_SIZE": f"{world.size}",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "bench",
        "ACCELERATE_USE_CPU": "1",
    }
    os.environ.update(variables)


def accelerate(model: nn.Module, optimizer: Any, window: int, bf16: bool, bucket_mb: float | None) -> Step:
    """A microbatch with Accelerate; its window ends with a step of the optimizer."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    # Accelerate does not know forward_sync_buffers, the newer name of broadcast_buffers.
    options = DistributedDataParallelKwargs(
        bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True, broadcast_buffers=False
    )
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="bf16" if bf16 else "no",
        gradient_accumulation_steps=window,
        kwargs_handlers=[options],
    )
    assert accelerator.num_processes == dist.get_world_size()
    model, optimizer = accelerator.prepare(model, optimizer)

    def step(x: Tensor, y: Tensor, last: bool) -> Tensor:
        with accelerator.accumulate(model):
            with accelerator.autocast():
                loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)  # which divides
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return step


def fabric(model: nn.Module, optimizer: Any, window: int, bf16: bool, bucket_mb: float | None) -> Step:
    """A microbatch with Lightning Fabric; the last of a window ends with a step of the optimizer."""
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.fabric.strategies import DDPStrategy

    options = make_unsynchronized_buffer_options()
    runner = Fabric(
        accelerator="cpu",
        strategy=DDPStrategy(bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True, **options),
        precision="bf16-mixed" if bf16 else "32-true",
        devices=dist.get_world_size(),
        plugins=[TorchElasticEnvironment()],
    )
    runner.launch()
    assert runner.world_size == dist.get_world_size()
    wrapped, optimizer = runner.setup(model, optimizer)

    def step(x: Tensor, y: Tensor, last: bool) -> Tensor:
        quiet = contextlib.nullcontext() if window == 1 else runner.no_backward_sync(wrapped, enabled=not last)
        with quiet:
            loss = F.cross_entropy(wrapped(x), y)
            runner.backward(loss / window)
        if last:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return step


LIBRARIES: dict[str, Library] = {"Accelerate": accelerate, "Fabric": fabric}


def data_parallel_team(scratch: Path, cfg: Any, window: int = 1, bf16: bool = False) -> Team:
    """Two processes with one thread each that train the config's model on its data with each library in turn.

    `cfg` is an experiment's config; the first loss of each library is left in `scratch`.
    """
    prepared = prepare.prepare_dataset(cfg.data)

    def sides(world: World) -> dict[str, Side]:
        announce(world)
        return {name: library_side(scratch, name, world, cfg, prepared, window, bf16) for name in LIBRARIES}

    return Team(2, 1, sides)


def library_side(scratch: Path, name: str, world: World, cfg: Any, prepared: Any, window: int, bf16: bool) -> Side:
    """The same training as the script's, written with a library. DDP has the same arguments."""
    images = Images(prepared, "train")
    torch.manual_seed(seeds.derive_seed(cfg.seed, "init"))
    model = networks.build_network(cfg.model, images.shape, images.outputs).train()
    rate = learning_rate.compute_learning_rate(cfg.optim, 0, 1, cfg.batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, nesterov=True, fused=True)
    bucket_mb = getattr(cfg, "bucket_mb", None)  # None selects DDP's default, as in scripts without this setting
    step = LIBRARIES[name](model, optimizer, window, bf16, bucket_mb)
    shard = (world.rank, world.size)
    loader = data.Loader.from_config(images, cfg, world.device, batch=cfg.batch // window, shard=shard)
    microbatches = list(islice(loader, window * (STEPS + 1)))
    losses: list[Tensor] = []

    def train(turn: list[Any]) -> None:
        parts = [step(x, y, number % window == 0) for number, (x, y) in enumerate(turn, 1)]
        losses.append(torch.stack(parts[:window]).mean())

    def side() -> float:
        train(microbatches[:window])
        dist.barrier()
        start = time.perf_counter()
        train(microbatches[window:])
        dist.barrier()
        seconds = (time.perf_counter() - start) / STEPS
        first_loss = losses[0].double().clone()
        dist.all_reduce(first_loss)
        if world.is_main:
            (scratch / f"{name}.loss").write_text(repr(first_loss.item() / world.size))
        return seconds

    return side


def same_first_losses(ours: str, tolerance: float) -> Callable[[Path, Samples], None]:
    """Return a check that the libraries began with the loss of the script."""

    def check(scratch: Path, samples: Samples) -> None:
        expected = samples.values[ours]["first_loss"][:1]
        for name in LIBRARIES:
            loss = float((scratch / f"{name}.loss").read_text())
            require_same(name, [loss], expected, tolerance)

    return check
