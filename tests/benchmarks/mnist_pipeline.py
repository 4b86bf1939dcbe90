"""What mnist_pipeline costs, beside other engines and loops and beside its limits.

Schedules: two processes with one thread each, this project's engine against torch.distributed.pipelining, the unsplit
model, and the bound that two equal stages would reach if messages took no time: half of what one thread needs for the
same microbatches, times (M + 1) / M. Loops: the same training written with bare PyTorch, Lightning, Fabric and
Accelerate. Loaders: the in-memory loader against torchvision's transforms in a DataLoader.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from common.config import config
from common.config.config import ROOT
from common.data import loader as data
from common.data import prepare
from common.models.networks import SimpleNN
from common.ranks.rendezvous import World
from common.runs.folder import RunFolder
from common.system import seeds
from common.training import learning_rate
from configs.mnist_pipeline import Config
from tests.benchmarks import peers
from tests.benchmarks.drawing import steps_of
from tests.benchmarks.measure import Samples, Side, Task, Team, require_same
from tests.benchmarks.parts import QUIET, Part, finish, run_of, timelines
from tests.benchmarks.records import Row, Table, at_least, at_most

NAME = "mnist_pipeline"
UNSPLIT = ("stages=1", "microbatches=1")
ACCUMULATING = ("stages=1", "microbatches=4", "schedule=naive")
ONE, TWO = ("launch.threads=1",), ("launch.threads=2",)
ENGINES = {"built-in": "engine=own", "torch": "engine=torch"}
TOLERANCE = 1e-3  # of losses that differ by the order of additions

# ---- a run as the README shows it


def run_side(scratch: Path) -> list[Task]:
    def run(number: int) -> dict[str, float]:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "SLURM_", "CLUSTER_"))}
        command = [sys.executable, f"experiments/{NAME}.py", "data.name=digits"]
        start = time.perf_counter()
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
        seconds = time.perf_counter() - start
        (scratch / "output").write_text(done.stdout.rstrip("\n"))
        found = re.search(r"run folder (\S+)", done.stdout)
        assert found, done.stdout
        return {"seconds": seconds, "test_accuracy": RunFolder(ROOT / found[1]).result["scores"]["test_accuracy"]}

    return [Task("command", run)]


def run_table(taken: Samples) -> Table:
    rows = [
        Row("seconds from the command to its end", [taken.number("command")]),
        Row("test accuracy, %", [taken.number("command", "test_accuracy", 100)]),
    ]
    return Table(("measured", "value"), rows)


def output(scratch: Path) -> dict[str, str]:
    return {"output": (scratch / "output").read_text()}


# ---- schedules


def pipelines(scratch: Path, schedules: list[str], engines: list[str], *values: str, keep: list[str]) -> list[Task]:
    """Pipelines in two processes, and the unsplit model with one thread and with two."""
    tasks = [
        run_of(scratch, f"{engine} {s}", NAME, *ONE, ENGINES[engine], f"schedule={s}", *values, keep=keep)
        for s in schedules
        for engine in engines
    ]
    return [
        *tasks,
        run_of(scratch, "unsplit, 1 thread", NAME, *ONE, *UNSPLIT, *values),
        run_of(scratch, "unsplit, 2 threads", NAME, *TWO, *UNSPLIT, *values),
        run_of(scratch, "accumulating, 1 thread", NAME, *ONE, *ACCUMULATING, *values),
    ]


def same_losses(scratch: Path, taken: Samples) -> None:
    """All sides train the same model on the same batches."""
    for side, found in taken.values.items():
        other = taken.values["accumulating, 1 thread"]
        require_same(side, found["first_loss"], other["first_loss"], TOLERANCE)


def small_table(taken: Samples) -> Table:
    rows = [Row(f"ms a step: {side}", [taken.number(side, factor=1e3)]) for side in taken.values]
    for name in ("naive", "gpipe", "1f1b"):
        rows.append(at_least(f"torch {name} / built-in {name}", taken.ratio(f"torch {name}", f"built-in {name}"), 3))
    for side in ("unsplit, 1 thread", "unsplit, 2 threads"):
        rows.append(Row(f"{side} / built-in 1f1b (above 1 the pipeline pays)", [taken.ratio(side, "built-in 1f1b")]))
    return Table(("measured", "value"), rows)


def wide_table(taken: Samples, microbatches: int = 4) -> Table:
    ideal = 2 * microbatches / (microbatches + 1)
    rows = [Row(f"ms a step: {side}", [taken.number(side, factor=1e3)]) for side in taken.values]
    for name in ("gpipe", "1f1b"):
        own = f"built-in {name}"
        rows += [
            at_least(f"torch {name} / {own}", taken.ratio(f"torch {name}", own), 1.1),
            at_least(f"unsplit, 1 thread / {own} (ideal {ideal:.2f})", taken.ratio("unsplit, 1 thread", own), 1.3),
            Row(f"unsplit, 2 threads / {own}", [taken.ratio("unsplit, 2 threads", own)]),
            at_least(f"share of the bound, {own}", taken.ratio("accumulating, 1 thread", own, 1 / ideal), 0.8),
            Row(f"idle share of stage 0, {own}, %", [taken.number(own, "idle_share_0", 100)]),
            Row(f"idle share of stage 1, {own}, %", [taken.number(own, "idle_share_1", 100)]),
        ]
    return Table(("measured", "value"), rows)


WIDTHS = (64, 256, 1024, 2048)


def width_sides(scratch: Path) -> list[Task]:
    found = []
    for width in WIDTHS:
        steps = max(6, min(60, 2**21 // (width * 1024)))
        words = (f"width={width}", "batch=1024", f"steps={steps}")
        found += [
            run_of(scratch, f"width {width}: 1f1b", NAME, *ONE, "schedule=1f1b", *words),
            run_of(scratch, f"width {width}: unsplit, 1 thread", NAME, *ONE, *UNSPLIT, *words),
            run_of(scratch, f"width {width}: unsplit, 2 threads", NAME, *TWO, *UNSPLIT, *words),
        ]
    return found


def width_table(taken: Samples) -> Table:
    rows = []
    for width in WIDTHS:
        own, one, two = (f"width {width}: {side}" for side in ("1f1b", "unsplit, 1 thread", "unsplit, 2 threads"))
        rows.append(Row(f"{width}", [taken.number(own, factor=1e3), taken.ratio(one, own), taken.ratio(two, own)]))
    columns = ("width", "ms a step of 1F1B", "unsplit with 1 thread / 1F1B", "unsplit with 2 threads / 1F1B")
    return Table(columns, rows)


# ---- loops and loaders


def settings() -> Config:
    return config.load_config(Config, [*QUIET, *UNSPLIT])


def loader_of(images: data.Images, cfg: Config) -> data.Loader:
    return data.Loader(images, cfg.batch, cfg.seed, torch.device("cpu"), torch.float32, block=cfg.data.block)


class Stamped:
    """The first `count` batches of a loader; the time of a step is read off in the steady part."""

    def __init__(self, batches: Callable[[], Any], count: int, warm: int) -> None:
        self.batches, self.count, self.warm = batches, count, warm

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(islice(self.batches(), self.count)):
            if number == self.warm:
                self.start = time.perf_counter()
            self.end = time.perf_counter()
            yield batch

    @property
    def seconds(self) -> float:
        return (self.end - self.start) / (self.count - 1 - self.warm)


def trained(batches: Callable[[], Any], cfg: Config, count: int, peer: peers.Peer, found: list[float]) -> float:
    """Seconds of a step of a peer; its first and last loss go to `found`."""
    torch.manual_seed(seeds.derive_seed(cfg.seed, "init"))
    model, stamped = SimpleNN(), Stamped(batches, count, warm=min(50, count // 3))
    rates = [learning_rate.compute_learning_rate(cfg.optim, step, count, cfg.batch) for step in range(count)]
    peer(model, cast(peers.Batches, stamped), rates, cfg.optim)
    found[:] = [total for p in model.parameters() for total in (p.sum().item(), p.abs().sum().item())]
    return stamped.seconds


STEPS = 600
PEERS: dict[str, peers.Peer] = {
    "bare loop": peers.bare,
    "Fabric": peers.fabric,
    "Accelerate": peers.accelerate,
    "Lightning Trainer": peers.trainer,
    "Lightning Trainer, nothing logged": peers.trainer_lean,
}


def loop_sides(scratch: Path) -> list[Team | Task]:
    prepared = prepare.prepare_dataset(settings().data)

    def sides(world: World) -> dict[str, Side]:
        cfg, images = settings(), data.Images(prepared, "train")
        expected: list[float] = []

        def timed(name: str, peer: peers.Peer) -> Side:
            def side() -> float:
                found: list[float] = []
                seconds = trained(lambda: iter(loader_of(images, cfg)), cfg, STEPS, peer, found)
                expected[:] = expected or found
                require_same(name, found, expected, 1e-6)
                return seconds

            return side

        return {name: timed(name, peer) for name, peer in PEERS.items()}

    return [run_of(scratch, "this script", NAME, *TWO, *UNSPLIT, f"steps={STEPS}"), Team(1, 2, sides)]


def loop_table(taken: Samples) -> Table:
    rows = [Row(f"us a step: {side}", [taken.number(side, factor=1e6)]) for side in taken.values]
    rows += [
        at_most(
            "this script, every loss on disk / bare loop, nothing logged", taken.ratio("this script", "bare loop"), 1.05
        ),
        at_least("Lightning Trainer / this script", taken.ratio("Lightning Trainer", "this script"), 2.3),
    ]
    for side in ("Lightning Trainer, nothing logged", "Accelerate", "Fabric"):
        rows.append(Row(f"{side} / this script", [taken.ratio(side, "this script")]))
    return Table(("measured", "value"), rows)


class PilImages(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Samples as torchvision.datasets.MNIST gives them: a PIL image each, then the transforms."""

    def __init__(self, images: data.Images) -> None:
        from torchvision import transforms

        self.images, self.labels = images.images, images.labels
        steps = [transforms.ToTensor(), transforms.Normalize((images.mean,), (images.std,))]
        self.transform = transforms.Compose(steps)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        image, label = self.images[index], int(self.labels[index])
        return self.transform(Image.fromarray(image.numpy())), label


