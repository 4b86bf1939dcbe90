"""The cost of mnist_pipeline, beside other engines and loops and beside its limits.

Schedules: two processes with one thread each, this project's engine against torch.distributed.pipelining, the unsplit
model, and the bound that two equal stages would reach if messages took no time: half of what one thread needs for the
same microbatches, times (M + 1) / M. Loops: the same training written with bare PyTorch, Lightning, Fabric and
Accelerate. Loaders: the in-memory loader against torchvision's transforms in a DataLoader.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any, cast

import torch
from torch import Tensor

from common.config import config
from common.config.config import ROOT
from common.data import loader as data
from common.data import prepare
from common.data.samples import Images
from common.models.model_file import read_safetensors
from common.models.networks import SimpleNN
from common.ranks.rendezvous import World
from common.runs.folder import MODEL_FILE, RunFolder
from common.system import seeds
from common.training import learning_rate
from configs.mnist_pipeline import Config
from tests.benchmarks import peers
from tests.benchmarks.drawing import steps_of
from tests.benchmarks.measure import Samples, Side, Task, Team, require_same, summarize_values
from tests.benchmarks.parts import QUIET, Part, discard_run, finish, run_of, timelines
from tests.benchmarks.records import Row, Table, at_least, at_most, list_step_times, make_value_table

NAME = "mnist_pipeline"
UNSPLIT = ("stages=1", "microbatches=1")
ACCUMULATING = ("stages=1", "microbatches=4", "schedule=naive")
ONE_THREAD = ("launch.threads=1",)
TWO_THREADS = ("launch.threads=2",)
ENGINES = {"built-in": "engine=own", "torch": "engine=torch"}
TOLERANCE = 1e-3  # of losses that differ by the order of additions

# ---- a run as the README shows it


def run_command(scratch: Path) -> dict[str, float]:
    """Run the command of the README; keep its output in `scratch`."""
    foreign = ("WANDB_", "SLURM_", "CLUSTER_")
    env = {name: text for name, text in os.environ.items() if not name.startswith(foreign)}
    command = [sys.executable, f"experiments/{NAME}.py", "data.name=digits"]
    start = time.perf_counter()
    process = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    seconds = time.perf_counter() - start
    (scratch / "output").write_text(process.stdout.rstrip("\n"))
    match = re.search(r"run folder (\S+)", process.stdout)
    assert match, process.stdout
    scores = RunFolder(ROOT / match[1]).result["scores"]
    return {"seconds": seconds, "test_accuracy": scores["test_accuracy"]}


def run_side(scratch: Path) -> list[Task]:
    return [Task("command", lambda number: run_command(scratch))]


def run_table(samples: Samples) -> Table:
    rows = [
        Row("seconds from the command to its end", [samples.number("command")]),
        Row("test accuracy, %", [samples.number("command", "test_accuracy", 100)]),
    ]
    return make_value_table(rows)


# ---- schedules


def read_output(scratch: Path) -> dict[str, str]:
    return {"output": (scratch / "output").read_text()}


def pipelines(scratch: Path, schedules: list[str], *settings: str) -> list[Task]:
    """Pipelines of both engines in two processes, and the unsplit model with one thread and with two."""
    tasks = []
    for schedule in schedules:
        for engine, engine_setting in ENGINES.items():
            pipeline = (*ONE_THREAD, engine_setting, f"schedule={schedule}", *settings)
            tasks.append(run_of(scratch, f"{engine} {schedule}", NAME, *pipeline, keep=KEEP))
    tasks.append(run_of(scratch, "unsplit, 1 thread", NAME, *ONE_THREAD, *UNSPLIT, *settings))
    tasks.append(run_of(scratch, "unsplit, 2 threads", NAME, *TWO_THREADS, *UNSPLIT, *settings))
    tasks.append(run_of(scratch, "gradient accumulation, 1 thread", NAME, *ONE_THREAD, *ACCUMULATING, *settings))
    return tasks


def same_losses(scratch: Path, samples: Samples) -> None:
    """Check that all sides train the same model on the same batches."""
    expected = samples.values["gradient accumulation, 1 thread"]["first_loss"]
    for side, columns in samples.values.items():
        require_same(side, columns["first_loss"], expected, TOLERANCE)


def small_table(samples: Samples) -> Table:
    rows = list_step_times(samples)
    for name, goal in (("naive", 4), ("gpipe", 7), ("1f1b", 7)):
        gain = samples.ratio(f"torch {name}", f"built-in {name}")
        rows.append(at_least(f"torch {name} / built-in {name}", gain, goal))
    return make_value_table(rows)


def wide_table(samples: Samples, microbatches: int = 4) -> Table:
    ideal = 2 * microbatches / (microbatches + 1)
    rows = list_step_times(samples)
    for name in ("gpipe", "1f1b"):
        side = f"built-in {name}"
        gain_over_torch = samples.ratio(f"torch {name}", side)
        gain = samples.ratio("unsplit, 1 thread", side)
        share = samples.ratio("gradient accumulation, 1 thread", side, 1 / ideal)
        rows.append(at_least(f"torch {name} / {side}", gain_over_torch, 1.1))
        rows.append(at_least(f"unsplit, 1 thread / {side} (ideal: {ideal:.2f})", gain, 1.3))
        rows.append(Row(f"unsplit, 2 threads / {side}", [samples.ratio("unsplit, 2 threads", side)]))
        rows.append(at_least(f"bound / {side}", share, 0.95))
        for stage in (0, 1):
            idle = samples.number(side, f"idle_share_{stage}", 100)
            rows.append(Row(f"% of a step that stage {stage} is idle, {side}", [idle]))
    return make_value_table(rows)


WIDTHS = (64, 256, 1024, 2048)


def width_sides(scratch: Path) -> list[Task]:
    tasks = []
    for width in WIDTHS:
        settings = (f"width={width}", "batch=1024", "steps=60")
        label = f"width {width}"
        tasks.append(run_of(scratch, f"{label}: 1f1b", NAME, *ONE_THREAD, "schedule=1f1b", *settings))
        tasks.append(run_of(scratch, f"{label}: unsplit, 1 thread", NAME, *ONE_THREAD, *UNSPLIT, *settings))
        tasks.append(run_of(scratch, f"{label}: unsplit, 2 threads", NAME, *TWO_THREADS, *UNSPLIT, *settings))
    return tasks


def width_table(samples: Samples) -> Table:
    rows = []
    for width in WIDTHS:
        side = f"width {width}: 1f1b"
        gain = samples.ratio(f"width {width}: unsplit, 1 thread", side)
        gain_over_threads = samples.ratio(f"width {width}: unsplit, 2 threads", side)
        rows.append(Row(f"{width}", [samples.number(side, factor=1e3), gain, gain_over_threads]))
    columns = ("width", "ms per step: 1F1B", "unsplit with 1 thread / 1F1B", "unsplit with 2 threads / 1F1B")
    return Table(columns, rows)


# The formulas of the bubbles hold for stages that take equally long.
BUBBLE = ("model=tests/benchmarks/equal_layers.py:EqualLayers", "batch=2048", "microbatches=8", "steps=12")
ONE_STAGE = ("naive", "gpipe", "1f1b", "zero_bubble")
TWO_STAGES = ("interleaved_1f1b", "zero_bubble", "zbv", "dualpipev")
BUBBLE_TOLERANCE = 3  # percentage points


def list_bubble_settings() -> dict[str, tuple[str, ...]]:
    """Return the settings of each side: two ranks with one stage or with two stages each."""
    settings: dict[str, tuple[str, ...]] = {}
    for name in ONE_STAGE:
        settings[name] = (f"schedule={name}", "stages=2", "split=[layer9]")
    for name in TWO_STAGES:
        stages = ("stages=4", "stages_per_process=2", "split=[layer5,layer9,layer13]")
        settings[f"{name}, 2 stages per rank"] = (f"schedule={name}", *stages)
    return settings


def bubble_sides(scratch: Path) -> list[Task]:
    tasks = []
    for label, settings in list_bubble_settings().items():
        keep = ("ideal_bubble", "idle_share")
        tasks.append(run_of(scratch, label, NAME, *ONE_THREAD, *BUBBLE, *settings, keep=keep))
    return tasks


def bubble_table(samples: Samples) -> Table:
    rows = []
    for label in list_bubble_settings():
        idle_shares = zip(*(samples.list_counted(label, f"idle_share_{rank}") for rank in (0, 1)), strict=True)
        measured = summarize_values([100 * mean(shares) for shares in idle_shares])
        computed = samples.number(label, "ideal_bubble", 100)
        bound = round(computed.value + BUBBLE_TOLERANCE, 1)
        rows.append(Row(label, [measured, computed, samples.number(label, factor=1e3)], bound, at_least=False))
    return Table(("schedule", "measured bubble, %", "computed bubble, %", "ms per step"), rows)


# ---- loops and loaders


def loader_of(images: Images, cfg: Config) -> data.Loader:
    return data.Loader(images, cfg.batch, cfg.seed, torch.device("cpu"), torch.float32, block=cfg.data.block)


def load_unsplit_config() -> Config:
    return config.load_config(Config, [*QUIET, *UNSPLIT])


class Stamped:
    """The first `count` batches of a loader, with the time of a step in the steady part."""

    def __init__(self, batches: Callable[[], Any], count: int, warm: int) -> None:
        self.batches = batches
        self.count = count
        self.warm = warm

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
        """Seconds of a step."""
        return (self.end - self.start) / (self.count - 1 - self.warm)


STEPS = 4000  # so many that the first steps of a new process, which are slower, hardly count
SKIPPED_STEPS = 50
SCRIPT = "this script"
PEERS: dict[str, peers.Peer] = {
    "bare loop": peers.bare,
    "Fabric": peers.fabric,
    "Accelerate": peers.accelerate,
    "Lightning Trainer": peers.trainer,
    "Lightning Trainer, nothing logged": peers.trainer_lean,
}


def run_script(scratch: Path) -> Task:
    """The script in a new process, with as many steps as a peer; its trained model is left in `scratch`."""

    def run(number: int) -> dict[str, float]:
        folder = finish(scratch, SCRIPT, NAME, *TWO_THREADS, *UNSPLIT, f"steps={STEPS}")
        durations = [row["step_time"] for row in folder.read_metrics() if "step_time" in row]
        shutil.copy(folder.path / MODEL_FILE, scratch)
        discard_run(folder)
        return {"seconds": mean(durations[SKIPPED_STEPS:])}

    return Task(SCRIPT, run)


def repeat_epochs(loader: data.Loader) -> Iterator[Any]:
    """Yield the batches of a loader without end."""
    while True:
        yield from loader


def train_peer(batches: Callable[[], Any], cfg: Config, count: int, peer: peers.Peer) -> tuple[float, SimpleNN]:
    """Train with a peer; return the seconds of a step, and the trained model."""
    torch.manual_seed(seeds.derive_seed(cfg.seed, "init"))
    model = SimpleNN()
    stamped = Stamped(batches, count, warm=min(SKIPPED_STEPS, count // 3))
    rates = [learning_rate.compute_learning_rate(cfg.optim, step, count, cfg.batch) for step in range(count)]
    peer(model, cast(peers.Batches, stamped), rates, cfg.optim)
    return stamped.seconds, model


def loop_sides(scratch: Path) -> list[Team | Task]:
    prepared = prepare.prepare_dataset(load_unsplit_config().data)

    def sides(world: World) -> dict[str, Side]:
        cfg = load_unsplit_config()
        images = Images(prepared, "train")

        def make_side(name: str, peer: peers.Peer) -> Side:
            def side() -> float:
                seconds, model = train_peer(lambda: repeat_epochs(loader_of(images, cfg)), cfg, STEPS, peer)
                # The script has run before, because the first round starts with it.
                trained = read_safetensors(scratch / MODEL_FILE)
                torch.testing.assert_close(dict(model.state_dict()), trained, msg=lambda text: f"{name}: {text}")
                return seconds

            return side

        return {name: make_side(name, peer) for name, peer in PEERS.items()}

    return [run_script(scratch), Team(1, 2, sides)]


def loop_table(samples: Samples) -> Table:
    slowdown = samples.ratio(SCRIPT, "bare loop")
    gain = samples.ratio("Lightning Trainer", SCRIPT)
    rows = list_step_times(samples, "us")
    rows.append(at_most("this script, all losses logged / bare loop, nothing logged", slowdown, 1.02))
    rows.append(at_least("Lightning Trainer / this script", gain, 2.6))
    for side, goal in (("Lightning Trainer, nothing logged", 1.8), ("Accelerate", 1.3), ("Fabric", 1.0)):
        rows.append(at_least(f"{side} / this script", samples.ratio(side, SCRIPT), goal))
    return make_value_table(rows)


class PilImages(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Samples as torchvision.datasets.MNIST gives them: a PIL image each, then the transforms."""

    def __init__(self, images: Images) -> None:
        from torchvision import transforms

        self.images = images.images
        self.labels = images.labels
        normalize = transforms.Normalize((images.mean,), (images.std,))
        self.transform = transforms.Compose([transforms.ToTensor(), normalize])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        image = Image.fromarray(self.images[index].numpy())
        return self.transform(image), int(self.labels[index])


