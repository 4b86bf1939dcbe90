"""What going on later costs: a checkpoint beside torch.save and fsync of the same state, and more.

    python tests/benchmarks/checkpoint.py [ROUNDS] [FOLDER]

ResNet-18 and ResNet-50 with the momentum of SGD, in one process and in two that train data parallel (rank 0 writes
model and optimizer, both their own random state). Sides take turns; training stands still for the whole of a save.
torch.save writes a new file each time and then removes the one before the last, as ours does. Beside it, the same file
over and over: that loses the state when the power fails, and is faster where memory that was free for a while is slow
to get back (a virtual machine that returns it to its host), because it uses the same pages again.
Beside them: a step of ResNet-18 in two processes (batch 128, 32 px), the look at the flags that all take about
twice a second, and the forward and backward for nothing with which each start settles DDP's buckets.
Writes below FOLDER, by default runs/, and every sample to tests/benchmarks/results/.
"""

from __future__ import annotations

import collections
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torchvision.models import resnet50  # noqa: E402

from common.checkpoint import state_dicts  # noqa: E402
from common.checkpoint.checkpointer import Checkpoints, State  # noqa: E402
from common.checkpoint.preemption import LOOK, Notice, SafePoints  # noqa: E402
from common.distributed import ddp  # noqa: E402
from common.distributed.rendezvous import World  # noqa: E402
from common.models import networks  # noqa: E402
from common.runs.folder import Folder  # noqa: E402
from common.training import optimizers  # noqa: E402
from configs.shared import Checkpoint, Optim  # noqa: E402
from tests.benchmarks.measure import Report, Row, Side, Team, at_most, interleave  # noqa: E402

MODELS: dict[str, Callable[[], nn.Module]] = {
    "ResNet-18": lambda: networks.ResNet18((3, 32, 32), 10),
    "ResNet-50": lambda: resnet50(weights=None),
}
GOAL = 1.3
SAVE = "ResNet-18, 2 processes: ours"
WARM_UP = 3  # rounds: ours has then begun to remove old ones


def state_of(model: nn.Module, world: World) -> State:
    """The state of a model in training; all but the random state is rank 0's to write."""
    torch.manual_seed(0)
    optimizer = optimizers.make(model.parameters(), Optim(momentum=0.9))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    named = [*model.named_parameters(), *model.named_buffers()]
    memory = state_dicts.optimizer_state(optimizer, model.named_parameters(), world.is_main)
    return State(
        state_dicts.tensors(named, world.is_main), memory, {"epoch": 3}, {"random": state_dicts.random_state()}
    )


def size_of(content: State) -> int:
    tensors = [*content.model.values(), *(v for memory in content.optimizer.values() for v in memory.values())]
    return sum(tensor.nbytes for tensor in tensors)


def ours(folder: Path, world: World, content: State) -> Side:
    path = world.broadcast(Folder.create(folder, "bench", "").claim().path if world.is_main else None)
    checkpoints = Checkpoints(Folder(path, 1), world, Checkpoint(), print)
    step = 0

    def side() -> float:
        nonlocal step
        step += 1
        start = time.perf_counter()
        if not checkpoints.save(step, content):
            raise OSError("not saved")
        return time.perf_counter() - start

    return side


def plainly(folder: Path, world: World, content: State, files: int) -> Side:
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
    """A step, the look at the flags after it, and the settling of buckets at a start."""
    model = nn.parallel.DistributedDataParallel(MODELS["ResNet-18"](), **ddp.BUFFERS_STAY)
    optimizer = optimizers.make(model.parameters(), Optim(momentum=0.9))
    x, y = torch.randn(128 // world.size, 3, 32, 32), torch.zeros(128 // world.size, dtype=torch.long)
    points = SafePoints(world, Checkpoint(), Notice(60, sys.stderr))

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
        "look": (lambda: points.agree(1, False), 50),
        "warm up": (lambda: ddp.warm_up_buckets(model, x), 1),
    }
    return {name: timed(work, times) for name, (work, times) in works.items()}


def main(rounds: int, folder: Path) -> None:
    report = Report("checkpoint", ROOT / "tests" / "benchmarks" / "results")
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as name:

        def sides(world: World) -> dict[str, Side]:
            found: dict[str, Side] = {}
            for model, build in MODELS.items():
                content = state_of(build(), world)
                if world.is_main:
                    (Path(name) / model).write_text(str(size_of(content)))
                place = Path(name) / f"{model}-{world.size}"
                place.mkdir(exist_ok=True)
                label = f"{model}, {world.size} process" + "es" * (world.size > 1)
                found[f"{label}: ours"] = ours(place, world, content)
                found[f"{label}: torch.save + fsync"] = plainly(place, world, content, files=3)
                found[f"{label}: the same file again"] = plainly(place, world, content, files=1)
            return found | (training(world) if world.size == 2 else {})

        taken = interleave([Team(1, 1, sides), Team(2, 1, sides)], rounds=rounds, drop=WARM_UP)
        sizes = {model: int((Path(name) / model).read_text()) for model in MODELS}
    rows = [Row(f"{model}: bytes", f"{size:,}", note="parameters, buffers, momentum") for model, size in sizes.items()]
    for side in taken.seconds:
        kept = [f"{1e3 * seconds:.0f}" for seconds in sorted(taken.kept(side))]
        rows.append(Row(f"ms: {side}", f"{1e3 * taken.median(side):.0f} [{kept[0]}..{kept[-1]}]"))
    for side in taken.seconds:
        label, _, who = side.partition(": ")
        if who == "ours":
            what = f"{label}: ours / torch.save + fsync"
            rows.append(at_most(what, taken.ratio(side, f"{label}: torch.save + fsync"), GOAL))
            rows.append(
                Row(f"{label}: ours / the same file again", str(taken.ratio(side, f"{label}: the same file again")))
            )
    rows.append(at_most("% of training: a save every 100 steps", taken.ratio(SAVE, "step"), 1))  # 100 % / 100 steps
    look = taken.median("look")
    rows.append(
        Row("% of training: a look every half second", f"{100 * look / LOOK:.3f}", "<= 0.5", look <= LOOK / 200)
    )
    rows.append(Row("warming up DDP's buckets at a start, in steps", str(taken.ratio("warm up", "step"))))
    report.section(f"seconds that training stands still for a checkpoint in {folder}", rows, {"": taken}, bytes=sizes)
    print(f"\nraw samples: {report.file.relative_to(ROOT)}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20, Path(sys.argv[2]) if len(sys.argv) > 2 else ROOT / "runs")