FEW = 200


def loader_sides(scratch: Path) -> list[Team]:
    prepared = prepare.prepare_dataset(settings().data)

    def sides(world: World) -> dict[str, Side]:
        cfg, images = settings(), data.Images(prepared, "train")
        order = data.draw_sample_order(len(images), cfg.seed, 0)[: FEW * cfg.batch].tolist()

        def pil(workers: int) -> Any:
            options = {"batch_size": cfg.batch, "sampler": order, "num_workers": workers}
            return torch.utils.data.DataLoader(PilImages(images), persistent_workers=workers > 0, **options)

        fixed = next(iter(loader_of(images, cfg)))
        slow = {workers: pil(workers) for workers in (0, 2)}
        feeds: dict[str, Callable[[], Any]] = {
            "in-memory loader": lambda: iter(loader_of(images, cfg)),
            "PIL transforms in a DataLoader": lambda: iter(slow[0]),
            "the same with 2 workers": lambda: iter(slow[2]),
            "one fixed batch": lambda: iter([fixed] * FEW),
        }
        return {name: lambda feed=feed: trained(feed, cfg, FEW, peers.bare, []) for name, feed in feeds.items()}  # type: ignore[misc]

    return [Team(1, 2, sides)]


def loader_table(taken: Samples) -> Table:
    ours = "in-memory loader"
    rows = [Row(f"us a step: {side}", [taken.number(side, factor=1e6)]) for side in taken.values]
    slow, workers, fixed = (side for side in taken.values if side != ours)
    rows += [
        at_least(f"{slow} / {ours}", taken.ratio(slow, ours), 6),
        Row(f"{workers} / {ours}", [taken.ratio(workers, ours)]),
        at_least(f"{fixed}, the limit / {ours}", taken.ratio(fixed, ours), 0.8),
    ]
    return Table(("measured", "value"), rows)


