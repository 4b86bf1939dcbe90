"""What pruning costs and what sparse inference gains.

    python tests/benchmarks/sparse_prune.py            about five minutes
    python tests/benchmarks/sparse_prune.py 3          three rounds instead of six
    python tests/benchmarks/sparse_prune.py 2:4        on an NVIDIA GPU: 2:4 sparse against dense linear layers

Global magnitude masks of ResNet-50 at 90 % against torch.nn.utils.prune.global_unstructured; a training step with masks
against a dense one and the library's reparametrisation; a linear layer in CSR against dense ones in float32 and bf16.
Goals stand beside what was measured; nothing fails because it was slow. Raw samples go to tests/benchmarks/results/.
"""

from __future__ import annotations

import copy
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this tree, wherever installed packages point to

import torch
from torch import Tensor, nn
from torch.nn.utils import prune as library

from common.core import config, seeds
from common.core.errors import UserError, user_errors
from common.data import loader as data
from common.data import prepare
from common.distributed.rendezvous import World
from common.measure import step_timing
from common.models import networks, pruning_masks, pruning_savings
from common.models.pruning_masks import Masks
from common.runs.folder import Folder
from common.training import optimizers
from common.training.run import Run
from configs.sparse_prune import Config
from experiments import sparse_prune as experiment
from tests.benchmarks.learner import QUIET, ROOT, require_same
from tests.benchmarks.measure import Report, Row, Side, Team, at_least, at_most, interleave

SHARE = 0.9
STEPS = 100  # a turn, after one that does not count
WIDTH, SAMPLES = 4096, 64
LEVELS = (0.8, 0.9, 0.95, 0.98)
SETTINGS = ("model=mlp", "batch=64", "sparsity=0.9", "schedule=oneshot", "begin=0", "end=0", "optim.decay=constant")
TOLERANCE = 1e-5  # of the losses


def timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


# ---- masks of ResNet-50


def mask_sides(world: World) -> dict[str, Side]:
    torch.manual_seed(0)
    clean = networks.ResNet("resnet50", (3, 224, 224), 1000)
    model = copy.deepcopy(clean)
    masks = Masks(model)

    def ours() -> float:
        def work() -> None:
            with torch.no_grad():
                masks.set(pruning_masks.globally([weight.abs() for weight in masks.weights], SHARE))

        return timed(work)

    def theirs() -> float:
        other = copy.deepcopy(clean)
        pairs = [(other.get_submodule(name), "weight") for name in masks.layers]
        seconds = timed(lambda: library.global_unstructured(pairs, pruning_method=library.L1Unstructured, amount=SHARE))
        found = [module.get_buffer("weight_mask").bool() for module, _ in pairs]
        if not same_masks(masks, found):
            raise AssertionError("the library's masks are other ones")
        return seconds

    def kth_value() -> float:
        """One k-th value of everything, without the copy before it and the masks after it."""
        flat = torch.cat([weight.detach().abs().flatten() for weight in masks.weights])
        return timed(lambda: flat.kthvalue(round(SHARE * flat.numel())))

    return {"ours": ours, "library": theirs, "kthvalue": kth_value}


def same_masks(masks: Masks, found: list[Tensor]) -> bool:
    """Whether masks are equal but for weights of the same magnitude, and leave as many."""
    odd = [w.detach().abs()[a != b] for w, a, b in zip(masks.weights, masks.kept, found, strict=True)]
    return (
        sum(int(m.sum()) for m in found) == sum(int(m.sum()) for m in masks.kept) and len(torch.cat(odd).unique()) < 2
    )


# ---- a step of training


class Bench:
    """The prepared images and a scratch folder."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.prepared = prepare.prepare(self.settings().data)

    def settings(self, *values: str) -> Config:
        return config.load(Config, [*QUIET, *SETTINGS, *values])

    def side(self, name: str, world: World, *values: str, reparametrise: bool = False) -> Side:
        """The experiment's own train_epoch."""
        cfg = self.settings(*values)
        torch.manual_seed(seeds.derive(cfg.seed, "init"))
        path = Folder.create(self.scratch / name, "bench", config.to_yaml(cfg)).claim().path
        run = Run(cfg, Folder(path, 1), world, self.prepared)
        run.total = 10**9
        model = networks.SimpleNN()
        masks = Masks(model)
        images = data.Images(self.prepared, "train")
        loader = data.Loader(images, cfg.batch, cfg.seed, world.device, torch.float32, block=1)
        if reparametrise:
            pairs = [(layer, "weight") for layer in masks.layers.values()]
            for layer in masks.layers.values():
                del layer._buffers["weight_mask"]  # the library's has the same name
            library.global_unstructured(pairs, pruning_method=library.L1Unstructured, amount=cfg.sparsity)
        optimizer = optimizers.make(model.parameters(), cfg.optim)
        times = step_timing.StepTimes(model, world.device)
        it = experiment.Parts(cfg, world, run, model, masks, optimizer, loader, times)
        experiment.prune(it, 0)
        masks.apply()
        batches, steps = list(islice(loader, STEPS + 1)), 0

        def train(chosen: list[tuple[Tensor, Tensor]]) -> None:
            nonlocal steps
            run.flushed = time.perf_counter()  # so that waiting for the turn does not look like slow steps
            feed = cast(data.Loader, Fed(chosen, images))
            steps = experiment.train_epoch(replace(it, loader=feed), steps)

        def turn() -> float:
            train(batches[:1])
            seconds = timed(lambda: train(batches[1:])) / STEPS
            if steps == STEPS + 1:
                run.flush()
                torch.save([row["loss"] for row in run.folder.metrics()][:20], self.scratch / f"{name}.pt")
            return seconds

        return turn

    def sides(self, world: World) -> dict[str, Side]:
        return {
            "dense": self.side("dense", world, "schedule=none"),
            "masks": self.side("masks", world),
            "reparametrised": self.side("reparametrised", world, "schedule=none", reparametrise=True),
        }


