"""A ResNet copied to several devices: nn.DataParallel, DistributedDataParallel, and one device beside them.

    python experiments/resnet_dataparallel.py                                   ddp, and one device to compare with
    python experiments/resnet_dataparallel.py strategy=data_parallel            one process, all its GPUs
    python experiments/resnet_dataparallel.py strategy=data_parallel functional=true
    python experiments/resnet_dataparallel.py sweep=true                        each strategy as runs of its own
    python experiments/resnet_dataparallel.py sync_batchnorm=true data.name=cifar10 data.augment=crop_flip
    python experiments/resnet_dataparallel.py data.name=generated data.image_size=64 batch=128
    make exp NAME=resnet_dataparallel NODES=2                                   on a cluster: ddp only

Takes about two minutes on 2 CPU cores. Expect 95 % test accuracy after 100 steps on MNIST (without MNIST: on the
built-in digits).

How it works. nn.DataParallel is one process with a thread for each GPU. In every step it cuts the batch into chunks,
copies the model to all GPUs, and gathers outputs on the first one, which also adds up the gradients and holds the
optimizer: it needs more memory than the others, and Python's lock lets one thread speak at a time. What BatchNorm
learns in the copies is thrown away with them, but for the first GPU's. Under ddp each device has a process that keeps
its model; only gradients travel, while backward still works, and each process's BatchNorm buffers survive: they are
averaged before an evaluation. A batch that does not divide is no error for either: the last of an epoch may even
be smaller than the number of devices, which then do nothing.
"""

from __future__ import annotations

import common  # isort: skip  # noqa: F401 (first: it answers Ctrl-C while torch is imported)

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from common.checkpoint.train_state import TrainState
from common.data import loader as data
from common.distributed import ddp, sync_batchnorm
from common.distributed.rendezvous import World
from common.measure import plots, step_timing, tables
from common.measure.memory import read_peak
from common.models import networks
from common.training import loop, optimizers, single_process_baseline, sweep
from common.training.entry_point import start
from common.training.evaluate import classify_shared
from common.training.run import Run
from configs.resnet_dataparallel import Config

Forward = Callable[[Tensor], Tensor]
ROUNDS, STEPS = 3, 5  # of the comparison: how often each side takes its turn, and for how many steps
ONE_DEVICE = "{} GPUs here: DataParallel only calls the model, as single does; to compare devices, use strategy=ddp"
TOO_FEW = "left out: {} training samples hold no full batch of {} to take turns with; lower batch"
AXIS = {"y": "training samples per second"}
BUFFERS = {  # what becomes of its running statistics
    "single": "one device sees every sample",
    "data_parallel": "kept from the first GPU's {} samples, thrown away with the other copies",
    "ddp": "each process keeps its own, of {} samples a step; averaged before evaluations and saves",
    "synchronised": "the same in all processes: each sees the statistics of the whole batch",
}


def build(cfg: Config, train: data.Images, world: World) -> nn.Module:
    """The model, with the same weights in every process: they draw from one seed."""
    return networks.for_images(cfg.model, train.shape, train.classes).to(world.device, getattr(torch, cfg.dtype))


def gpus(world: World) -> list[int]:
    """The GPUs that one process can use: DataParallel's devices."""
    return list(range(torch.cuda.device_count())) if world.device.type == "cuda" else []


def wrap(cfg: Config, model: nn.Module, world: World) -> nn.Module:
    """The model as the strategy calls it: without GPUs DataParallel is the model itself."""
    if cfg.strategy == "ddp":
        if cfg.sync_batchnorm:
            model = sync_batchnorm.convert_sync_batchnorm(model, world.device)
        return ddp.wrap_ddp(model, world.device, gradient_as_bucket_view=True)
    # told to use none of the GPUs that are there, the class fails, where without any it calls the model
    return nn.DataParallel(model, gpus(world)) if cfg.strategy == "data_parallel" and gpus(world) else model


