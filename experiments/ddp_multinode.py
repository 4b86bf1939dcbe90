"""Data parallelism: every process trains the same model on its share of each batch, and gradients are averaged.

    python experiments/ddp_multinode.py                                        two processes on this machine
    python experiments/ddp_multinode.py processes_per_node=4 compare=true      four, and how much faster than one
    python experiments/ddp_multinode.py strategy=fsdp clip=1                   parameters sharded over the processes
    python experiments/ddp_multinode.py model=resnet18 data.name=cifar10 sync_batchnorm=true
    python experiments/ddp_multinode.py model=resnet18 data.name=generated communication=bf16 steps=50
    torchrun --nproc-per-node=2 experiments/ddp_multinode.py                   started by somebody else
    make exp NAME=ddp_multinode NODES=2                                        on a cluster

Takes about a minute on 2 CPU cores. Expect 98 % test accuracy on MNIST after one epoch (without MNIST: on
the built-in digits).

How it works. `batch` is the global batch: process r of p takes the r-th of p equal slices of it. The mean of the
processes' mean gradients is the gradient of the mean loss over the whole batch, so every process takes the
step that one process would take, and the models stay equal. DistributedDataParallel averages gradients in
buckets while backward still works on earlier layers; fully_shard keeps only a share of each parameter, gathers
a layer's parameters before it is used, and gives each process the averaged gradient of its own share.
BatchNorm sees only a process's own share, unless it is synchronised.
"""

from __future__ import annotations

import common  # isort: skip  # noqa: F401 (first: it answers Ctrl-C while torch is imported)

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer

from common.checkpoint.train_state import TrainState
from common.data import loader as data
from common.distributed import ddp as hooks
from common.distributed import sync_batchnorm
from common.distributed.rendezvous import World
from common.measure import step_timing, tables
from common.models import networks
from common.training import loop, optimizers, single_process_baseline
from common.training.entry_point import start
from common.training.evaluate import classify_shared
from common.training.run import Run
from configs.ddp_multinode import Config

ALONE = 20  # steps of one process that `compare` times, if they take no longer than
PATIENCE = 10.0  # seconds


def build(cfg: Config, train: data.Images, world: World) -> nn.Module:
    """The model, with the same weights in every process: they draw from one seed."""
    return networks.for_images(cfg.model, train.shape, train.classes).to(world.device, getattr(torch, cfg.dtype))


def wrap(cfg: Config, model: nn.Module, world: World) -> nn.Module:
    """The model that averages gradients over all processes in its backward."""
    if cfg.sync_batchnorm:
        model = sync_batchnorm.convert_sync_batchnorm(model, world.device)
    if cfg.strategy == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard  # two seconds to import, so only when asked for

        mesh = init_device_mesh(world.device.type, (world.size,))
        for layer in model.children():
            fully_shard(layer, mesh=mesh)  # a layer's parameters are gathered when it is reached
        fully_shard(model, mesh=mesh)
        return model
    ddp = hooks.wrap_ddp(
        model,
        world.device,
        bucket_cap_mb=hooks.choose_bucket_mb(cfg.communication, cfg.bucket_mb, world.backend),
        gradient_as_bucket_view=cfg.gradient_as_bucket_view,
        static_graph=cfg.static_graph,
        find_unused_parameters=cfg.find_unused_parameters,
    )
    hooks.register_comm_hook(ddp, cfg.communication, cfg.powersgd_rank)
    return ddp


def train_epoch(
    cfg: Config,
    model: nn.Module,
    optimizer: Optimizer,
    loader: data.Loader,
    run: Run,
    times: step_timing.StepTimes,
    step: int,
    total: int,
) -> int:
    """Train on the rest of the loader's epoch, or up to `total` steps; returns the steps done since the start."""
    model.train()
    for x, y in times.batches(loader):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)  # the mean over this process's share of the batch
        times.mark("backward")
        loss.backward()  # at its end every process has the mean of all processes' gradients
        times.mark("end of backward")
        if cfg.clip:
            nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
        optimizers.set_rate(optimizer, optimizers.rate(cfg.optim, step, total, cfg.batch))
        optimizer.step()
        step += 1
        run.log(step, loss=loss.detach())
        run.checkpoint_or_stop(step)  # saves now and then, and leaves if it was told to
        if step == total:
            break
    return step


def evaluate(
    cfg: Config, model: nn.Module, test: data.Images, world: World, look: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """Loss and accuracy over all test samples, each seen by one process."""
    size, dtype = cfg.eval_batch, getattr(torch, cfg.dtype)
    return classify_shared(hooks.unwrap(model), test, world, batch=size, dtype=dtype, look=look)


def seconds_alone(cfg: Config, train: data.Images, world: World) -> float:
    """Seconds of one process's step with the whole batch, measured on rank 0 while the others wait."""
    seconds = 0.0
    if world.is_main:
        model = build(cfg, train, world)
        seconds = single_process_baseline.seconds(
            single_process_baseline.trainer(cfg, model, model, train, world.device), world.device, ALONE, PATIENCE
        )
    return float(world.broadcast(seconds))


def main(cfg: Config, world: World, run: Run) -> None:
    train, test = data.load_train_test(run.prepared, cfg.data)
    loader = data.Loader.from_config(train, cfg, world.device, shard=(world.rank, world.size))
    model = wrap(cfg, build(cfg, train, world), world)
    optimizer = optimizers.make(model.parameters(), cfg.optim)
    times = step_timing.StepTimes(model, world.device, model.children() if cfg.strategy == "fsdp" else ())
    run.before_backward = times.recent  # the heartbeats tell who is slow
    run.total = total = loop.total_steps(cfg, loader)
    run.averaged = True  # the loss of a step is the mean over the processes

    hooks.warm_up_buckets(
        model, train.load_inputs(slice(0, cfg.batch // world.size), world.device, getattr(torch, cfg.dtype))
    )
    compression = hooks.get_powersgd_state(model)
    step = run.resume(
        TrainState([hooks.unwrap(model)], optimizer, loader, world, replicated=True, compression=compression)
    )
    scores = loop.train(
        run,
        loader,
        step,
        lambda done: train_epoch(cfg, model, optimizer, loader, run, times, done, total),
        lambda: evaluate(cfg, model, test, world, run.look),
    )
    conclude(cfg, world, run, model, times, scores, seconds_alone(cfg, train, world) if cfg.compare else 0.0)


def conclude(
    cfg: Config,
    world: World,
    run: Run,
    model: nn.Module,
    times: step_timing.StepTimes,
    scores: dict[str, float],
    alone: float,
) -> None:
    """The result file and the table."""
    seconds, rate = run.step_seconds(), run.samples_per_second()
    communication = None
    if cfg.strategy == "ddp" and cfg.communication != "powersgd" and world.size > 1:
        size = hooks.BYTES.get(cfg.communication, getattr(torch, cfg.dtype).itemsize)
        communication = step_timing.communication_seconds(model, cfg.bucket_mb, size)
    ranks = [rank for rank in world.gather(times.summary()) if rank]
    if not world.is_main:
        return
    scaled = step_timing.ScalingReport(ranks, world.hosts, communication, alone, seconds)
    speed = {"samples_per_second": rate, "step_seconds": seconds}
    run.finish(**scores, **speed, data=run.prepared.name, **scaled.result())
    rows = loop.rows(run, world, scores) | {
        "strategy": f"{cfg.strategy}, {cfg.model}, batch {cfg.batch} = {world.size} x {cfg.batch // world.size}",
    }
    run.say(tables.table(rows | scaled.rows() | run.places()))


if __name__ == "__main__":
    start(main, Config)