class Fed(list[Any]):
    """Batches in place of a loader."""

    def __init__(self, batches: list[tuple[Tensor, Tensor]], images: data.Images) -> None:
        super().__init__(batches)
        self.data = images


# ---- inference


def linear_sides(world: World) -> dict[str, Side]:
    torch.manual_seed(0)
    layer, x = nn.Linear(WIDTH, WIDTH).requires_grad_(False), torch.randn(SAMPLES, WIDTH)
    half, low = copy.deepcopy(layer).bfloat16(), x.bfloat16()

    def side(of: Callable[[], Tensor]) -> Side:
        def turn() -> float:
            with torch.no_grad():
                of()
                return timed(lambda: [of() for _ in range(5)]) / 5

        return turn

    found = {"fp32": side(lambda: layer(x)), "bf16": side(lambda: half(low))}
    for level in LEVELS:
        thin = copy.deepcopy(layer)
        thin.weight.mul_(pruning_masks.by_layer([thin.weight.abs()], [level])[0])
        rows = pruning_savings.as_csr(nn.Sequential(thin))
        if not torch.allclose(rows(x), thin(x), atol=1e-4):
            raise AssertionError("CSR gives other outputs")
        found[f"csr {level:.0%}"] = side(lambda rows=rows: rows(x))  # type: ignore[misc]
    return found


def two_of_four() -> None:
    """2:4 sparse against dense linear layers in float16, on the GPU of this machine."""
    if not torch.cuda.is_available():
        raise UserError("2:4 needs an NVIDIA GPU with sparse tensor cores (Ampere or newer), and CUDA sees none")
    from torch.sparse import to_sparse_semi_structured

    device = torch.device("cuda")
    print(
        f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, float16, "
        f"medians of {pruning_savings.ROUNDS} turns"
    )
    for width in (1024, 4096, 8192):
        for samples in (64, 1024, 8192):
            layer = nn.Linear(width, width).to(device, torch.float16).requires_grad_(False)
            layer.weight.mul_(pruning_masks.by_group([layer.weight.abs()], 0.5, 4)[0])
            thin, x = copy.deepcopy(layer), torch.randn(samples, width, device=device, dtype=torch.float16)
            thin.weight = nn.Parameter(to_sparse_semi_structured(layer.weight), requires_grad=False)
            if not torch.allclose(thin(x), layer(x), atol=1e-2, rtol=1e-2):
                raise AssertionError("2:4 gives other outputs")
            taken = pruning_savings.seconds({"dense": lambda: layer(x), "2:4": lambda: thin(x)}, device)  # noqa: B023
            ratio = taken["dense"] / taken["2:4"]
            sides = f"dense {taken['dense'] * 1e6:.1f} us, 2:4 {taken['2:4'] * 1e6:.1f} us"
            print(f"  {width} x {width}, {samples} samples: {sides}, {ratio:.2f} x as fast", flush=True)


def main(rounds: int) -> None:
    with user_errors(), tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        bench = Bench(Path(scratch))
        report = Report("sparse_prune", ROOT / "tests" / "benchmarks" / "results")

        taken = interleave([Team(1, 2, mask_sides)], rounds=rounds)
        rows = [Row(f"ms: {side}", f"{taken.median(side) * 1e3:.1f}") for side in taken.seconds]
        rows += [
            at_least("library / ours", taken.ratio("library", "ours"), 25, "equal masks, ties aside"),
            Row("torch.kthvalue alone / ours", str(taken.ratio("kthvalue", "ours"))),
        ]
        report.section("global magnitude masks of ResNet-50 at 90 %, two threads", rows, {"": taken})

        taken = interleave([Team(1, 1, bench.sides)], rounds=rounds)
        first = {side: torch.load(bench.scratch / f"{side}.pt") for side in taken.seconds}
        require_same("reparametrised", first["reparametrised"], first["masks"], TOLERANCE)
        rows = [Row(f"us/step: {side}", f"{taken.median(side) * 1e6:.0f}") for side in taken.seconds]
        rows += [
            at_most("masks / dense", taken.ratio("masks", "dense"), 1.08),
            Row("the library's reparametrisation / dense", str(taken.ratio("reparametrised", "dense"))),
        ]
        report.section(f"a training step, one thread: {' '.join(SETTINGS)}", rows, {"": taken})

        taken = interleave([Team(1, 2, linear_sides)], rounds=rounds)
        rows = [Row(f"ms: {side}", f"{median(taken.kept(side)) * 1e3:.2f}") for side in taken.seconds]
        for level in LEVELS:
            for dense in ("fp32", "bf16"):
                ratio = taken.ratio(dense, f"csr {level:.0%}")
                note = "sparse is slower" if ratio.median < 1 else ""
                rows.append(Row(f"dense {dense} / CSR at {level:.0%}", str(ratio), note=note))
        report.section(f"a linear layer {WIDTH} x {WIDTH}, {SAMPLES} samples, two threads", rows, {"": taken})
        print(f"\nraw samples: {report.file.relative_to(ROOT)}")


if __name__ == "__main__":
    if sys.argv[1:] == ["2:4"]:
        with user_errors():
            two_of_four()
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 6)
