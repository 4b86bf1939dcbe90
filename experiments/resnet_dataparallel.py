"""A ResNet copied to several devices: nn.DataParallel, DistributedDataParallel, and one device beside them.

    python experiments/resnet_dataparallel.py                                   ddp, and one device to compare with
    python experiments/resnet_dataparallel.py strategy=data_parallel            one process, all its GPUs
    python experiments/resnet_dataparallel.py strategy=data_parallel functional=true
    python experiments/resnet_dataparallel.py sweep=true                        each strategy as runs of its own
    python experiments/resnet_dataparallel.py sync_batchnorm=true data.name=cifar10 data.augment=crop_flip
    python experiments/resnet_dataparallel.py data.name=generated data.image_size=64 batch=128
    python experiments/resnet_dataparallel.py model=resnet50 weights=FILE       begin with trained weights
    make exp NAME=resnet_dataparallel NODES=2                                   on a cluster: ddp only

Takes about two minutes on 2 CPU cores. Expect 95 % test accuracy after 100 steps on MNIST (without MNIST: on the
built-in digits).

nn.DataParallel (ResNet: He et al. 2015, arXiv 1512.03385) is one process with a thread for each GPU. In every step it
splits the batch into chunks, copies the model to all GPUs, and gathers outputs on the first one, which also adds up the
gradients and holds the optimizer: it needs more memory than the others, and Python's lock lets one thread run at a
time. What BatchNorm learns in the copies is thrown away with them, but for the first GPU's. Under DDP (Li et al. 2020,
arXiv 2006.15704) each device has a rank that keeps its model; only gradients travel, while backward still works, and
each rank's BatchNorm buffers survive: they are averaged before an evaluation. A batch need not divide into equal parts:
the last one of an epoch may even be smaller than the number of devices, and some of them then have nothing to do.
"""

from __future__ import annotations

from common.api import Run, TrainState, build_optimizer, ddp, init_network, score_replicated, start, sync_batchnorm
from common.core.text import format_count
from common.distributed.rendezvous import World
from common.measure.device_report import report_devices
from common.training.single_process_baseline import Side, compare_sides
from configs.resnet_dataparallel import ONE_DEVICE, Config

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

Forward = Callable[[Tensor], Tensor]


def build_model(cfg: Config, run: Run) -> nn.Module:
    """Build the model, with the same weights on every rank: all draw from one seed."""
    return init_network(cfg, run.sample_shape, run.classes).to(run.device, run.dtype)


def list_gpus(world: World) -> list[int]:
    """Return the numbers of the GPUs that one process can use: DataParallel's devices."""
    return list(range(torch.cuda.device_count())) if world.device.type == "cuda" else []


def wrap_model(cfg: Config, model: nn.Module, world: World) -> nn.Module:
    """Wrap the model as the strategy does; without GPUs DataParallel leaves it as it is."""
    if cfg.strategy == "ddp":
        if cfg.sync_batchnorm:
            model = sync_batchnorm.convert_sync_batchnorm(model, world.device)
        model = sync_batchnorm.skip_empty_batches(model)  # a partial batch may leave a rank without a sample
        return ddp.wrap_ddp(model, world.device, gradient_as_bucket_view=True)
    # told to use none of the GPUs that are there, the class fails, where without any it calls the model
    gpus = list_gpus(world)
    return nn.DataParallel(model, gpus) if cfg.strategy == "data_parallel" and gpus else model


def choose_forward(cfg: Config, model: nn.Module, world: World) -> Forward:
    """Return the forward: the wrapped model, or with functional=true DataParallel as a function of the bare one."""
    # a run of data_parallel compares itself with other strategies; without GPUs the function is an error
    if cfg.strategy == "data_parallel" and cfg.functional and list_gpus(world):
        return partial(nn.parallel.data_parallel, ddp.unwrap_ddp(model), device_ids=list_gpus(world))
    return model


def main(cfg: Config, run: Run) -> None:
    world, inner = run.world, build_model(cfg, run)
    model = wrap_model(cfg, inner, world)
    forward = choose_forward(cfg, model, world)
    optimizer = build_optimizer(model.parameters(), cfg.optim)
    batches = run.batches(shard=run.shard, keep_partial=cfg.last_batch == "keep")
    gpus = len(list_gpus(world))
    devices = max(1, gpus) if cfg.strategy == "data_parallel" else world.size
    if cfg.strategy == "data_parallel" and devices == 1:
        run.log_message(ONE_DEVICE.format(gpus))
    compares = cfg.compare and devices > 1 and len(run.train_set) >= cfg.batch
    if compares:
        run.log_message("after training, the strategies are compared in turns; compare=false leaves that out")
    ddp.warm_up_buckets(model, run.load_example(cfg.batch // world.size))
    state = TrainState([ddp.unwrap_ddp(model)], optimizer, batches, world, replicated=True)

    def evaluate() -> dict[str, float]:
        return score_replicated(ddp.unwrap_ddp(model), run)

    run.resume(state)
    running = torch.zeros(2, device=run.device, dtype=torch.float64)  # the sum of losses, and of how many
    for step in run.steps(state, evaluate):
        with step:
            optimizer.zero_grad()
            # the mean over the ranks is the batch's mean loss, in a partial batch of unequal shards, too
            loss = F.cross_entropy(forward(step.x), step.y, reduction="sum") / step.mean_shard
            step.mark("backward")
            loss.backward()
            step.mark("end of backward")
            optimizer.step()
            step.log(loss=loss.detach())
        running += torch.stack([loss.detach().double(), torch.ones_like(running[0])])  # stays on the device
        if step.number % cfg.loss_every == 0:  # the only time that somebody waits for the loss
            dist.all_reduce(running)
            total, count = running.tolist()
            run.log_message(f"[epoch {step.epoch + 1}, step {step.number:5d}] running loss {total / count:.3f}")
            running.zero_()
        if step.number % batches.steps == 0:  # of one epoch
            running.zero_()
    compare = partial(compare_strategies, cfg, run) if compares else dict
    samples = len(run.train_set)
    run.report(*report_devices(cfg, world, run.times, compare, run.folder.path, gpus, samples, run.total))


def compare_strategies(cfg: Config, run: Run) -> dict[str, list[float]]:
    """Return samples/s of each strategy, round by round; the sides take turns. All ranks call it.

    While rank 0 measures one process, with a rank's threads and with those of all, the others wait.
    """
    world = run.world
    threads = {world.threads, world.threads * world.local_size} if run.device.type == "cpu" else {world.threads}
    plan = [(f"single, {format_count(count, 'thread')}", "single", count) for count in sorted(threads)]
    plan += [("data_parallel", "data_parallel", world.threads)] if len(list_gpus(world)) > 1 else []
    plan += [("ddp", "ddp", world.threads)] if world.size > 1 else []

    def make_side(name: str, strategy: Any, count: int) -> Side:
        """Make a side with a model of its own: the trained one stays as it is."""
        own = replace(cfg, strategy=strategy)

        def make_model() -> tuple[Forward, nn.Module]:
            model = wrap_model(own, build_model(own, run), world)
            return choose_forward(own, model, world), model

        return Side(name, count, make_model, run.shard if strategy == "ddp" else None)

    return compare_sides(run, [make_side(*point) for point in world.broadcast(list(map(list, plan)))])


if __name__ == "__main__":
    start(main, Config)