LOADER_STEPS = 200


def loader_sides(scratch: Path) -> list[Team]:
    prepared = prepare.prepare_dataset(load_unsplit_config().data)

    def sides(world: World) -> dict[str, Side]:
        cfg = load_unsplit_config()
        images = Images(prepared, "train")
        order = data.draw_sample_order(len(images), cfg.seed, 0)[: LOADER_STEPS * cfg.batch].tolist()

        def make_data_loader(workers: int) -> Any:
            return torch.utils.data.DataLoader(
                PilImages(images),
                batch_size=cfg.batch,
                sampler=order,
                num_workers=workers,
                persistent_workers=workers > 0,
            )

        def make_side(batches: Callable[[], Any]) -> Side:
            return lambda: train_peer(batches, cfg, LOADER_STEPS, peers.bare)[0]

        fixed = next(iter(loader_of(images, cfg)))
        in_process = make_data_loader(0)
        with_workers = make_data_loader(2)
        return {
            "in-memory loader": make_side(lambda: iter(loader_of(images, cfg))),
            "PIL transforms in a DataLoader": make_side(lambda: iter(in_process)),
            "PIL transforms in a DataLoader, 2 workers": make_side(lambda: iter(with_workers)),
            "one fixed batch": make_side(lambda: iter([fixed] * LOADER_STEPS)),
        }

    return [Team(1, 2, sides)]