# ---- time to accuracy

RECIPE = (*UNSPLIT, "batch=256", "epochs=4", "optim.name=adam", "optim.lr=0.004", "optim.decay=linear")


def accuracy_sides(scratch: Path) -> list[Task]:
    def run(number: int) -> dict[str, float]:
        words = (*RECIPE, *TWO, f"seed={number}", "data.fallback=none", "data.test_limit=0")
        folder = finish(scratch, "accuracy", NAME, *words)
        total = resumed = last = 0.0
        for row in folder.read_metrics():  # from the start to the last step, evaluations left out
            if "loss" in row:
                last = row["time"]
            else:
                total, resumed = total + last - resumed, row["time"]
        return {"seconds": total, "test_accuracy": folder.result["scores"]["test_accuracy"]}

    return [Task("training", run)]


def accuracy_table(taken: Samples) -> Table:
    rows = [
        at_most("seconds of training", taken.number("training"), 2),
        at_least("test accuracy at its end, %", taken.number("training", "test_accuracy", 100), 97.5),
    ]
    return Table(("measured, one seed a round", "value"), rows)


def no_mnist() -> str:
    """Whether real MNIST is missing here."""
    return "" if prepare.prepare_dataset(settings().data).name == "mnist" else "real MNIST is not here; set DATA_ROOT"


