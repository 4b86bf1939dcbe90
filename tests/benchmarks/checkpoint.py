"""The cost of a checkpoint, beside torch.save and fsync of the same state, and beside training.

ResNet-18 and ResNet-50 with the momentum of SGD, in one process and in two that train data parallel (rank 0 writes
model and optimizer, each rank its own random state and BatchNorm statistics). This project's side is `Saver.save`,
which also collects the state and checks it for NaN and infinity. The sides of torch.save write a state that was
collected before. torch.save writes a new file each time and then removes the one before the last, as this project does.
Another side writes the same file again and again. It loses the state when the power fails, but it uses the same pages
of memory again. This is faster where free memory is slow to get back, such as in a virtual machine that returns it to
its host. Other sides: a step of ResNet-18 in two processes (batch 128, 32 px) with the vote after it
(`Saver.checkpoint_or_stop`), and the warm-up of DDP's buckets at a start. Writes into runs/.
"""

from __future__ import annotations

import atexit
import collections
import itertools
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchvision.models import resnet50

from common.checkpoint.checkpointer import CheckpointState
from common.checkpoint.save_or_stop_vote import POLL_SECONDS
from common.config import config
from common.config.config import ROOT, format_yaml
from common.data import prepare
from common.data.prepare import PreparedDataset
from common.models import networks
from common.ranks.ranks import Ranks
from common.ranks.rendezvous import World
from common.runs.folder import RunFolder
from common.techniques.data_parallel import ddp
from common.training import optimizers
from common.training.run import Run
from configs.ddp_multinode import Config
from configs.shared import Optim
from tests.benchmarks.measure import Samples, Side, Team
from tests.benchmarks.parts import QUIET, Part
from tests.benchmarks.records import Row, Table, at_most, make_value_table

MODELS: dict[str, Callable[[], nn.Module]] = {
    "ResNet-18": lambda: networks.build_network("resnet18", (3, 32, 32), 10),
    "ResNet-50": lambda: resnet50(weights=None),
}
SETTINGS = (*QUIET, "data.name=digits")  # no images of the data set are used
STEPS = 2  # per turn
GOAL = 1.3
OURS = "this project"
NEW_FILE = "torch.save and fsync, a new file"
SAME_FILE = "the same file again"
VOTE = "vote on saving and stopping"
STEP = "step"
WARM_UP = "warm-up of DDP's buckets"
SAVE = f"ResNet-18, 2 processes: {OURS}"


def start_run(folder: Path, world: World, model: nn.Module, prepared: PreparedDataset) -> Run:
    """Return a run of a model and an optimizer with momentum that is ready to vote and to save."""
    cfg = config.load_config(Config, SETTINGS, {})
    claimed = RunFolder.create(folder, "bench", format_yaml(cfg)).claim_attempt() if world.is_main else None
    path = Path(world.broadcast(str(claimed.path) if claimed else None))
    run = Run(cfg, RunFolder(path, 1), Ranks(world), prepared)

    optimizer = optimizers.build_optimizer(model.parameters(), Optim(momentum=0.9))
    for parameter in model.parameters():
        parameter.grad = 1e-3 * torch.randn_like(parameter)  # small, so that later training does not diverge
    optimizer.step()
    run.register(model, optimizer, run.batches(shard=run.shard), replicated=True)
    run.resume()
    return run


def make_project_side(run: Run) -> Side:
    """Checkpoints as a run saves them."""
    steps = itertools.count(1)

    def save() -> float:
        start = time.perf_counter()
        if not run.saver.save(next(steps)):
            raise OSError("not saved")
        return time.perf_counter() - start

    return save


def make_torch_side(folder: Path, world: World, content: CheckpointState, files: int) -> Side:
    """torch.save into one of `files` files in turn, and fsync; the other rank waits for rank 0."""
    paths = collections.deque(folder / f"checkpoint-{files}-{number}.pt" for number in range(files))
    parts: dict[str, Any] = {"model": content.model, "optimizer": content.optimizer} | content.common | content.local

    def save() -> float:
        paths.rotate(-1)
        path = paths[0]
        start = time.perf_counter()
        if world.is_main:
            torch.save(parts, path)
            handle = os.open(path, os.O_RDWR)
            os.fsync(handle)
            os.close(handle)
        world.broadcast(None)
        seconds = time.perf_counter() - start
        if world.is_main and files > 1:
            paths[1].unlink(missing_ok=True)  # the oldest
        return seconds

    return save


