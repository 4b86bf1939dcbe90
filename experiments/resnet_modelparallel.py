"""Model parallelism: a ResNet cut into stages that sit on different devices, one at a time or as a pipeline.

    python experiments/resnet_modelparallel.py                                   two stages, GPipe
    python experiments/resnet_modelparallel.py mode=naive                        one stage works, the other waits
    python experiments/resnet_modelparallel.py mode=single                       the unsplit model
    python experiments/resnet_modelparallel.py schedule=zero_bubble stages=3     another schedule, three processes
    python experiments/resnet_modelparallel.py model=resnet50 data.image_size=64 split=[layer3_0]
    python experiments/resnet_modelparallel.py replicas=2                        two pipelines, each half of the batch
    python experiments/resnet_modelparallel.py devices=[cuda:0,cuda:1]           one process, two GPUs
    python experiments/resnet_modelparallel.py model=toy data.name=vectors       10-10-5, the smallest example
    python experiments/resnet_modelparallel.py sweep=true                        all modes over sizes of microbatches

One run takes about half a minute on 2 CPU cores, the sweep six. Expect the pipelined mode between the naive
one and half of it; one process with both cores is a strong opponent.

How it works. A batch is cut into microbatches of `split_size` samples. Naively a microbatch goes through all stages
and back before the next one starts, so one of p stages works at a time. As a pipeline, stage 1 works on microbatch 0
while stage 0 works on microbatch 1; with m microbatches of equal cost a stage waits (p - 1) / (m + p - 1) of the time.
Small microbatches leave less bubble, and each one works less efficiently.

With `replicas`, several such pipelines train on shares of the batch, and the replicas of a stage average its gradients:
across hosts only these travel, once a step. `memory_cap` shows why a model is split at all: what does not fit into one
process fits into two.

BatchNorm takes its statistics over a microbatch, and its running statistics see one microbatch after the other: both
exactly as in the unsplit model that is fed the same microbatches and adds up their gradients, which is what
mode=single with a split_size does. A smaller split_size is thus another training, whatever the mode.
"""

from __future__ import annotations

import common  # isort: skip  # noqa: F401 (first: it answers Ctrl-C while torch is imported)

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from common.checkpoint.train_state import TrainState
from common.core.errors import UserError
from common.data import loader as data
from common.distributed import sync_batchnorm
from common.distributed.rendezvous import World
from common.measure import plots, tables
from common.measure.memory import memory_cap, read_peak
from common.models import model_file, networks
from common.pipeline import schedules
from common.pipeline.executor import Pipeline
from common.pipeline.report import PipelineReport
from common.pipeline.stage_tracer import StageTracer
from common.runs import provenance
from common.training import loop, model_split, optimizers, sweep
from common.training.entry_point import start
from common.training.evaluate import classify
from common.training.run import Run
from configs.resnet_modelparallel import Config

BRIEF = 12  # steps of a run of the sweep


