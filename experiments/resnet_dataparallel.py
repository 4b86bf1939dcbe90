"""A ResNet replicated on several devices: nn.DataParallel, DistributedDataParallel, and a single device.

    python experiments/resnet_dataparallel.py                                   ddp, compared with a single device
    python experiments/resnet_dataparallel.py strategy=data_parallel            one process, all its GPUs
    python experiments/resnet_dataparallel.py strategy=data_parallel functional=true
    python experiments/resnet_dataparallel.py sweep=true                        a separate run for each strategy
    python experiments/resnet_dataparallel.py sync_batchnorm=true data.name=cifar10 data.augment=crop_flip
    python experiments/resnet_dataparallel.py data.name=generated data.image_size=64 batch=128
    python experiments/resnet_dataparallel.py model=resnet50 weights=FILE       start from trained weights
    python experiments/resnet_dataparallel.py zero1=true optim.name=adam        the ranks divide the optimizer state
    make exp NAME=resnet_dataparallel NODES=2                                   on a cluster: ddp only

A run takes about two minutes on 2 CPU cores. Expect a test accuracy of 95 % on MNIST after 100 steps. If MNIST is not
available, the built-in digits are used instead. The networks are ResNets (He et al. 2015, arXiv 1512.03385).

nn.DataParallel uses one process with a thread for each GPU. In every step, it splits the batch into chunks, copies the
model to all GPUs, and gathers the outputs on the first GPU. The first GPU also sums the gradients and holds the
optimizer state, so it needs more memory than the other GPUs. The GIL lets only one thread run Python code at a time.
The BatchNorm statistics of the copies are discarded, except those of the first GPU. With DDP (Li et al. 2020, arXiv
2006.15704), each device has a rank that keeps its own model. Only gradients are communicated, while backward is still
running. The BatchNorm buffers of every rank persist and are averaged before an evaluation. The last batch of an epoch
may be partial. Some devices get no samples if a partial batch has fewer samples than there are devices.
"""

from __future__ import annotations

from common.api import Run, build_optimizer, init_network, start
from common.ranks.rendezvous import World
from common.runs.result import Report
from common.system.text import format_count
from common.techniques.data_parallel import ddp, sync_batchnorm
from common.techniques.data_parallel.device_report import report_devices
from common.techniques.data_parallel.single_process_baseline import StepVariant, measure_variant_throughputs
from common.techniques.data_parallel.state_report import report_state_bytes
from common.techniques.recompute import recompute_blocks
from common.training.loop import Step
from configs.resnet_dataparallel import ONE_DEVICE_MESSAGE, Config

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Forward = Callable[[Tensor], Tensor]


def build_model(cfg: Config, run: Run) -> nn.Module:
    """Build the model. All ranks use the same seed and therefore have equal weights."""
    network = init_network(cfg, run.sample_shape, run.outputs)
    recompute_blocks(network, cfg.memory.recompute)  # residual blocks discard activations until backward needs them
    return network.to(run.device, run.dtype)


def list_gpus(world: World) -> list[int]:
    """Return the indices of the GPUs that one process can use. DataParallel uses all of these GPUs."""
    return list(range(torch.cuda.device_count())) if world.device.type == "cuda" else []


def wrap_model(cfg: Config, model: nn.Module, run: Run, *, trains: bool = True) -> nn.Module:
    """Wrap the model as the strategy requires. Without GPUs, data_parallel returns the model unchanged.

    If `trains` is False, the model is only timed, and is not the model of the run.
    """
    if cfg.strategy == "ddp":
        if cfg.sync_batchnorm:
            model = sync_batchnorm.convert_sync_batchnorm(model, run.device)
        model = sync_batchnorm.accept_empty_batches(model)  # a rank may get no samples from a partial batch
        if not trains:
            return ddp.wrap_ddp(model, run.device, gradient_as_bucket_view=True)
        if cfg.state_sharding.zero1:
            from common.techniques.sharded_optimizer import divide_optimizer_state  # few runs need this module

            divide_optimizer_state(run)  # each rank updates some parameters, and sends them to the other ranks
        return ddp.replicate(model, run, gradient_as_bucket_view=True)
    if cfg.strategy == "data_parallel":
        gpus = list_gpus(run.world)
        if trains and len(gpus) < 2:
            run.log_message(ONE_DEVICE_MESSAGE.format(len(gpus)))
        if gpus:  # DataParallel(model, []) fails on a machine with GPUs
            return nn.DataParallel(model, gpus)
    return model