def forward_of(cfg: Config, model: nn.Module, world: World) -> Forward:
    """What computes the outputs: the wrapped model, or DataParallel as a function of the bare one."""
    # a run of data_parallel compares itself with other strategies; without GPUs the function is an error
    if cfg.strategy == "data_parallel" and cfg.functional and gpus(world):
        return partial(nn.parallel.data_parallel, ddp.unwrap(model), device_ids=gpus(world))
    return model


def mean_loss(model: nn.Module, forward: Forward, x: Tensor, y: Tensor, size: int, world: World) -> Tensor:
    """This process's share of the mean loss over a batch of `size` samples, times the number of processes.

    The processes' mean is the batch's mean loss, however unequal their shares are, and so with the gradients. A
    process without samples takes part with zeros; BatchNorm that is not synchronised must not look at nothing.
    """
    norms = [module for module in model.modules() if type(module) is nn.BatchNorm2d] if not len(y) else []
    for module in norms:
        module.eval()
    loss = F.cross_entropy(forward(x), y, reduction="sum") * (world.size / size)
    for module in norms:
        module.train()
    return loss


def train_epoch(
    cfg: Config,
    model: nn.Module,
    optimizer: Optimizer,
    loader: data.Loader,
    world: World,
    run: Run,
    times: step_timing.StepTimes,
    step: int,
) -> int:
    """Train on the rest of the loader's epoch, or up to the run's last step; returns the steps done since the start."""
    model.train()
    forward = forward_of(cfg, model, world)
    running = torch.zeros(2, device=world.device, dtype=torch.float64)  # the sum of losses, and of how many
    for x, y in times.batches(loader):
        optimizer.zero_grad()
        loss = mean_loss(model, forward, x, y, loader.size, world)
        times.mark("backward")
        loss.backward()
        times.mark("end of backward")
        optimizers.set_rate(optimizer, optimizers.rate(cfg.optim, step, run.total, cfg.batch))
        optimizer.step()
        step += 1
        running += torch.stack([loss.detach().double(), torch.ones_like(running[0])])  # stays on the device
        if step % cfg.loss_every == 0:  # the only time that somebody waits for the loss
            dist.all_reduce(running)
            total, count = running.tolist()
            run.say(f"[epoch {loader.epoch + 1}, step {step:5d}] running loss {total / count:.3f}")
            running.zero_()
        run.log(step, loss=loss.detach())
        run.checkpoint_or_stop(step)  # saves now and then, and leaves if it was told to
        if step == run.total:
            break
    return step