def loader_table(samples: Samples) -> Table:
    ours = "in-memory loader"
    slow, workers, fixed = (side for side in samples.values if side != ours)
    rows = list_step_times(samples, "us")
    rows.append(at_least(f"{slow} / {ours}", samples.ratio(slow, ours), 8))
    rows.append(Row(f"{workers} / {ours}", [samples.ratio(workers, ours)]))
    rows.append(at_least(f"{fixed} (lower bound) / {ours}", samples.ratio(fixed, ours), 0.95))
    return make_value_table(rows)


# ---- time to accuracy

RECIPE = (*UNSPLIT, "batch=256", "epochs=4", "optim.name=adam", "optim.lr=0.004", "optim.decay=linear")


def measure_training_seconds(folder: RunFolder) -> float:
    """Return the seconds from the start to the last step, evaluations left out."""
    total = 0.0
    resumed_at = 0.0
    last_step_at = 0.0
    for row in folder.read_metrics():
        if "loss" in row:
            last_step_at = row["time"]
        else:
            total += last_step_at - resumed_at
            resumed_at = row["time"]
    return total


def accuracy_sides(scratch: Path) -> list[Task]:
    def run(number: int) -> dict[str, float]:
        settings = (*RECIPE, *TWO_THREADS, f"seed={number}", "data.fallback=none", "data.test_limit=0")
        folder = finish(scratch, "accuracy", NAME, *settings)
        accuracy = folder.result["scores"]["test_accuracy"]
        seconds = measure_training_seconds(folder)
        discard_run(folder)
        return {"seconds": seconds, "test_accuracy": accuracy}

    return [Task("training", run)]


