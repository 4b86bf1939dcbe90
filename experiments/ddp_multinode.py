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

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from common import data, hooks, models, norm, optim, report, scaling
from common.config import UserError
from common.evaluate import classify
from common.launch import World
from common.run import Run
from common.start import start
from common.training import Training
from configs.ddp_multinode import Config

ALONE = 20  # steps of one process that `compare` times, if they take no longer than
PATIENCE = 10.0  # seconds


def build(cfg: Config, train: data.Images, world: World) -> nn.Module:
    """The model, with the same weights in every process: they draw from one seed."""
    kind = models.ResNet18 if cfg.model == "resnet18" else models.ConvNet
    return kind(train.shape, train.classes).to(world.device, getattr(torch, cfg.dtype))


def wrap(cfg: Config, model: nn.Module, world: World) -> nn.Module:
    """The model that averages gradients over all processes in its backward."""
    if cfg.sync_batchnorm:
        model = norm.synchronised(model, world.device)
    if cfg.strategy == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard  # two seconds to import, so only when asked for

        mesh = init_device_mesh(world.device.type, (world.size,))
        for layer in model.children():
            fully_shard(layer, mesh=mesh)  # a layer's parameters are gathered when it is reached
        fully_shard(model, mesh=mesh)
        return model
    ddp = DistributedDataParallel(
        model,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        bucket_cap_mb=hooks.bucket_mb(cfg.communication, cfg.bucket_mb, world.backend),
        gradient_as_bucket_view=cfg.gradient_as_bucket_view,
        static_graph=cfg.static_graph,
        find_unused_parameters=cfg.find_unused_parameters,
        **hooks.BUFFERS_STAY,
    )
    hooks.register(ddp, cfg.communication, cfg.powersgd_rank)
    return ddp


def train_epoch(
    cfg: Config,
    model: nn.Module,
    optimizer: Optimizer,
    loader: data.Loader,
    run: Run,
    times: scaling.StepTimes,
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
        optim.set_rate(optimizer, optim.rate(cfg.optim, step, total, cfg.batch))
        optimizer.step()
        step += 1
        run.log(step, loss=loss.detach())
        run.safe_point(step)  # saves now and then, and leaves if it was told to
        if step == total:
            break
    return step


def evaluate(cfg: Config, model: nn.Module, test: data.Images, world: World) -> dict[str, float]:
    """Loss and accuracy over all test samples, each seen by one process."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    norm.agree(inner)  # each process's BatchNorm has seen other samples
    inner.eval()
    dtype = getattr(torch, cfg.dtype)
    return classify(lambda x, _: inner(x), test, world, batch=cfg.eval_batch, dtype=dtype, split=True)


def seconds_alone(cfg: Config, train: data.Images, world: World) -> float:
    """Seconds of one process's step with the whole batch, measured on rank 0 while the others wait."""
    seconds = 0.0
    if world.is_main:
        model = build(cfg, train, world).train()
        optimizer = optim.make(model.parameters(), cfg.optim)
        loader = data.Loader(train, cfg.batch, cfg.seed, world.device, getattr(torch, cfg.dtype), block=cfg.data.block)
        began, marks = time.perf_counter(), []
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            scaling.wait_for(loss)
            marks.append(time.perf_counter())
            if len(marks) > 2 and (len(marks) == ALONE or marks[-1] - began > PATIENCE):
                break
        seconds = (marks[-1] - marks[1]) / max(1, len(marks) - 2)
    return float(world.broadcast(seconds))


def main(cfg: Config, world: World, run: Run) -> None:
    train, test = data.load(run.prepared, cfg.data)
    dtype = getattr(torch, cfg.dtype)
    ahead: Any = {"share": (world.rank, world.size), "block": cfg.data.block, "workers": cfg.data.workers}
    try:
        loader = data.Loader(train, cfg.batch, cfg.seed, world.device, dtype, **ahead)
    except ValueError as error:
        raise UserError(str(error)) from None
    model = wrap(cfg, build(cfg, train, world), world)
    optimizer = optim.make(model.parameters(), cfg.optim)
    times = scaling.StepTimes(model, world.device)
    total = min(cfg.steps or cfg.epochs * loader.steps, cfg.epochs * loader.steps)
    run.averaged, run.total = True, total  # the loss of a step is the mean over the processes

    hooks.settle(model, train.inputs(slice(0, cfg.batch // world.size), world.device, dtype))
    whole = [model.module if isinstance(model, DistributedDataParallel) else model]
    step = run.resume(Training(whole, optimizer, loader, world, replicated=True))
    while True:
        if step < total:  # not where only the last evaluation is missing
            step = train_epoch(cfg, model, optimizer, loader, run, times, step, total)
        scores = evaluate(cfg, model, test, world)
        run.record(step, **scores)
        words = f"test_loss {scores['test_loss']:.4f}  test_accuracy {scores['test_accuracy']:.2%}"
        run.say(f"epoch {step / loader.steps:.3g}  step {step}  {words}")
        if step >= total:
            break
    conclude(cfg, world, run, model, times, scores, seconds_alone(cfg, train, world) if cfg.compare else 0.0)


def conclude(
    cfg: Config,
    world: World,
    run: Run,
    model: nn.Module,
    times: scaling.StepTimes,
    scores: dict[str, float],
    alone: float,
) -> None:
    """The result file and the table."""
    seconds, rate = run.step_seconds(), run.samples_per_second()
    communication = None
    if cfg.strategy == "ddp" and cfg.communication != "powersgd" and world.size > 1:
        size = hooks.BYTES.get(cfg.communication, getattr(torch, cfg.dtype).itemsize)
        communication = scaling.communication_seconds(model, cfg.bucket_mb, size)
    ranks = [rank for rank in world.gather(times.summary()) if rank]
    if not world.is_main:
        return
    names_stragglers = cfg.strategy == "ddp"
    scaled = scaling.ScalingReport(ranks, world.hosts, communication, alone, seconds, names_stragglers)
    speed = {"samples_per_second": rate, "step_seconds": seconds}
    run.finish(**scores, **speed, data=run.prepared.name, **scaled.result())
    hosts = ", ".join(sorted(set(world.hosts)))
    rows = {
        "data": f"{run.prepared.name}, {scores['test_samples']} test samples",
        "test accuracy": f"{scores['test_accuracy']:.2%}",
        "test loss": f"{scores['test_loss']:.4f}",
        "throughput": f"{rate:,.0f} samples/s  (step {seconds * 1e3:.2f} ms, first steps and evaluation left out)",
        "processes": f"{world.size} with {world.threads} threads each on {world.device.type} of {hosts}",
        "strategy": f"{cfg.strategy}, {cfg.model}, batch {cfg.batch} = {world.size} x {cfg.batch // world.size}",
    }
    run.say(report.table(rows | scaled.rows() | run.places()))


if __name__ == "__main__":
    start(main, Config)
