"""What fewer bits and accumulation gain, on generated images.

    python tests/benchmarks/amp_accum.py            about ten minutes
    python tests/benchmarks/amp_accum.py 3          three rounds instead of six
    python tests/benchmarks/amp_accum.py gpu        ResNet-50 at 224 px on a CUDA GPU, and its share of the card's rate

ResNet-50 with channels_last and bf16 against colour planes and fp32, in one process with two threads. ResNet-18 in two
processes with one thread each: gradients exchanged once in four microbatches against each time, and the same training
written with Accelerate and with Lightning Fabric. Goals stand beside what was measured; nothing fails because it was
slow. Raw samples go to tests/benchmarks/results/.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this tree, wherever installed packages point to

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from common.core import config, seeds
from common.core.errors import UserError, user_errors
from common.data import loader as data
from common.data import prepare
from common.data.prepare import Prepared
from common.distributed import local_launcher, rendezvous
from common.distributed.rendezvous import Place, World
from common.measure import step_timing
from common.measure.memory import Footprint
from common.runs.folder import Folder
from common.training import optimizers
from common.training.run import Run
from configs.amp_accum import Config
from configs.shared import Launch
from experiments import amp_accum as experiment
from tests.benchmarks.ddp import announce
from tests.benchmarks.learner import QUIET, ROOT, require_same
from tests.benchmarks.measure import Report, Row, Samples, Side, Team, at_least, at_most, interleave

STEPS = 2  # a turn, after one that does not count
SETTINGS = ("data.name=generated", "data.samples=640", "optim.warmup=0", "optim.decay=constant", "optim.lr=0.01")
DEEP = ("model=resnet50", "batch=32", "accumulate=1", "processes_per_node=1")
SMALL = ("model=resnet18", "batch=128", "accumulate=4", "precision=bf16", "processes_per_node=2")
BRIEF = ("model=resnet18", "data.image_size=64", "batch=32", "accumulate=4", "precision=fp32", "processes_per_node=2")
PRODUCTS = {"product fp32": torch.float32, "product bf16": torch.bfloat16}
SYNC = {"once, brief": "true", "each, brief": "false"}
Window = list[tuple[Tensor, Tensor]]
Train = Callable[[list[Window]], None]


class Bench:
    """Prepared images and a scratch folder."""

    def __init__(self, scratch: Path, *values: str) -> None:
        self.scratch, self.values = scratch, values
        self.prepared: Prepared = prepare.prepare(self.settings().data)

    def settings(self, *values: str) -> Config:
        return config.load(Config, [*QUIET, *SETTINGS, f"data.cache={self.scratch}", *self.values, *values])

    def model(self, cfg: Config, world: World) -> nn.Module:
        torch.manual_seed(seeds.derive(cfg.seed, "init"))
        return experiment.build(cfg, data.Images(self.prepared, "train"), world)

    def turn(self, name: str, world: World, cfg: Config, train: Train, losses: list[Tensor]) -> Side:
        """A side that trains STEPS windows; the losses of its first ones are kept, to compare the sides by."""
        images, share = data.Images(self.prepared, "train"), (world.rank, world.size)
        loader = data.Loader.from_config(images, cfg, world.device, batch=cfg.microbatch, shard=share)
        windows = list(islice(data.AccumulationLoader(loader, cfg.accumulate), STEPS + 1))

        def side() -> float:
            train(windows[:1])
            dist.barrier()
            start = time.perf_counter()
            train(windows[1:])
            dist.barrier()
            seconds = (time.perf_counter() - start) / STEPS
            value = torch.stack(losses[: STEPS + 1]).double()
            dist.all_reduce(value)
            if world.is_main:
                torch.save(value / world.size, self.scratch / f"{name}.pt")
            return seconds

        return side

    def ours(self, name: str, world: World, *values: str) -> Side:
        """The experiment's own train_epoch, with its log."""
        cfg = self.settings(*values)
        path = Folder.create(self.scratch / name, "bench", config.to_yaml(cfg)).claim().path if world.is_main else None
        run = Run(cfg, Folder(world.broadcast(path), 1), world, self.prepared)
        run.averaged, run.total = True, 10**9
        model = experiment.wrap(cfg, self.model(cfg, world), world)
        optimizer = optimizers.make(model.parameters(), cfg.optim, scaled=cfg.precision == "fp16")
        scaler, footprint, losses = experiment.make_scaler(cfg, world.device), Footprint(world.device), list[Tensor]()
        log, steps, times = run.log, 0, step_timing.StepTimes(model, world.device)

        def keep(step: int, **row: Any) -> None:
            losses.append(row["loss"])
            log(step, **row)

        run.log = keep  # type: ignore[method-assign]

        def train(windows: list[Window]) -> None:
            nonlocal steps
            run.flushed = time.perf_counter()  # so that waiting for the turn does not look like slow steps
            given = cast(data.AccumulationLoader, windows)
            steps = experiment.train_epoch(cfg, model, optimizer, scaler, given, run, footprint, times, steps, 10**9)

        return self.turn(name, world, cfg, train, losses)

    def other(self, name: str, world: World, prepare_step: Callable[[nn.Module, Any, int], Any]) -> Side:
        """The same training as a library writes it: `prepare_step` gives a function for one microbatch."""
        cfg, losses = self.settings(), list[Tensor]()
        model = self.model(cfg, world).train()
        rate = optimizers.rate(cfg.optim, 0, 1, cfg.batch)
        made = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, nesterov=True, fused=True)
        step = prepare_step(model, made, cfg.accumulate)

        def train(windows: list[Window]) -> None:
            for window in windows:
                parts = [step(x, y, number == len(window)) for number, (x, y) in enumerate(window, 1)]
                losses.append(torch.stack(parts).mean())

        return self.turn(name, world, cfg, train, losses)

    def first(self, side: str) -> list[float]:
        return cast(list[float], torch.load(self.scratch / f"{side}.pt").tolist())


