"""What pruning costs in accuracy and time, and what sparse inference gains.

Criteria: LeNet-300-100 on MNIST, dense and with each criterion, one seed a round. Masks: global magnitude masks of
ResNet-50 against torch.nn.utils.prune.global_unstructured. Step: a training step with masks against a dense one, and
against the library's reparametrisation. Linear: a layer in CSR against dense ones in float32 and bf16.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune as library

from common.config import config
from common.data import loader as data
from common.data import prepare
from common.measure import plots
from common.models import networks
from common.ranks.rendezvous import World
from common.system import seeds
from common.techniques.pruning import pruning_masks, pruning_savings
from common.techniques.pruning.pruning_masks import Masks
from configs.sparse_prune import Config
from tests.benchmarks import peers
from tests.benchmarks.amp_accum import no_gpu
from tests.benchmarks.drawing import Figure
from tests.benchmarks.measure import Samples, Side, Task, Team
from tests.benchmarks.mnist_pipeline import no_mnist
from tests.benchmarks.parts import QUIET, Part, run_of
from tests.benchmarks.records import Cell, Row, Table, at_least, at_most

NAME = "sparse_prune"

# ---- accuracy

CRITERIA, LEVELS = ("magnitude", "taylor", "gradient", "random"), ("0.92", "0.97")
BELOW = {"0.92": 0.1, "0.97": 0.5}  # points of accuracy that magnitude may lose
KEEP = ("test_accuracy", "bytes_compressed", "nonzero")


def accuracy_sides(scratch: Path) -> list[Task]:
    words = ("export=false", "launch.threads=1", "seed={round}", "data.fallback=none", "data.test_limit=0")
    return [
        run_of(scratch, "dense", NAME, *words, "schedule=none", keep=KEEP),
        *(
            run_of(
                scratch,
                f"{criterion} {level}",
                NAME,
                *words,
                f"criterion={criterion}",
                f"sparsity={level}",
                keep=KEEP,
            )
            for level in LEVELS
            for criterion in CRITERIA
        ),
    ]


def accuracy_table(taken: Samples) -> Table:
    rows = []
    for level in LEVELS:
        for criterion in CRITERIA:
            side = f"{criterion} {level}"
            cells: list[Cell] = [
                taken.difference("dense", side, "test_accuracy", 100),
                taken.number(side, "test_accuracy", 100),
                taken.number(side, "bytes_compressed", 1e-3),
            ]
            bound = BELOW[level] if criterion == "magnitude" else None
            rows.append(Row(f"{criterion}, {100 * float(level):.0f} % pruned", cells, bound, at_least=False))
    dense: list[Cell] = [
        "0",
        taken.number("dense", "test_accuracy", 100),
        taken.number("dense", "bytes_compressed", 1e-3),
    ]
    return Table(("criterion", "points below dense", "test accuracy, %", "kB compressed"), [Row("dense", dense), *rows])


# ---- masks of ResNet-50

SHARE = 0.9


def timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def mask_sides(world: World) -> dict[str, Side]:
    torch.manual_seed(0)
    clean = networks.ResNet("resnet50", (3, 224, 224), 1000)
    model = copy.deepcopy(clean)
    masks = Masks(model)

    def ours() -> float:
        def work() -> None:
            with torch.no_grad():
                masks.replace_masks(pruning_masks.make_global_masks([weight.abs() for weight in masks.weights], SHARE))

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

    return {"this project": ours, "global_unstructured": theirs, "torch.kthvalue alone": kth_value}


def same_masks(masks: Masks, found: list[Tensor]) -> bool:
    """Whether masks are equal but for weights of the same magnitude, and leave as many."""
    odd = [w.detach().abs()[a != b] for w, a, b in zip(masks.weights, masks.masks, found, strict=True)]
    return (
        sum(int(m.sum()) for m in found) == sum(int(m.sum()) for m in masks.masks) and len(torch.cat(odd).unique()) < 2
    )


def mask_table(taken: Samples) -> Table:
    rows = [Row(f"ms: {side}", [taken.number(side, factor=1e3)]) for side in taken.values]
    ours, theirs, alone = taken.values
    rows.append(at_least(f"{theirs} / {ours}, equal masks but for ties", taken.ratio(theirs, ours), 25))
    return Table(("measured", "value"), [*rows, Row(f"{alone} / {ours}", [taken.ratio(alone, ours)])])


# ---- a step of training

STEPS = 600
STEP = ("model=mlp", "batch=64", "optim.decay=constant", "optim.warmup=0", "launch.threads=1", "export=false")
PRUNED = ("sparsity=0.9", "schedule=oneshot", "begin=0", "end=0")


def step_sides(scratch: Path) -> list[Team | Task]:
    cfg = config.load_config(Config, [*QUIET, *STEP])
    prepared = prepare.prepare_dataset(cfg.data)

    def sides(world: World) -> dict[str, Side]:
        images = data.Images(prepared, "train")
        loader = data.Loader(images, cfg.batch, cfg.seed, world.device, torch.float32, block=cfg.data.block)

        def side(reparametrise: bool) -> Side:
            torch.manual_seed(seeds.derive_seed(cfg.seed, "init"))
            model = networks.SimpleNN()
            if reparametrise:
                pairs = [(layer, "weight") for layer in model.modules() if isinstance(layer, nn.Linear)]
                library.global_unstructured(pairs, pruning_method=library.L1Unstructured, amount=SHARE)

            def turn() -> float:
                loader.epoch = loader.position = 0  # the same batches in each turn
                batches, rates = islice(iter(loader), STEPS), [cfg.optim.lr] * STEPS
                return timed(lambda: peers.bare(model, batches, rates, cfg.optim)) / STEPS

            return turn

        return {"bare loop": side(False), "bare loop, reparametrised": side(True)}

    words = (*STEP, f"steps={STEPS}")
    return [
        run_of(scratch, "dense", NAME, *words, "schedule=none"),
        run_of(scratch, "masks", NAME, *words, *PRUNED),
        Team(1, 1, sides),
    ]


def step_table(taken: Samples) -> Table:
    rows = [Row(f"us a step: {side}", [taken.number(side, factor=1e6)]) for side in taken.values]
    bare = taken.ratio("bare loop, reparametrised", "bare loop")
    rows.append(at_most("masks / dense", taken.ratio("masks", "dense"), 1.08))
    rows.append(Row("a bare loop with the library's reparametrisation / without", [bare]))
    return Table(("measured", "value"), rows)


# ---- inference

WIDTH, SAMPLES = 4096, 64
SPARSE = (0.8, 0.9, 0.95, 0.98)


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
    for level in SPARSE:
        thin = copy.deepcopy(layer)
        thin.weight.mul_(pruning_masks.make_layer_masks([thin.weight.abs()], [level])[0])
        rows = pruning_savings.convert_to_csr(nn.Sequential(thin))
        if not torch.allclose(rows(x), thin(x), atol=1e-4):
            raise AssertionError("CSR gives other outputs")
        found[f"csr {level:.0%}"] = side(lambda rows=rows: rows(x))  # type: ignore[misc]
    return found


def linear_table(taken: Samples) -> Table:
    rows = []
    for level in SPARSE:
        name = f"csr {level:.0%}"
        cells = [taken.number(name, factor=1e3), taken.ratio("fp32", name), taken.ratio("bf16", name)]
        rows.append(Row(f"{100 * level:.0f} %", cells))
    return Table(("pruned", "ms in CSR", "dense float32 / CSR", "dense bf16 / CSR"), rows)


# ---- 2:4 on a GPU


def card_sides(scratch: Path) -> list[Task]:
    words = ("model=mlp", "scope=n:m", "pattern=2:4", "steps=50", "export=false", "launch.device=cuda")
    return [run_of(scratch, "2:4", NAME, *words, keep=("fp16_seconds", "two_of_four_seconds"))]


def card_table(taken: Samples) -> Table:
    dense, sparse = (taken.number("2:4", name, 1e3) for name in ("fp16_seconds", "two_of_four_seconds"))
    return Table(("784-128-64-10, one pass", "ms"), [Row("dense float16", [dense]), Row("2:4", [sparse])])


def draw_pruning(path: Path, part: Mapping[str, Any]) -> None:
    """Test accuracy of each criterion against the weights that are left."""
    series: dict[str, list[tuple[float, float, float]]] = {}
    for side, found in part["samples"].items():
        values = sorted(100 * value for value in found["test_accuracy"])
        point = values[len(values) // 2], (values[-1] - values[0]) / 2
        criterion, _, level = side.partition(" ")
        if level:
            series.setdefault(criterion, []).append((100 * (1 - float(level)), *point))
        else:
            levels = {"dense": point[0]}
    at = plots.make_axes()
    for label, points in series.items():
        across, means, spread = zip(*sorted(points), strict=True)
        at.errorbar(across, means, spread, marker="o", capsize=3, label=label)
    for label, height in levels.items():
        at.axhline(height, linestyle="--", color="0.35", label=label)
    at.set(xlabel="weights left, %", ylabel="test accuracy, %", title="LeNet-300-100 on MNIST")
    plots.save_with_legend(at, path)


PARTS = [
    Part(
        f"{NAME}/criteria",
        "LeNet-300-100 on MNIST, 10 epochs, one seed a round",
        accuracy_sides,
        accuracy_table,
        facts={"threads": 1, "batch": 128},
        missing=no_mnist,
    ),
    Part(
        f"{NAME}/masks",
        "global magnitude masks of ResNet-50 at 90 %",
        lambda scratch: [Team(1, 2, mask_sides)],
        mask_table,
        drop=1,
        facts={"threads": 2},
    ),
    Part(
        f"{NAME}/step",
        "a training step of the 784-128-64-10 network at 90 %",
        step_sides,
        step_table,
        facts={"threads": 1, "batch": 64},
    ),
    Part(
        f"{NAME}/linear",
        f"a linear layer {WIDTH} x {WIDTH}, {SAMPLES} samples",
        lambda scratch: [Team(1, 2, linear_sides)],
        linear_table,
        rounds=8,
        drop=1,
        facts={"threads": 2},
    ),
    Part(f"{NAME}/gpu", "2:4 on sparse tensor cores", card_sides, card_table, missing=no_gpu),
]
FIGURES: dict[str, Figure] = {NAME: (f"{NAME}/criteria", draw_pruning)}