def make_step_side(run: Run, step: Callable[[], torch.Tensor]) -> Side:
    """Steps, each with a row of metrics and a vote as in a run; returns the mean seconds of a step and of a vote."""
    metrics = run.metrics
    assert metrics is not None
    numbers = itertools.count(1)

    def measure() -> dict[str, float]:
        step_seconds = []
        vote_seconds = []
        for _ in range(STEPS):
            number = next(numbers)
            dist.barrier()
            start = time.perf_counter()
            loss = step()
            step_seconds.append(time.perf_counter() - start)

            dist.barrier()  # the next step would wait for the slower rank even without a vote
            start = time.perf_counter()
            metrics.add_step(number, start, {"loss": loss})
            run.saver.checkpoint_or_stop(number, now=True)
            vote_seconds.append(time.perf_counter() - start)
        return {"seconds": fmean(step_seconds), "vote": fmean(vote_seconds)}

    return measure


def training(folder: Path, world: World, prepared: PreparedDataset) -> dict[str, Side]:
    """A step with the vote after it, and the warm-up of buckets at a start."""
    network = MODELS["ResNet-18"]()
    run = start_run(folder, world, network, prepared)
    assert run.state is not None and run.state.optimizer is not None
    optimizer = run.state.optimizer
    model = nn.parallel.DistributedDataParallel(network, **ddp.make_unsynchronized_buffer_options())
    batch = 128 // world.size
    images = torch.randn(batch, 3, 32, 32)
    labels = torch.zeros(batch, dtype=torch.long)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def warm_up() -> float:
        dist.barrier()
        start = time.perf_counter()
        ddp.warm_up_buckets(model, images)
        return time.perf_counter() - start

    return {STEP: make_step_side(run, step), WARM_UP: warm_up}


def sides(folder: Path, world: World, prepared: PreparedDataset) -> dict[str, Side]:
    savers: dict[str, Side] = {}
    processes = "1 process" if world.size == 1 else f"{world.size} processes"
    for model, build in MODELS.items():
        model_folder = folder / f"{model}-{world.size}"
        model_folder.mkdir(exist_ok=True)
        torch.manual_seed(0)
        run = start_run(model_folder, world, build(), prepared)
        assert run.state is not None
        content = run.state.collect_state()
        label = f"{model}, {processes}"
        savers[f"{label}: {OURS}"] = make_project_side(run)
        savers[f"{label}: {NEW_FILE}"] = make_torch_side(model_folder, world, content, files=3)
        savers[f"{label}: {SAME_FILE}"] = make_torch_side(model_folder, world, content, files=1)
    return savers | training(folder, world, prepared) if world.size == 2 else savers


def teams(scratch: Path) -> list[Team]:
    prepared = prepare.prepare_dataset(config.load_config(Config, SETTINGS, {}).data)
    (ROOT / "runs").mkdir(exist_ok=True)
    disk = tempfile.TemporaryDirectory(dir=ROOT / "runs", prefix="bench-")  # not below /tmp, which may be memory
    atexit.register(disk.cleanup)
    folder = Path(disk.name)
    return [Team(size, 1, lambda world: sides(folder, world, prepared)) for size in (1, 2)]


def table(samples: Samples) -> Table:
    rows = [Row(f"ms: {side}", [samples.number(side, factor=1e3)]) for side in samples.values]
    rows.append(Row(f"ms: {VOTE}", [samples.number(STEP, "vote", 1e3)]))
    for side in samples.values:
        label, _, method = side.partition(": ")
        if method == OURS:
            slowdown = samples.ratio(side, f"{label}: {NEW_FILE}")
            rows.append(at_most(f"{label}: {OURS} / {NEW_FILE}", slowdown, GOAL))
            rows.append(Row(f"{label}: {OURS} / {SAME_FILE}", [samples.ratio(side, f"{label}: {SAME_FILE}")]))
    saving = samples.ratio(SAVE, STEP)  # 100 % / 100 steps
    voting = samples.number(STEP, "vote", 100 / POLL_SECONDS)
    rows.append(at_most("% of training time: a checkpoint every 100 steps", saving, 1))
    rows.append(at_most("% of training time: the votes on saving and stopping", voting, 0.5))
    rows.append(Row("warm-up of DDP's buckets / step", [samples.ratio(WARM_UP, STEP)]))
    return make_value_table(rows)


PARTS = [
    Part(
        "checkpoint/save",
        "training waits for a checkpoint",
        teams,
        table,
        rounds=20,
        drop=3,  # old checkpoints are removed by then
        facts=("1 thread per process", "training state of 89 MB (ResNet-18), 205 MB (ResNet-50)"),
    )
]