def choose_forward(cfg: Config, model: nn.Module, world: World) -> Forward:
    """Return the function that computes the outputs of the model.

    The function is the wrapped model itself. With functional=true, it is nn.parallel.data_parallel, applied to the
    unwrapped model.
    """
    gpus = list_gpus(world)
    if cfg.strategy == "data_parallel" and cfg.functional and gpus:  # data_parallel() fails without GPUs
        return partial(nn.parallel.data_parallel, ddp.unwrap_ddp(model), device_ids=gpus)
    return model


class RunningLoss:
    """Mean loss over the steps since the last message, on all ranks."""

    def __init__(self, cfg: Config, run: Run) -> None:
        self.every = cfg.loss_every
        self.run = run
        self.sums = torch.zeros(2, device=run.device, dtype=torch.float64)  # [sum of losses, number of losses]

    def add(self, loss: Tensor, step: Step) -> None:
        """Add the loss of a step, and log a message after every `loss_every` steps."""
        self.sums += torch.stack([loss.detach().double(), torch.ones_like(self.sums[0])])  # avoids a copy to the CPU
        if step.number % self.every == 0:  # the CPU waits for the loss only here
            dist.all_reduce(self.sums)
            total, count = self.sums.tolist()
            self.run.log_message(f"[epoch {step.epoch + 1}, step {step.number:5d}] running loss {total / count:.3f}")
        if step.number % self.every == 0 or step.ends_epoch:
            self.sums.zero_()


def main(cfg: Config, run: Run) -> None:
    inner_model = build_model(cfg, run)
    model = wrap_model(cfg, inner_model, run)
    forward = choose_forward(cfg, model, run.world)
    optimizer = build_optimizer(model.parameters(), cfg.optim)
    batches = run.batches(shard=run.shard, keep_partial=cfg.last_batch == "keep")
    run.register(inner_model, optimizer, batches, replicated=True)

    running_loss = RunningLoss(cfg, run)
    for step in run.steps():
        optimizer.zero_grad()
        # The mean over ranks is the mean loss of the batch, even if a partial batch has unequal shards.
        loss = run.loss(forward(step.x), step.y, reduction="sum") / step.mean_shard
        step.log(loss=loss)
        loss.backward()
        step.clip_gradients(model.parameters(), cfg.regularization.clip)
        optimizer.step()
        running_loss.add(loss, step)
    run.report(*report_strategies(cfg, run), report_state_bytes(optimizer, run.world))


def report_strategies(cfg: Config, run: Run) -> list[Report]:
    """Report the devices and, if configured, compare the strategies. All ranks must call this function."""
    gpu_count = len(list_gpus(run.world))
    device_count = max(1, gpu_count) if cfg.strategy == "data_parallel" else run.world.size
    compare: Callable[[], dict[str, list[float]]] = dict  # compares no strategies
    if cfg.compare and device_count > 1 and len(run.train_set) >= cfg.batch:
        run.log_message("comparing the strategies in alternating rounds; with compare=false, a run ends here")
        compare = partial(compare_strategies, cfg, run)
    samples = len(run.train_set)
    return report_devices(cfg, run.world, run.times, compare, run.folder.path, gpu_count, samples, run.total)


def compare_strategies(cfg: Config, run: Run) -> dict[str, list[float]]:
    """Return the samples/s of each strategy in each round. All ranks must call this function.

    In every round, the strategies are measured one after another. Rank 0 measures a single process, with the threads of
    one rank and with the threads of all ranks of a host, while the other ranks wait.
    """
    world = run.world
    thread_counts = {world.threads}
    if run.device.type == "cpu":
        thread_counts.add(world.threads * world.local_size)
    plan = [[f"single, {format_count(count, 'thread')}", "single", count] for count in sorted(thread_counts)]
    if len(list_gpus(world)) > 1:
        plan.append(["data_parallel", "data_parallel", world.threads])
    if world.size > 1:
        plan.append(["ddp", "ddp", world.threads])

    def make_variant(name: str, strategy: Any, threads: int) -> StepVariant:
        """Create a variant with a new model, so that the trained model is not changed."""
        side_cfg = replace(cfg, strategy=strategy)

        def make_model() -> tuple[Forward, nn.Module]:
            model = wrap_model(side_cfg, build_model(side_cfg, run), run, trains=False)
            return choose_forward(side_cfg, model, world), model

        return StepVariant(name, threads, make_model, run.shard if strategy == "ddp" else None)

    return measure_variant_throughputs(run, [make_variant(*arguments) for arguments in world.broadcast(plan)])


if __name__ == "__main__":
    start(main, Config)