def accuracy_table(samples: Samples) -> Table:
    rows = [
        at_most("seconds of training", samples.number("training"), 0.9),
        at_least("test accuracy at its end, %", samples.number("training", "test_accuracy", 100), 97.5),
    ]
    return Table(("measured, one seed a round", "value"), rows)


def no_mnist() -> str:
    """Return why real MNIST cannot be used here; empty if it can."""
    prepared = prepare.prepare_dataset(load_unsplit_config().data)
    return "" if prepared.name == "mnist" else "real MNIST is not here; set DATA_ROOT"


SMALL = ("steps=600",)
WIDE = ("width=1024", "batch=1024", "depth=2", "microbatches=4", "steps=24")
ALL = ["naive", "gpipe", "1f1b"]
KEEP = ["idle_share"]
THREADS = "1 thread per process unless the table states otherwise"

PARTS = [
    Part(f"{NAME}/run", "make exp NAME=mnist_pipeline", run_side, run_table, attachments=read_output),
    Part(
        f"{NAME}/schedules",
        "width 128, batch 64, 4 microbatches: engines and schedules in two processes",
        lambda scratch: pipelines(scratch, ALL, *SMALL),
        small_table,
        check=same_losses,
        facts=(THREADS, "batch size 64"),
        attachments=timelines("built-in naive", "built-in gpipe", "built-in 1f1b"),
    ),
    Part(
        f"{NAME}/wide",
        "width 1024, batch 1024, depth 2, 4 microbatches: engines and schedules in two processes",
        lambda scratch: pipelines(scratch, ALL[1:], *WIDE),
        wide_table,
        check=same_losses,
        facts=(THREADS, "batch size 1024"),
        attachments=timelines("built-in gpipe", "built-in 1f1b"),
    ),
    Part(
        f"{NAME}/widths",
        "from which width on two processes beat one: 1F1B, batch 1024, 4 microbatches",
        width_sides,
        width_table,
        facts=(THREADS, "batch size 1024"),
    ),
    Part(
        f"{NAME}/bubbles",
        "computed and measured bubbles of the built-in engine: 16 equal layers of width 784, 8 microbatches",
        bubble_sides,
        bubble_table,
        facts=(THREADS, "batch size 2048"),
    ),
    Part(
        f"{NAME}/loop",
        "the loop of the unsplit model beside those of libraries; the same weights at the end",
        loop_sides,
        loop_table,
        rounds=8,
        drop=1,
        facts=("2 threads", "batch size 64"),
    ),
    Part(
        f"{NAME}/loader",
        "the loader beside torchvision's transforms in a DataLoader",
        loader_sides,
        loader_table,
        rounds=6,
        drop=1,
        facts=("2 threads", "batch size 64"),
    ),
    Part(
        f"{NAME}/accuracy",
        f"to 97.5 % on MNIST: {' '.join(RECIPE)}",
        accuracy_sides,
        accuracy_table,
        facts=("2 threads", "batch size 256"),
        missing=no_mnist,
    ),
]
FIGURES = steps_of(f"{NAME}/wide", {"built-in gpipe": "mnist_pipeline, GPipe, width 1024, a measured step"})