def accelerate(model: nn.Module, optimizer: Any, count: int) -> Any:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=count)
    assert accelerator.num_processes == dist.get_world_size()
    model, optimizer = accelerator.prepare(model, optimizer)

    def step(x: Tensor, y: Tensor, last: bool) -> Tensor:
        with accelerator.accumulate(model):
            with accelerator.autocast():
                loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)  # which divides
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return step


def fabric(model: nn.Module, optimizer: Any, count: int) -> Any:
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import TorchElasticEnvironment

    places: Any = {"devices": dist.get_world_size(), "plugins": [TorchElasticEnvironment()]}
    runner = Fabric(accelerator="cpu", strategy="ddp", precision="bf16-mixed", **places)
    runner.launch()
    assert runner.world_size == dist.get_world_size()
    wrapped, optimizer = runner.setup(model, optimizer)

    def step(x: Tensor, y: Tensor, last: bool) -> Tensor:
        with runner.no_backward_sync(wrapped, enabled=not last):
            loss = F.cross_entropy(wrapped(x), y)
            runner.backward(loss / count)
        if last:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return step


def times(taken: Samples) -> list[Row]:
    busy = {side: f"{median(taken.cores[side]):.1f} cores busy" for side in taken.seconds}
    return [Row(f"ms/step: {s}", f"{taken.median(s) * 1e3:.1f}", note=busy[s]) for s in taken.seconds]