def evaluate(
    cfg: Config, model: nn.Module, test: data.Images, world: World, look: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """Loss and accuracy over all test samples, each seen by one process."""
    size, dtype = cfg.eval_batch, getattr(torch, cfg.dtype)
    return classify_shared(ddp.unwrap(model), test, world, batch=size, dtype=dtype, look=look)


def compare(cfg: Config, train: data.Images, world: World) -> dict[str, list[float]]:
    """Samples per second of each side, round by round: the sides take turns. All ranks call it.

    While rank 0 measures one process, with a process's threads and with those of all, the others wait.
    """
    threads = {world.threads, world.threads * world.local_size} if world.device.type == "cpu" else {world.threads}
    plan = [(f"single, {count} thread{'s' * (count > 1)}", "single", count) for count in sorted(threads)]
    plan += [("data_parallel", "data_parallel", world.threads)] if len(gpus(world)) > 1 else []
    plan += [("ddp", "ddp", world.threads)] if world.size > 1 else []
    plan = world.broadcast(plan)

    def trainer(strategy: Any) -> Callable[[], Tensor]:
        """Of a model of its own: the trained one stays as it is."""
        own = replace(cfg, strategy=strategy)
        model = wrap(own, build(own, train, world), world)
        share = (world.rank, world.size) if strategy == "ddp" else (0, 1)
        return single_process_baseline.trainer(cfg, forward_of(own, model, world), model, train, world.device, share)

    sides = {name: trainer(strategy) for name, strategy, _ in plan if strategy == "ddp" or world.is_main}
    rates: dict[str, list[float]] = {name: [] for name, _, _ in plan}
    for number in range(ROUNDS):
        for name, _, count in plan:
            torch.set_num_threads(count)
            if name in sides:
                rates[name].append(cfg.batch / single_process_baseline.seconds(sides[name], world.device, STEPS))
            world.named_barrier(f"compare/{number}/{name}")
    torch.set_num_threads(world.threads)
    return rates


def main(cfg: Config, world: World, run: Run) -> None:
    train, test = data.load_train_test(run.prepared, cfg.data)
    share = (world.rank, world.size)
    loader = data.Loader.from_config(train, cfg, world.device, shard=share, drop_last=cfg.last_batch != "keep")
    model = wrap(cfg, build(cfg, train, world), world)
    optimizer = optimizers.make(model.parameters(), cfg.optim)
    times = step_timing.StepTimes(model, world.device)
    run.before_backward = times.recent  # the heartbeats tell who is slow
    run.total = loop.total_steps(cfg, loader)
    run.averaged = True  # the loss of a step is the mean over the processes
    devices = max(1, len(gpus(world))) if cfg.strategy == "data_parallel" else world.size
    if cfg.strategy == "data_parallel" and devices == 1:
        run.say(ONE_DEVICE.format(len(gpus(world))))

    ddp.warm_up_buckets(
        model, train.load_inputs(slice(0, cfg.batch // world.size), world.device, getattr(torch, cfg.dtype))
    )
    step = run.resume(TrainState([ddp.unwrap(model)], optimizer, loader, world, replicated=True))
    scores = loop.train(
        run,
        loader,
        step,
        lambda done: train_epoch(cfg, model, optimizer, loader, world, run, times, done),
        lambda: evaluate(cfg, model, test, world, run.look),
    )
    own = [torch.device("cuda", index) for index in gpus(world)] if cfg.strategy == "data_parallel" else []
    used = [read_peak(device) / 1e6 for device in own or [world.device]]
    memory = [value for values in world.gather(used) for value in values]
    sides, full = cfg.compare and devices > 1, len(train) >= cfg.batch
    rates = compare(cfg, train, world) if sides and full else {}
    notes = {"comparison": TOO_FEW.format(len(train), cfg.batch)} if sides and not full else {}
    ranks = [rank for rank in world.gather(times.summary()) if rank]
    if world.is_main:
        ragged = cfg.last_batch == "keep" and run.total >= loader.steps  # else no epoch came to its end
        rest = len(train) % cfg.batch if ragged else 0
        conclude(cfg, world, run, scores, Facts(devices, memory, ranks, rates, rest, notes))


@dataclass(frozen=True)
class Facts:
    """What rank 0 knows of all devices at the end."""

    devices: int
    memory: list[float]
    """MB at most, by device."""
    ranks: list[step_timing.Rank]
    rates: dict[str, list[float]]
    """Samples per second of each side of the comparison, round by round."""
    rest: int
    """Samples of an epoch's last batch, if it is a ragged one."""
    notes: dict[str, str]
    """Rows of the table about what could not be measured."""


def shares(cfg: Config, count: int, devices: int) -> list[int]:
    """How many samples of a batch each device gets: DataParallel cuts chunks of equal size, and the last is smaller."""
    if cfg.strategy == "data_parallel":
        sizes = [len(chunk) for chunk in torch.arange(count).chunk(devices)]
        return sizes + [0] * (devices - len(sizes))
    return [len(part) for part in np.array_split(np.arange(count), devices)]


def conclude(cfg: Config, world: World, run: Run, scores: dict[str, float], found: Facts) -> None:
    """The result file and the table, on rank 0."""
    seconds, devices = run.step_seconds(), found.devices
    rate = {name: spread(values)[0] for name, values in found.rates.items()}
    one, many = next(iter(rate.values()), 0.0), rate.get(cfg.strategy, 0.0)
    step, single = (cfg.batch / value if value else 0.0 for value in (many, one))
    hosts = world.hosts if cfg.strategy == "ddp" else world.hosts * devices
    scaled = step_timing.ScalingReport(found.ranks, hosts, None, single, step)
    imbalance = {
        "memory": step_timing.imbalance(found.memory),
        "before_backward": step_timing.imbalance([rank.before_backward for rank in found.ranks]),
    }
    run.finish(
        **scores,
        samples_per_second=run.samples_per_second(),
        step_seconds=seconds,
        data=run.prepared.name,
        strategy=cfg.strategy,
        devices=devices,
        memory_megabytes=found.memory,
        imbalance=imbalance,
        last_batch=shares(cfg, found.rest, devices) if found.rest else None,
        compare=found.rates,
        **{name: value for name, value in scaled.result().items() if value is not None},
    )
    seen = "synchronised" if cfg.sync_batchnorm and devices > 1 else cfg.strategy if devices > 1 else "single"
    rows = loop.rows(run, world, scores) | {
        "strategy": f"{cfg.strategy}, {cfg.model}, batch {cfg.batch} = {words(shares(cfg, cfg.batch, devices))}",
        "memory": f"{', '.join(f'{value:,.0f}' for value in found.memory)} MB at most, by device",
        "BatchNorm": BUFFERS[seen].format(shares(cfg, cfg.batch, devices)[0]),
        "checkpoints": "the model's own names, without module., whatever the strategy",
    }
    if found.rest:
        rows["last batch"] = f"{found.rest} = {words(shares(cfg, found.rest, devices))}"
    uneven = [f"{name.replace('_', ' ')} {value:.0%}" for name, value in imbalance.items() if value is not None]
    if uneven:
        rows["imbalance"] = f"{', '.join(uneven)} (the largest above the mean)"
    for name, values in found.rates.items():
        average, deviation = spread(values)
        rows[name] = f"{average:,.0f} samples/s +- {deviation:.0f}, {average / one:.2f} x the first"
    if found.rates and "data_parallel" not in rate:
        rows["data_parallel"] = ONE_DEVICE.format(len(gpus(world)))
    if found.rates:
        plot = run.folder.path / "compare.png"
        plots.bars(plot, {name: spread(values) for name, values in found.rates.items()}, **AXIS)
        rows["plot"] = str(plot)
    run.say(tables.table(rows | found.notes | scaled.rows() | run.places()))


def spread(values: list[float]) -> tuple[float, float]:
    return mean(values), stdev(values) if len(values) > 1 else 0.0


def cells(cfg: Config) -> list[sweep.Cell]:
    """The strategies that differ on this machine; with fewer GPUs than ddp's processes all of them on the CPU."""
    gpus = torch.cuda.device_count() if cfg.launch.device != "cpu" else 0
    enough = gpus >= replace(cfg, strategy="ddp").processes
    names = ["single", *(["data_parallel"] if gpus > 1 and enough else []), "ddp"]
    alike = {"launch.device": "cpu"} if gpus and not enough else {}
    return [{"strategy": name, "compare": False} | alike for name in names]


def show(cfg: Config, rows: list[sweep.Row], folder: Path) -> dict[str, str]:
    """Samples per second of each strategy, with all cores in each."""
    rates = sweep.gather(rows, ["strategy"], "samples_per_second")
    plots.bars(folder / "strategies.png", {str(name): (rate, off) for (name,), (rate, off, _) in rates.items()}, **AXIS)
    table = {str(name): f"{rate:,.0f} samples/s +- {off:.0f}, {n} runs" for (name,), (rate, off, n) in rates.items()}
    if "data_parallel" not in table:
        table["data_parallel"] = ONE_DEVICE.format(torch.cuda.device_count())
    return table | {"plot": str(folder / "strategies.png")}


def words(sizes: list[int]) -> str:
    return " + ".join(map(str, sizes)) if len(sizes) <= 8 else f"{sizes[0]} + ... + {sizes[-1]}"


if __name__ == "__main__":
    start(main, Config, sweep.Sweep(cells, show))
