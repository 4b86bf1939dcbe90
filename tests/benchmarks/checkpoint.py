"""The cost of a checkpoint, beside torch.save and fsync of the same state, and beside training.

ResNet-18 and ResNet-50 with the momentum of SGD, in one process and in two that train data parallel (rank 0 writes
model and optimizer, each rank its own random state). Training waits until a save has ended. torch.save writes a new
file each time and then removes the one before the last, as this project does. Another side writes the same file again
and again. It loses the state when the power fails, but it uses the same pages of memory again. This is faster where
free memory is slow to get back, such as in a virtual machine that returns it to its host. Other sides: a step of
ResNet-18 in two processes (batch 128, 32 px), the vote on stop requests about twice a second, and the warm-up of DDP's
buckets at a start. Writes into runs/.
"""

from __future__ import annotations

import atexit
import collections
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchvision.models import resnet50

from common.checkpoint import state_dicts
from common.checkpoint.checkpointer import Checkpointer, CheckpointState
from common.checkpoint.save_or_stop_vote import POLL_SECONDS, SaveOrStopVote
from common.checkpoint.stop_request import StopRequest
from common.config.config import ROOT
from common.models import networks
from common.ranks.ranks import Ranks
from common.ranks.rendezvous import World
from common.runs.folder import RunFolder
from common.techniques.data_parallel import ddp
from common.training import optimizers
from configs.shared import Checkpoint, Optim
from tests.benchmarks.measure import Samples, Side, Team
from tests.benchmarks.parts import Part
from tests.benchmarks.records import Row, Table, at_most, make_value_table

MODELS: dict[str, Callable[[], nn.Module]] = {
    "ResNet-18": lambda: networks.build_network("resnet18", (3, 32, 32), 10),
    "ResNet-50": lambda: resnet50(weights=None),
}
GOAL = 1.3
OURS = "this project"
NEW_FILE = "torch.save and fsync, a new file"
SAME_FILE = "the same file again"
LOOK = "vote on saving and stopping"
WARM_UP = "warm-up of DDP's buckets"
SAVE = f"ResNet-18, 2 processes: {OURS}"


def make_state(model: nn.Module, world: World) -> CheckpointState:
    """The state of a model in training; rank 0 writes all but the random state."""
    torch.manual_seed(0)
    optimizer = optimizers.build_optimizer(model.parameters(), Optim(momentum=0.9))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return CheckpointState(
        state_dicts.gather_full_tensors(tensors, world.is_main),
        state_dicts.collect_optimizer_state(optimizer, model.named_parameters(), None if world.is_main else ()),
        {"epoch": 3},
        {"random": state_dicts.capture_rng_state()},
    )


def make_project_side(folder: Path, world: World, content: CheckpointState) -> Side:
    """Checkpoints as a run saves them."""
    run_path = str(RunFolder.create(folder, "bench", "").claim_attempt().path) if world.is_main else ""
    run_folder = RunFolder(Path(world.broadcast(run_path)), 1)
    checkpoints = Checkpointer(run_folder, Ranks(world), Checkpoint(), print)
    steps = itertools.count(1)

    def save() -> float:
        start = time.perf_counter()
        if not checkpoints.save(next(steps), content):
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


def make_timer(world: World, work: Callable[[], object], times: int) -> Side:
    """A side that repeats work of all ranks and returns the mean seconds."""

    def measure() -> float:
        world.broadcast(None)
        start = time.perf_counter()
        for _ in range(times):
            work()
        return (time.perf_counter() - start) / times

    return measure


def training(world: World) -> dict[str, Side]:
    """A step, the look at the flags after it, and the warm-up of buckets at a start."""
    model = nn.parallel.DistributedDataParallel(MODELS["ResNet-18"](), **ddp.make_unsynchronized_buffer_options())
    optimizer = optimizers.build_optimizer(model.parameters(), Optim(momentum=0.9))
    batch = 128 // world.size
    images = torch.randn(batch, 3, 32, 32)
    labels = torch.zeros(batch, dtype=torch.long)
    vote = SaveOrStopVote(Ranks(world), Checkpoint(), StopRequest(60, sys.stderr))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    def look() -> None:
        vote.vote_after_step(1, False, time.perf_counter())

    return {
        "step": make_timer(world, step, 2),
        LOOK: make_timer(world, look, 50),
        WARM_UP: make_timer(world, lambda: ddp.warm_up_buckets(model, images), 1),
    }


def sides(folder: Path, world: World) -> dict[str, Side]:
    savers: dict[str, Side] = {}
    processes = "1 process" if world.size == 1 else f"{world.size} processes"
    for model, build in MODELS.items():
        content = make_state(build(), world)
        model_folder = folder / f"{model}-{world.size}"
        model_folder.mkdir(exist_ok=True)
        label = f"{model}, {processes}"
        savers[f"{label}: {OURS}"] = make_project_side(model_folder, world, content)
        savers[f"{label}: {NEW_FILE}"] = make_torch_side(model_folder, world, content, files=3)
        savers[f"{label}: {SAME_FILE}"] = make_torch_side(model_folder, world, content, files=1)
    return savers | training(world) if world.size == 2 else savers


def teams(scratch: Path) -> list[Team]:
    (ROOT / "runs").mkdir(exist_ok=True)
    disk = tempfile.TemporaryDirectory(dir=ROOT / "runs", prefix="bench-")  # not below /tmp, which may be memory
    atexit.register(disk.cleanup)
    folder = Path(disk.name)
    return [Team(size, 1, lambda world: sides(folder, world)) for size in (1, 2)]


def table(samples: Samples) -> Table:
    rows = [Row(f"ms: {side}", [samples.number(side, factor=1e3)]) for side in samples.values]
    for side in samples.values:
        label, _, method = side.partition(": ")
        if method == OURS:
            slowdown = samples.ratio(side, f"{label}: {NEW_FILE}")
            rows.append(at_most(f"{label}: {OURS} / {NEW_FILE}", slowdown, GOAL))
            rows.append(Row(f"{label}: {OURS} / {SAME_FILE}", [samples.ratio(side, f"{label}: {SAME_FILE}")]))
    saving = samples.ratio(SAVE, "step")  # 100 % / 100 steps
    voting = samples.number(LOOK, factor=100 / POLL_SECONDS)
    rows.append(at_most("% of training time: a checkpoint every 100 steps", saving, 1))
    rows.append(at_most("% of training time: the votes on saving and stopping", voting, 0.5))
    rows.append(Row("warm-up of DDP's buckets / step", [samples.ratio(WARM_UP, "step")]))
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