SMALL = ("microbatches=4", "steps=600")
WIDE = ("width=1024", "batch=1024", "depth=2", "microbatches=4", "steps=24")
ALL = ["naive", "gpipe", "1f1b"]
KEEP = ["idle_share"]

PARTS = [
    Part(f"{NAME}/run", "make exp NAME=mnist_pipeline", run_side, run_table, rounds=1, more=output),
    Part(
        f"{NAME}/schedules",
        "width 128, batch 64, 4 microbatches: engines and schedules in two processes",
        lambda scratch: pipelines(scratch, ALL, ["built-in", "torch"], *SMALL[1:], keep=KEEP),
        small_table,
        check=same_losses,
        facts={"threads": "1 a process", "batch": 64},
        more=timelines("built-in naive", "built-in gpipe", "built-in 1f1b"),
    ),
    Part(
        f"{NAME}/wide",
        "width 1024, batch 1024, depth 2, 4 microbatches: engines and schedules in two processes",
        lambda scratch: pipelines(scratch, ALL[1:], ["built-in", "torch"], *WIDE, keep=KEEP),
        wide_table,
        check=same_losses,
        facts={"threads": "1 a process", "batch": 1024},
        more=timelines("built-in gpipe", "built-in 1f1b"),
    ),
    Part(
        f"{NAME}/widths",
        "from which width on two processes beat one: 1F1B, batch 1024, 4 microbatches",
        width_sides,
        width_table,
        rounds=3,
        facts={"threads": "1 a process", "batch": 1024},
    ),
    Part(
        f"{NAME}/loop",
        "the loop of the unsplit model beside those of libraries; the same weights at the end",
        loop_sides,
        loop_table,
        rounds=8,
        drop=1,
        facts={"threads": 2, "batch": 64},
    ),
    Part(
        f"{NAME}/loader",
        "the loader beside torchvision's transforms in a DataLoader",
        loader_sides,
        loader_table,
        rounds=6,
        drop=1,
        facts={"threads": 2, "batch": 64},
    ),
    Part(
        f"{NAME}/accuracy",
        f"to 97.5 % on MNIST: {' '.join(RECIPE)}",
        accuracy_sides,
        accuracy_table,
        facts={"threads": 2, "batch": 256},
        missing=no_mnist,
    ),
]
FIGURES = steps_of(
    f"{NAME}/wide",
    {
        "built-in gpipe": "mnist_pipeline, GPipe, width 1024, a measured step",
        "built-in 1f1b": "mnist_pipeline, 1F1B, width 1024, a measured step",
    },
)
