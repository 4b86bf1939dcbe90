"""What a checkpoint costs: beside torch.save and fsync of the same state, and beside training.

ResNet-18 and ResNet-50 with the momentum of SGD, in one process and in two that train data parallel (rank 0 writes
model and optimizer, both their own random state). Training stands still for the whole of a save. torch.save writes a
new file each time and then removes the one before the last, as this project does. Beside it, the same file over and
over: that loses the state when the power fails, and is faster where free memory is slow to get back (a virtual machine
that returns it to its host), because it uses the same pages again. Beside them: a step of ResNet-18 in two processes
(batch 128, 32 px), the vote on stop requests about twice a second, and the warm-up of DDP's buckets at a start. Writes
into runs/.
"""

from __future__ import annotations

import atexit
import collections
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
from tests.benchmarks.records import Row, Table, at_most

MODELS: dict[str, Callable[[], nn.Module]] = {
    "ResNet-18": lambda: networks.build_network("resnet18", (3, 32, 32), 10),
    "ResNet-50": lambda: resnet50(weights=None),
}
GOAL = 1.3
OURS, NEW, SAME = "this project", "torch.save and fsync, a new file", "the same file again"
SAVE = f"ResNet-18, 2 processes: {OURS}"


def state_of(model: nn.Module, world: World) -> CheckpointState:
    """The state of a model in training; all but the random state is rank 0's to write."""
    torch.manual_seed(0)
    optimizer = optimizers.build_optimizer(model.parameters(), Optim(momentum=0.9))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    named = [*model.named_parameters(), *model.named_buffers()]
    memory = state_dicts.collect_optimizer_state(optimizer, model.named_parameters(), world.is_main)
    return CheckpointState(
        state_dicts.gather_full_tensors(named, world.is_main),
        memory,
        {"epoch": 3},
        {"random": state_dicts.capture_rng_state()},
    )


def size_of(content: CheckpointState) -> int:
    tensors = [*content.model.values(), *(v for memory in content.optimizer.values() for v in memory.values())]
    return sum(tensor.nbytes for tensor in tensors)


def ours(folder: Path, world: World, content: CheckpointState) -> Side:
    path = world.broadcast(str(RunFolder.create(folder, "bench", "").claim_attempt().path) if world.is_main else "")
    checkpoints = Checkpointer(RunFolder(Path(path), 1), Ranks(world), Checkpoint(), print)
    step = 0

    def side() -> float:
        nonlocal step
        step += 1
        start = time.perf_counter()
        if not checkpoints.save(step, content):
            raise OSError("not saved")
        return time.perf_counter() - start

    return side


def plainly(folder: Path, world: World, content: CheckpointState, files: int) -> Side:
    """torch.save into one of so many files in turn, and fsync; the other rank waits until it is done."""
    paths = collections.deque(folder / f"checkpoint-{files}-{number}.pt" for number in range(files))
    parts: dict[str, Any] = {"model": content.model, "optimizer": content.optimizer} | content.common | content.local

    def side() -> float:
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

    return side


def training(world: World) -> dict[str, Side]:
    """A step, the look at the flags after it, and the warm-up of buckets at a start."""
    model = nn.parallel.DistributedDataParallel(MODELS["ResNet-18"](), **ddp.make_unsynchronized_buffer_options())
    optimizer = optimizers.build_optimizer(model.parameters(), Optim(momentum=0.9))
    x, y = torch.randn(128 // world.size, 3, 32, 32), torch.zeros(128 // world.size, dtype=torch.long)
    vote = SaveOrStopVote(Ranks(world), Checkpoint(), StopRequest(60, sys.stderr))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    def timed(work: Callable[[], object], times: int) -> Side:
        def side() -> float:
            world.broadcast(None)
            start = time.perf_counter()
            for _ in range(times):
                work()
            return (time.perf_counter() - start) / times

        return side

    works = {
        "step": (step, 2),
        "look": (lambda: vote.vote_after_step(1, False, time.perf_counter()), 50),
        "warm up": (lambda: ddp.warm_up_buckets(model, x), 1),
    }
    return {name: timed(work, times) for name, (work, times) in works.items()}


def sides(folder: Path, world: World) -> dict[str, Side]:
    found: dict[str, Side] = {}
    for model, build in MODELS.items():
        content = state_of(build(), world)
        place = folder / f"{model}-{world.size}"
        place.mkdir(exist_ok=True)
        label = f"{model}, {world.size} process{'es' * (world.size > 1)}"
        found[f"{label}: {OURS}"] = ours(place, world, content)
        found[f"{label}: {NEW}"] = plainly(place, world, content, files=3)
        found[f"{label}: {SAME}"] = plainly(place, world, content, files=1)
    return found | (training(world) if world.size == 2 else {})


def teams(scratch: Path) -> list[Team]:
    (ROOT / "runs").mkdir(exist_ok=True)
    disk = tempfile.TemporaryDirectory(dir=ROOT / "runs", prefix="bench-")  # not below /tmp, which may be memory
    atexit.register(disk.cleanup)
    folder = Path(disk.name)
    return [Team(size, 1, lambda world: sides(folder, world)) for size in (1, 2)]


def table(taken: Samples) -> Table:
    rows = [Row(f"ms: {side}", [taken.number(side, factor=1e3)]) for side in taken.values]
    for side in taken.values:
        label, _, who = side.partition(": ")
        if who == OURS:
            rows.append(at_most(f"{label}: {OURS} / {NEW}", taken.ratio(side, f"{label}: {NEW}"), GOAL))
            rows.append(Row(f"{label}: {OURS} / {SAME}", [taken.ratio(side, f"{label}: {SAME}")]))
    rows += [
        at_most("% of training: a checkpoint every 100 steps", taken.ratio(SAVE, "step"), 1),  # 100 % / 100 steps
        at_most("% of training: the vote on stop requests", taken.number("look", factor=100 / POLL_SECONDS), 0.5),
        Row("warm-up of DDP's buckets at a start, in steps", [taken.ratio("warm up", "step")]),
    ]
    return Table(("measured", "value"), rows)


PARTS = [
    Part(
        "checkpoint/save",
        "training stands still for a checkpoint",
        teams,
        table,
        rounds=20,
        drop=3,  # old checkpoints are removed by then
        facts={"threads": "1 a process", "state": "89 MB (ResNet-18), 205 MB (ResNet-50)"},
    )
]