def bits(report: Report, scratch: Path, pixels: int, goal: float, rounds: int) -> None:
    """channels_last and bf16, apart and together, against neither."""
    bench = Bench(scratch, *DEEP, f"data.image_size={pixels}", f"data.samples={32 * (STEPS + 2)}")
    sides = {
        f"{precision}{' channels_last' if last else ''} {pixels}": (f"precision={precision}", f"channels_last={last}")
        for precision, last in itertools.product(("fp32", "bf16"), ("", "true"))
    }
    words = {side: [word for word in values if not word.endswith("=")] for side, values in sides.items()}
    team = Team(1, 2, lambda world: {side: bench.ours(side, world, *values) for side, values in words.items()})
    limit = Team(1, 2, lambda world: {name: product(dtype) for name, dtype in PRODUCTS.items()})
    taken = interleave([team, limit], rounds=rounds, drop=1)
    plain, *others = sides
    require_same("channels_last", bench.first(others[0])[:1], bench.first(plain)[:1], 1e-3)
    for side in others[1:]:
        require_same(side, bench.first(side)[:1], bench.first(plain)[:1], 0.05)
    rows = times(taken) + [Row(f"{plain} / {side}", str(taken.ratio(plain, side))) for side in others[:2]]
    rows.append(at_least(f"{plain} / {others[2]}", taken.ratio(plain, others[2]), goal))
    rows.append(
        Row("fp32 / bf16 of a matrix product, the limit of bf16", str(taken.ratio("product fp32", "product bf16")))
    )
    report.section(f"ResNet-50 at {pixels} px, batch 32, one process with two threads", rows, {"": taken})


def product(dtype: torch.dtype) -> Side:
    """A matrix product that is large enough to reach the processor's rate."""
    a, b = (torch.randn(2048, 2048).to(dtype) for _ in range(2))

    def side() -> float:
        start = time.perf_counter()
        for _ in range(5):
            a @ b
        return (time.perf_counter() - start) / 5

    return side


def brief(report: Report, scratch: Path, rounds: int) -> None:
    """Exchanging once a window, where there is little to compute for each byte that travels."""
    bench = Bench(scratch, *BRIEF)

    def two(world: World) -> dict[str, Side]:
        return {name: bench.ours(name, world, f"no_sync={word}") for name, word in SYNC.items()}

    taken = interleave([Team(2, 1, two)], rounds=rounds, drop=1)
    require_same("each, brief", bench.first("each, brief")[:2], bench.first("once, brief")[:2], 1e-4)
    rows = [*times(taken), at_least("exchanged each time / once", taken.ratio("each, brief", "once, brief"), 1.3)]
    report.section(f"two ddp processes with one thread each: {' '.join(BRIEF)}", rows, {"": taken})


def windows(report: Report, scratch: Path, rounds: int) -> None:
    """Exchanging once a window, and the libraries that do the same."""
    bench = Bench(scratch, *SMALL)

    def two(world: World) -> dict[str, Side]:
        announce(world)
        return {
            "once": bench.ours("once", world),
            "each": bench.ours("each", world, "no_sync=false"),
            "accelerate": bench.other("accelerate", world, accelerate),
            "fabric": bench.other("fabric", world, fabric),
        }

    taken = interleave([Team(2, 1, two)], rounds=rounds, drop=1)
    for side in ("each", "accelerate", "fabric"):
        require_same(side, bench.first(side)[:2], bench.first("once")[:2], 0.02)
    rows = [
        *times(taken),
        at_least("exchanged each time / once", taken.ratio("each", "once"), 1.3),
        at_most("ours / Accelerate", taken.ratio("once", "accelerate"), 1.01),
        at_most("ours / Fabric", taken.ratio("once", "fabric"), 1.01),
    ]
    report.section(f"two ddp processes with one thread each: {' '.join(SMALL)}", rows, {"": taken})


# ---- on a GPU


def matrix_rate(precision: str) -> float:
    """Floating-point operations a second of a large matrix product."""
    dtype, n = experiment.HALF.get(precision, torch.float32), 8192
    a, b = (torch.randn(n, n, device="cuda", dtype=dtype) for _ in range(2))
    seconds = []
    for _ in range(12):
        torch.cuda.synchronize()
        start = time.perf_counter()
        a @ b
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return 2 * n**3 / median(seconds[2:])