class OnDevices:
    """All stages in this one process, each on a device of its own.

    Work on a GPU is only queued: the call returns at once. So one process keeps all its GPUs busy, if it queues
    a microbatch's next stage before the previous stage's next microbatch.
    """

    has_first = has_last = True
    last_rank = 0

    def __init__(self, parts: Sequence[nn.Sequential], devices: Sequence[str], cfg: Config, dtype: torch.dtype) -> None:
        self.devices = [torch.device(name) for name in devices]
        self.stages = [part.to(device, dtype) for part, device in zip(parts, self.devices, strict=True)]
        self.local = dict(enumerate(self.stages))
        self.layers = [[name for name, _ in part.named_children()] for part in parts]
        self.size, self.mode = cfg.microbatch, cfg.mode
        self.plan = schedules.SCHEDULES[cfg.pipeline().schedule](len(parts), len(parts), cfg.batch // self.size)
        self.module = nn.ModuleList(self.stages)
        self.watch = StageTracer(self.stages, self.devices)

    def work(self, stage: int, microbatch: int, x: Tensor) -> Tensor:
        return self.watch.forward(stage, microbatch, x.to(self.devices[stage]))

    def naive(self, x: Tensor, microbatch: int = 0) -> Tensor:
        """One stage after the other: while one works, the others have nothing to do."""
        for stage in range(len(self.stages)):
            x = self.work(stage, microbatch, x)
        return x

    def pipelined(self, x: Tensor) -> Tensor:
        """At each tick stage s works on microbatch tick - s, so all stages work at the same time."""
        pieces = list(x.split(self.size))
        for tick in range(len(pieces) + len(self.stages) - 1):
            for stage in reversed(range(len(self.stages))):  # the last one first: its microbatch is the oldest
                if 0 <= tick - stage < len(pieces):
                    pieces[tick - stage] = self.work(stage, tick - stage, pieces[tick - stage])
        return torch.cat(pieces)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Forward and backward of a batch; backward, too, visits the devices in the order of their dependencies."""
        self.watch.begin()
        y = y.to(self.devices[-1])
        if self.mode == "pipelined":
            loss = F.cross_entropy(self.pipelined(x), y)
            loss.backward()
            return loss.detach()
        losses, count = [], len(x) // self.size
        for number, (piece, target) in enumerate(zip(x.split(self.size), y.split(self.size), strict=True)):
            losses.append(F.cross_entropy(self.naive(piece, number), target) / count)
            losses[-1].backward()  # gradients add up
        return torch.stack([loss.detach() for loss in losses]).sum()

    @torch.no_grad()
    def predict(self, x: Tensor, count: int) -> Tensor:
        return self.naive(x).to(x.device)

    def train(self, mode: bool = True) -> None:
        self.module.train(mode)


@dataclass(frozen=True)
class Team:
    """Where this process stands: in its replica's pipeline, and among the replicas of its stages."""

    pipeline: World
    peers: World

    @staticmethod
    def of(cfg: Config, world: World) -> Team:
        """Replica after replica, and in each the processes of its pipeline, so that hosts hold whole replicas.

        Raises UserError where somebody else has spread the processes in another way.
        """
        length = world.size // cfg.replicas
        replica, place = divmod(world.rank, length)
        spread = {tuple(sorted(set(world.hosts[first : first + length]))) for first in range(0, world.size, length)}
        torn = sorted(hosts for hosts in spread if len(hosts) > 1)
        if cfg.replicas > 1 and torn:
            raise UserError(
                f"replicas={cfg.replicas}: a replica's stages are on {' and '.join(torn[0])}; start a "
                f"multiple of {length} processes on each host, in blocks (srun --distribution=block)"
            )
        pipeline = world.subgroup(range(replica * length, (replica + 1) * length))
        return Team(pipeline, world.subgroup(range(place, world.size, length)))

    @property
    def share(self) -> tuple[int, int]:
        """Which replica this is, of how many."""
        return self.peers.rank, self.peers.size


def build(cfg: Config, shape: Sequence[int], classes: int, world: World, run: Run) -> Pipeline | OnDevices:
    """The model, cut into stages: all of them on this process's devices, or this process's own."""
    toy, dtype = cfg.model == "toy", getattr(torch, cfg.dtype)
    # one seed: the same weights in every process
    model = networks.Toy(shape, classes) if toy else networks.ResNet(cfg.model, shape, classes, width=cfg.width)
    if cfg.weights != "none":
        networks.load(model, model_file.read_weights(cfg.weights, Path(cfg.runs)), cfg.weights)
    if cfg.channels_last:
        model = model.to(memory_format=torch.channels_last)
    settings = cfg.pipeline()
    parts = model_split.choose(settings, model, torch.randn(cfg.microbatch, *shape), run)
    if cfg.in_one_process:
        return OnDevices(parts, cfg.devices, cfg, dtype)
    kind = model_split.engine(settings)
    return kind(settings, parts, F.cross_entropy, world, batch=cfg.share, sample=shape, dtype=dtype)


def train_epoch(
    cfg: Config,
    pipe: Any,
    optimizer: Optimizer,
    loader: data.Loader,
    run: Run,
    step: int,
    total: int,
    peers: World | None = None,
) -> int:
    """Train on the rest of the loader's epoch, or up to `total` steps; returns the steps done since the start."""
    pipe.train()
    for x, y in loader:
        optimizer.zero_grad()
        loss = pipe.step(x, y)  # every microbatch forward and backward
        if peers:  # the mean over the shares is the gradient of the batch's mean loss, and so with the loss
            averaged = [p.grad for p in pipe.module.parameters() if p.grad is not None]
            sync_batchnorm.average_tensors(averaged if loss is None else [*averaged, loss], peers.group)
        optimizers.set_rate(optimizer, optimizers.rate(cfg.optim, step, total, cfg.batch))
        optimizer.step()  # each process updates its own stages
        step += 1
        run.log(step, loss=loss)
        run.checkpoint_or_stop(step)  # saves now and then, and leaves if it was told to
        if step == total:
            break
    return step


def main(cfg: Config, world: World, run: Run) -> None:
    train, test = data.load_train_test(run.prepared, cfg.data)
    dtype = getattr(torch, cfg.dtype)
    team = Team.of(cfg, world)
    own = [world.device]
    if cfg.in_one_process:
        own = [torch.device(name) for name in model_split.checked_devices(cfg.devices)]
    with memory_cap(cfg.memory_cap, own):
        pipe: Any = build(cfg, train.shape, train.classes, team.pipeline, run)
        optimizer = optimizers.make(pipe.module.parameters(), cfg.optim)
        ends: Any = {"inputs": pipe.has_first, "targets": pipe.has_last}  # the first stage sees images, the last labels
        loader = data.Loader.from_config(train, cfg, world.device, shard=team.share, **ends)
        run.source, run.total = pipe.last_rank, loop.total_steps(cfg, loader)

        def evaluate() -> dict[str, float]:
            norms = team.peers.group  # the replicas have seen other samples
            sync_batchnorm.average_buffers(pipe.module, norms)
            pipe.train(False)
            sides: Any = {"inputs": pipe.has_first, "share": team.share, "look": run.look}
            return classify(pipe.predict, test, world, batch=cfg.eval_batch, dtype=dtype, **sides)

        parts = list(pipe.local.values())
        peers = team.peers if cfg.replicas > 1 else None
        step = run.resume(TrainState(parts, optimizer, loader, world, peers=peers))
        epoch = partial(train_epoch, cfg, pipe, optimizer, loader, run, total=run.total, peers=peers)
        scores = loop.train(run, loader, step, epoch, evaluate)
    conclude(cfg, world, run, pipe, scores)


def conclude(cfg: Config, world: World, run: Run, pipe: Any, scores: dict[str, float]) -> None:
    """The result file, the table and the plot of one step."""
    seconds, rate = run.step_seconds(), run.samples_per_second()
    if cfg.in_one_process:
        spans, place = pipe.watch.spans(), "stage"
        memory = {str(device): read_peak(device) for device in pipe.devices}
    else:
        spans, place = world.gather(pipe.spans())[: world.size // cfg.replicas], "process"  # of the first replica
        memory = {f"process {rank}": held for rank, held in enumerate(world.gather(read_peak(world.device)))}
    if not world.is_main:
        return
    pipeline = PipelineReport.of(spans, pipe.plan, len(pipe.layers), memory, place)
    speed = {"samples_per_second": rate, "step_seconds": seconds}
    places = {f"idle_share_{n}": share for n, share in enumerate(pipeline.idle)}  # one column each in a sweep's table
    places |= {f"peak_memory_{n}": held for n, held in enumerate(memory.values())}
    run.finish(**scores, **speed, **places, data=run.prepared.name, stages=pipe.layers, **pipeline.result())
    settings = cfg.pipeline()
    held = "all layers" if cfg.mode == "single" else "a stage"
    held = f"{settings.stages_per_process} stages" if settings.stages_per_process > 1 else held
    pieces = f"{settings.microbatches} microbatches of {cfg.microbatch}"
    pieces += f", in each of {cfg.replicas} replicas" if cfg.replicas > 1 else ""
    rows = loop.rows(run, world, scores) | {
        "mode": f"{cfg.mode}, {cfg.model}: {settings.schedule} ({settings.engine}), {pieces}",
        "devices": f"{', '.join(cfg.devices)} in one process" if cfg.in_one_process else f"one process holds {held}",
        "stages": "\n".join(f"{names[0]} to {names[-1]}" for names in pipe.layers),
    }
    drawn = pipeline.plot(run.folder.path, f"one step of {cfg.model}, {cfg.mode}, {pieces}") if cfg.plot else {}
    run.say(tables.table(rows | pipeline.rows() | drawn | run.places()))


def cells(cfg: Config) -> list[sweep.Cell]:
    """single and naive with the whole batch, pipelined with each size of microbatches.

    Unless `steps` says otherwise the runs are short: what is measured is what a step costs. All run on one kind of
    device.
    """
    short: sweep.Cell = {} if cfg.steps else {"steps": BRIEF, "data.test_limit": cfg.data.test_limit or cfg.eval_batch}
    whole: list[sweep.Cell] = [{"mode": mode, "split_size": cfg.share} for mode in ("single", "naive")]
    pieces: list[sweep.Cell] = [{"mode": "pipelined", "split_size": int(size)} for size in cfg.split_sizes]
    some = cfg.launch.device == "auto" and provenance.count_visible_gpus() and not on_gpus(cfg)
    alike: sweep.Cell = {"launch.device": "cpu"} if some else {}
    return [cell | short | alike for cell in whole + pieces]


def on_gpus(cfg: Config) -> bool:
    """Whether there are GPUs enough for every mode's processes."""
    gpus = provenance.count_visible_gpus() if cfg.launch.device != "cpu" and "cpu" not in cfg.devices else 0
    modes: tuple[Any, ...] = ("single", "naive", "pipelined")
    chosen = [replace(cfg, mode=mode) for mode in modes]
    for one in chosen:
        one.adapt(gpus)
    return all(gpus >= one.processes for one in chosen)


def show(cfg: Config, rows: list[sweep.Row], folder: Path) -> dict[str, str]:
    """Time per batch against the size of microbatches, with what each stage waits and holds."""
    times = sweep.gather(rows, ("mode", "split_size"), "step_seconds")
    lines = ["mode       split size      ms a batch   bubble  idle share, and peak MiB, of each stage's process"]
    for (mode, size), (mean, deviation, _) in times.items():
        same = [row for row in rows if (row["cell"]["mode"], row["cell"]["split_size"]) == (mode, size)]
        idle = "".join(f" {fmean(shares):4.0%}" for shares in zip(*(row["idle_share"] for row in same), strict=True))
        memory = zip(*(row["peak_memory"].values() for row in same), strict=True)
        held = "".join(f" {max(amounts) / 2**20:6.0f}" for amounts in memory)
        took = f"{mean * 1e3:>9.1f} ± {deviation * 1e3:<6.1f}{same[0]['ideal_bubble']:>6.1%}"
        lines.append(f"{mode:<10} {size:>10} {took} {idle} {held}")
    return {"times": "\n".join(lines), "plot": draw(cfg, times, folder / "split_size.png")}


def draw(cfg: Config, times: dict[Any, tuple[float, float, int]], path: Path) -> str:
    """The modes' times a batch, and the ideal: p stages of equal cost share the naive time and wait p - 1 turns."""
    levels = {mode: mean * 1e3 for (mode, _), (mean, _, _) in times.items() if mode != "pipelined"}
    pipelined = [(size, mean * 1e3, dev * 1e3) for (mode, size), (mean, dev, _) in times.items() if mode == "pipelined"]
    p, computed = cfg.stages, {}
    if "naive" in levels and pipelined:
        ideal = [(size, levels["naive"] / p * (1 + (p - 1) * size / cfg.share), 0.0) for size, _, _ in pipelined]
        computed["ideal: naive / p x (m + p - 1) / m"] = ideal
    threads = "" if cfg.launch.threads or on_gpus(cfg) else "; single has the threads of all of them"
    more: Any = {"log": True, "title": f"{cfg.model}, batch {cfg.batch}, {p} stages{threads}"}
    series = {"pipelined": pipelined} if pipelined else {}  # none where all those runs failed
    plots.curves(path, series, "split size", "ms a batch", levels, computed=computed, **more)
    return str(path)


SWEEP = sweep.Sweep(cells, show, measured=("split",))

if __name__ == "__main__":
    start(main, Config, SWEEP)