def on_gpu(bench: Bench, cfg: Config, world: World) -> dict[str, float]:
    """Samples a second, bytes, and operations a second of the model and of a matrix product."""
    from torch.utils.flop_counter import FlopCounterMode

    experiment.prepare_device(cfg, world, cast(Run, None))  # says nothing on a GPU
    inner = bench.model(cfg, world).train()
    images = data.Images(bench.prepared, "train")
    loader = data.Loader.from_config(images, cfg, world.device, batch=cfg.microbatch)
    given = list(data.AccumulationLoader(loader, cfg.accumulate))
    scaler, footprint = experiment.make_scaler(cfg, world.device), Footprint(world.device)
    times = step_timing.StepTimes(inner, world.device)
    with FlopCounterMode(display=False) as counter:
        experiment.add_up(cfg, inner, scaler, given[0], footprint, times)
    model = experiment.wrap(cfg, inner, world)
    optimizer = optimizers.make(model.parameters(), cfg.optim, scaled=scaler.is_enabled())
    torch.cuda.reset_peak_memory_stats()  # what counting took, uncompiled, is not this setting's
    marks = []
    for number in range(30):
        optimizer.zero_grad()
        experiment.add_up(cfg, model, scaler, given[number % len(given)], footprint, times)
        experiment.update(cfg, model, optimizer, scaler)
        torch.cuda.synchronize()
        marks.append(time.perf_counter())
    seconds = median(b - a for a, b in itertools.pairwise(marks[9:]))
    memory, flops = torch.cuda.max_memory_allocated(), counter.get_total_flops() / seconds
    return {"rate": cfg.batch / seconds, "memory": memory, "flops": flops, "matrix": matrix_rate(cfg.precision)}


def gpu(report: Report, scratch: Path) -> None:
    """Every precision, layout, and with and without compiling; each in a process of its own."""
    if not torch.cuda.device_count():
        raise UserError("gpu: no CUDA GPU is here; leave the word out to measure on the CPU")
    bench = Bench(scratch, *DEEP[:1], *DEEP[2:], "batch=256", "data.image_size=224", "data.samples=1024")
    rows, found, out = [], {}, scratch / "found.pt"
    grid = itertools.product(("fp32", "tf32", "bf16", "fp16"), ("false", "true"), ("false", "true"))
    for precision, layout, compiled in grid:
        cfg = bench.settings(f"precision={precision}", f"channels_last={layout}", f"compile={compiled}")

        def body(place: Place, cfg: Config = cfg) -> None:
            with rendezvous.group(place, Launch(device="cuda")) as world:
                name = torch.cuda.get_device_name(world.device)
                torch.save(on_gpu(bench, cfg, world) | {"card": name}, out)

        if local_launcher.fork_all(body, 1, 1, lambda: None):
            sys.exit(1)
        it = found[f"{precision} {layout} {compiled}"] = torch.load(out)
        words = precision + (" channels_last" if layout == "true" else "") + (" compiled" if compiled == "true" else "")
        share = f"{it['flops'] / it['matrix']:.0%} of {it['matrix'] / 1e12:.0f} TFLOP/s, {it['memory'] / 1e9:.1f} GB"
        rows.append(Row(words, f"{it['rate']:,.0f} samples/s", note=share))
    card = next(iter(found.values()))["card"]
    report.section(
        f"ResNet-50 at 224 px, batch 256, one {card}: share of a matrix product's rate", rows, {}, found=found
    )


def main(words: list[str]) -> None:
    rounds = int(words[0]) if words and words[0] != "gpu" else 6
    with user_errors(), tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        report = Report("amp_accum", ROOT / "tests" / "benchmarks" / "results")
        if "gpu" in words:
            gpu(report, Path(scratch))
        else:
            windows(report, Path(scratch), rounds)
            brief(report, Path(scratch), rounds)
            bits(report, Path(scratch), 64, 2.0, rounds)
            bits(report, Path(scratch), 128, 2.8, rounds)
        print(f"\nraw samples: {report.file.relative_to(ROOT)}")


if __name__ == "__main__":
    main(sys.argv[1:])
