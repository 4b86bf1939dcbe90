"""The cost of pruning in accuracy and time, and the gain of sparse inference.

Criteria: LeNet-300-100 on MNIST, dense and with each criterion, one seed a round. Masks: global magnitude masks of
ResNet-50 against torch.nn.utils.prune.global_unstructured. Step: a training step with masks against a dense one, and
against the library's reparametrization. Linear: a layer in CSR against dense ones in float32 and bf16. Channels:
networks without their pruned channels against dense ones. Int8: layers in int8 against float32 and bf16.
"""

from __future__ import annotations

import copy
import importlib
import time
import warnings
from collections.abc import Callable, Mapping
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune as library

from common.config import config
from common.data import loader as data
from common.data import prepare
from common.data.prepare import PreparedDataset
from common.data.samples import Images
from common.measure import plots
from common.models import networks
from common.models.zero_channels import remove_zero_channels
from common.ranks.rendezvous import World
from common.system import seeds
from common.techniques.pruning import int8, pruning_masks, pruning_savings
from common.techniques.pruning.pruning_masks import Masks
from configs.sparse_prune import Config
from tests.benchmarks import peers
from tests.benchmarks.amp_accum import no_gpu
from tests.benchmarks.drawing import Figure
from tests.benchmarks.measure import Samples, Side, Task, Team
from tests.benchmarks.mnist_pipeline import no_mnist
from tests.benchmarks.parts import QUIET, Part, ignore_other_programs, run_of
from tests.benchmarks.records import Cell, Row, Table, at_least, at_most, list_step_times, make_value_table

NAME = "sparse_prune"

# ---- accuracy

CRITERIA = ("magnitude", "taylor", "gradient", "random")
LEVELS = ("0.92", "0.97")
KEEP = ("test_accuracy", "bytes_compressed", "nonzero")


MAX_ACCURACY_LOSS = {"0.92": 0.1, "0.97": 0.5}  # points of accuracy that magnitude may lose


def accuracy_sides(scratch: Path) -> list[Task]:
    shared = ("export=false", "launch.threads=1", "seed={round}", "data.fallback=none", "data.test_limit=0")
    tasks = [run_of(scratch, "dense", NAME, *shared, "schedule=none", keep=KEEP)]
    for level in LEVELS:
        for criterion in CRITERIA:
            settings = (*shared, f"criterion={criterion}", f"sparsity={level}")
            tasks.append(run_of(scratch, f"{criterion} {level}", NAME, *settings, keep=KEEP))
    return [ignore_other_programs(task) for task in tasks]


def make_accuracy_row(samples: Samples, label: str, side: str, bound: float | None = None) -> Row:
    accuracy_loss: Cell = "0" if side == "dense" else samples.difference("dense", side, "test_accuracy", 100)
    accuracy = samples.number(side, "test_accuracy", 100)
    kilobytes = samples.number(side, "bytes_compressed", 1e-3)
    return Row(label, [accuracy_loss, accuracy, kilobytes], bound, at_least=False)


def accuracy_table(samples: Samples) -> Table:
    rows = [make_accuracy_row(samples, "dense", "dense")]
    for level in LEVELS:
        for criterion in CRITERIA:
            label = f"{criterion}, {100 * float(level):.0f} % pruned"
            bound = MAX_ACCURACY_LOSS[level] if criterion == "magnitude" else None
            rows.append(make_accuracy_row(samples, label, f"{criterion} {level}", bound))
    return Table(("criterion", "percentage points below dense", "test accuracy, %", "compressed file, kB"), rows)


# ---- masks of ResNet-50

SHARE = 0.9


def timed(work: Callable[[], Any]) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def mask_sides(world: World) -> dict[str, Side]:
    torch.manual_seed(0)
    clean = networks.ResNet("resnet50", (3, 224, 224), 1000)
    model = copy.deepcopy(clean)
    masks = Masks(model)

    def replace_masks() -> None:
        with torch.no_grad():
            magnitudes = [weight.abs() for weight in masks.weights]
            masks.replace_masks(pruning_masks.make_global_masks(magnitudes, SHARE))

    def prune_with_library() -> float:
        pruned = copy.deepcopy(clean)
        pairs = [(pruned.get_submodule(name), "weight") for name in masks.layers]
        seconds = timed(lambda: library.global_unstructured(pairs, pruning_method=library.L1Unstructured, amount=SHARE))
        library_masks = [module.get_buffer("weight_mask").bool() for module, _ in pairs]
        if not same_masks(masks, library_masks):
            raise AssertionError("the library's masks differ from those of this project")
        return seconds

    def kth_value() -> float:
        """One k-th value of everything, without the copy before it and the masks after it."""
        flat = torch.cat([weight.detach().abs().flatten() for weight in masks.weights])
        return timed(lambda: flat.kthvalue(round(SHARE * flat.numel())))

    return {
        "this project": lambda: timed(replace_masks),
        "global_unstructured": prune_with_library,
        "torch.kthvalue alone": kth_value,
    }


def same_masks(masks: Masks, library_masks: list[Tensor]) -> bool:
    """Return whether masks are equal but for weights of the same magnitude, and keep equally many weights."""
    kept_by_library = 0
    kept_by_project = 0
    differing = []
    for weight, mask, library_mask in zip(masks.weights, masks.masks, library_masks, strict=True):
        kept_by_project += int(mask.sum())
        kept_by_library += int(library_mask.sum())
        differing.append(weight.detach().abs()[mask != library_mask])
    return kept_by_library == kept_by_project and len(torch.cat(differing).unique()) < 2


def mask_table(samples: Samples) -> Table:
    project, unstructured, kth_value = samples.values
    rows = [Row(f"ms: {side}", [samples.number(side, factor=1e3)]) for side in samples.values]
    gain = samples.ratio(unstructured, project)
    rows.append(at_least(f"{unstructured} / {project}, masks identical except for ties", gain, 25))
    rows.append(Row(f"{kth_value} / {project}", [samples.ratio(kth_value, project)]))
    return make_value_table(rows)


# ---- a step of training

STEPS = 4000  # about 2 s
STEP = ("model=mlp", "batch=64", "optim.decay=constant", "optim.warmup=0", "launch.threads=1", "export=false")
PRUNED = ("sparsity=0.9", "schedule=oneshot", "begin=0", "end=0")


def bare_sides(cfg: Config, prepared: PreparedDataset, world: World) -> dict[str, Side]:
    """Bare loops without and with the library's reparametrization."""
    images = Images(prepared, "train")
    loader = data.Loader(images, cfg.batch, cfg.seed, world.device, torch.float32, block=cfg.data.block)

    def make_side(reparametrize: bool) -> Side:
        torch.manual_seed(seeds.derive_seed(cfg.seed, "init"))
        model = networks.SimpleNN()
        if reparametrize:
            pairs = [(layer, "weight") for layer in model.modules() if isinstance(layer, nn.Linear)]
            library.global_unstructured(pairs, pruning_method=library.L1Unstructured, amount=SHARE)

        def train() -> float:
            loader.epoch = 0  # the same batches in each turn
            loader.position = 0
            batches = islice(chain.from_iterable(repeat(loader)), STEPS)  # of several epochs
            rates = [cfg.optim.lr] * STEPS
            return timed(lambda: peers.bare(model, batches, rates, cfg.optim)) / STEPS

        return train

    return {"bare loop": make_side(False), "bare loop, reparametrized": make_side(True)}


def step_sides(scratch: Path) -> list[Team | Task]:
    cfg = config.load_config(Config, [*QUIET, *STEP])
    prepared = prepare.prepare_dataset(cfg.data)
    settings = (*STEP, f"steps={STEPS}")
    return [
        run_of(scratch, "dense", NAME, *settings, "schedule=none"),
        run_of(scratch, "masks", NAME, *settings, *PRUNED),
        Team(1, 1, lambda world: bare_sides(cfg, prepared, world)),
    ]


def step_table(samples: Samples) -> Table:
    bare = samples.ratio("bare loop, reparametrized", "bare loop")
    rows = list_step_times(samples, "us")
    rows.append(at_most("masks / dense", samples.ratio("masks", "dense"), 1.08))
    rows.append(Row("bare loop, reparametrized / bare loop", [bare]))
    return make_value_table(rows)


# ---- inference

WIDTH = 4096
SAMPLES = 64
SPARSE = (0.8, 0.9, 0.95, 0.98)


TURN_SECONDS = 1.0  # of passes; the load of other programs cannot be measured in much shorter turns


def make_inference_side(layer: nn.Module, inputs: Tensor) -> Side:
    """Return a function that measures the mean time of a pass."""

    def measure() -> float:
        passes = 0
        with torch.no_grad():
            layer(inputs)
            start = time.perf_counter()
            while (seconds := time.perf_counter() - start) < TURN_SECONDS:
                layer(inputs)
                passes += 1
        return seconds / passes

    return measure


def linear_sides(world: World) -> dict[str, Side]:
    torch.manual_seed(0)
    layer = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    inputs = torch.randn(SAMPLES, WIDTH)
    sides = {
        "fp32": make_inference_side(layer, inputs),
        "bf16": make_inference_side(copy.deepcopy(layer).bfloat16(), inputs.bfloat16()),
    }
    for level in SPARSE:
        pruned = copy.deepcopy(layer)
        pruned.weight.mul_(pruning_masks.make_layer_masks([pruned.weight.abs()], [level])[0])
        in_csr = pruning_savings.convert_to_csr(nn.Sequential(pruned))
        if not torch.allclose(in_csr(inputs), pruned(inputs), atol=1e-4):
            raise AssertionError("the outputs in CSR differ")
        sides[f"csr {level:.0%}"] = make_inference_side(in_csr, inputs)
    return sides


def linear_table(samples: Samples) -> Table:
    rows = []
    for level in SPARSE:
        name = f"csr {level:.0%}"
        cells = [samples.number(name, factor=1e3), samples.ratio("fp32", name), samples.ratio("bf16", name)]
        rows.append(Row(f"{100 * level:.0f} %", cells))
    return Table(("pruned weights", "ms: CSR", "dense float32 / CSR", "dense bf16 / CSR"), rows)


# ---- networks without pruned channels

CHANNEL_SPARSE = (0.5, 0.75)
NETWORK_SAMPLES = 256


def channel_sides(world: World) -> dict[str, Side]:
    torch.manual_seed(0)
    model = networks.build_network("lenet5", (28, 28), 10).eval().requires_grad_(False)
    inputs = torch.randn(NETWORK_SAMPLES, 28, 28)
    sides = {"dense": make_inference_side(model, inputs)}
    for level in CHANNEL_SPARSE:
        pruned = copy.deepcopy(model)
        masks = Masks(pruned)
        masks.replace_masks(pruning_masks.make_channel_masks([weight.abs() for weight in masks.weights], level))
        masks.apply_to_weights()
        smaller = remove_zero_channels(pruned, inputs[:1])
        gap = (smaller(inputs) - pruned(inputs)).abs().max()
        if gap > 1e-6 * pruned(inputs).abs().max():
            raise AssertionError(f"the outputs without pruned channels differ by {gap:.2g}")
        sides[f"zeros {level:.0%}"] = make_inference_side(pruned, inputs)
        sides[f"removed {level:.0%}"] = make_inference_side(smaller, inputs)
    return sides


def channel_table(samples: Samples) -> Table:
    rows = [Row("none", [samples.number("dense", factor=1e3), "1", "1"])]
    for level in CHANNEL_SPARSE:
        removed = f"removed {level:.0%}"
        gains = [samples.ratio("dense", removed), samples.ratio(f"zeros {level:.0%}", removed)]
        rows.append(Row(f"{100 * level:.0f} %", [samples.number(removed, factor=1e3), *gains]))
    return Table(("removed channels", "ms", "dense / this", "with zeros / this"), rows)


# ---- int8

CONVOLUTION = (64, 64, 3)
PIXELS = 32


def quantize_convolution(layer: nn.Conv2d, inputs: Tensor) -> nn.Module:
    """Return a convolution in int8, with scales for its weights and fixed scales for inputs and outputs.

    torchao's int8 configurations cover only linear layers, so this function uses torch.ao.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao is deprecated
        quantization: Any = importlib.import_module("torch.ao.quantization")
        model = nn.Sequential(quantization.QuantStub(), copy.deepcopy(layer), quantization.DeQuantStub())
        model.qconfig = quantization.get_default_qconfig("x86")
        prepared = quantization.prepare(model.eval())
        prepared(inputs)  # determines the scales of inputs and outputs
        quantized: nn.Module = quantization.convert(prepared)
    return quantized


def int8_sides(world: World) -> dict[str, Side]:
    torch.manual_seed(0)
    linear = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    convolution = nn.Conv2d(*CONVOLUTION, padding=1).requires_grad_(False)
    vectors = torch.randn(SAMPLES, WIDTH)
    images = torch.randn(SAMPLES, CONVOLUTION[0], PIXELS, PIXELS)
    quantized_linear = int8.quantize_to_int8(nn.Sequential(linear))
    quantized_convolution = quantize_convolution(convolution, images)
    sides: dict[str, Side] = {}
    for name, layer, quantized, inputs in (
        ("linear", linear, quantized_linear, vectors),
        ("convolution", convolution, quantized_convolution, images),
    ):
        expected = layer(inputs)
        gap = (quantized(inputs) - expected).norm() / expected.norm()
        if gap > MAX_INT8_GAP:
            raise AssertionError(f"the outputs of the int8 {name} differ by {gap:.1%}")
        sides[f"{name} fp32"] = make_inference_side(layer, inputs)
        sides[f"{name} bf16"] = make_inference_side(copy.deepcopy(layer).bfloat16(), inputs.bfloat16())
        sides[f"{name} int8"] = make_inference_side(quantized, inputs)
    return sides


MAX_INT8_GAP = 0.03
"""Largest difference between the outputs in int8 and in float32, relative to the norm of the outputs."""


def int8_table(samples: Samples) -> Table:
    rows = []
    for name, quantizer in (("linear", "torchao"), ("convolution", "torch.ao")):
        milliseconds = [samples.number(f"{name} {kind}", factor=1e3) for kind in ("fp32", "bf16", "int8")]
        gains = [samples.ratio(f"{name} {kind}", f"{name} int8") for kind in ("fp32", "bf16")]
        rows.append(Row(f"{name} (int8: {quantizer}, not compiled)", [*milliseconds, *gains]))
    return Table(("layer", "ms: float32", "ms: bf16", "ms: int8", "float32 / int8", "bf16 / int8"), rows)


def no_torchao() -> str:
    return "" if int8.has_torchao() else int8.MISSING_TORCHAO


# ---- 2:4 on a GPU

NETWORK = f"784-128-64-10, {NETWORK_SAMPLES} samples"
LAYER = f"linear layer {WIDTH} x {WIDTH}, 4096 samples"

PASSES = 100
LAYER_WIDTHS = {4096: 4096, 8192: 16_384}
"""Number of samples by the width of a layer."""


def make_gpu_sides(world: World) -> dict[str, Side]:
    """Return passes through networks whose weights have the pattern 2:4, with dense and with sparse kernels."""
    torch.manual_seed(0)
    sides = make_kernel_sides(NETWORK, networks.SimpleNN(), torch.randn(NETWORK_SAMPLES, 28, 28), world.device)
    for width, count in LAYER_WIDTHS.items():
        layer = nn.Sequential(nn.Linear(width, width))
        sides |= make_kernel_sides(name_layer(width), layer, torch.randn(count, width), world.device)
    return sides


def name_layer(width: int) -> str:
    return f"linear layer {width} x {width}, {LAYER_WIDTHS[width]:,} samples"


def make_kernel_sides(name: str, model: nn.Module, inputs: Tensor, device: torch.device) -> dict[str, Side]:
    """Return a pass with dense kernels and one with kernels for 2:4, in float16."""
    model.to(device)
    masks = Masks(model)
    masks.replace_masks(pruning_masks.make_group_masks([weight.abs() for weight in masks.weights], 0.5, 4))
    masks.apply_to_weights()
    x = inputs.to(device).half()
    dense = pruning_savings.strip_masks(model).half()
    sparse = pruning_savings.convert_to_two_of_four(pruning_savings.strip_masks(model))
    gap = (sparse(x) - dense(x)).abs().max()
    if gap > 1e-2:
        raise AssertionError(f"the outputs of {name} in the sparse format differ by {gap:.2g}")
    return {f"{name}, dense": make_gpu_pass(dense, x), f"{name}, 2:4": make_gpu_pass(sparse, x)}


def make_gpu_pass(model: nn.Module, x: Tensor) -> Side:
    """Return a function that measures the mean time of a pass."""

    def measure() -> float:
        with torch.no_grad():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(PASSES):
                model(x)
            torch.cuda.synchronize()
            return (time.perf_counter() - start) / PASSES

    return measure


def gpu_table(samples: Samples) -> Table:
    rows = []
    for name in (NETWORK, *map(name_layer, LAYER_WIDTHS)):
        dense = samples.number(f"{name}, dense", factor=1e3)
        sparse = samples.number(f"{name}, 2:4", factor=1e3)
        rows.append(Row(name, [dense, sparse, samples.ratio(f"{name}, dense", f"{name}, 2:4")]))
    return Table(("network", "ms: dense", "ms: 2:4", "dense / 2:4"), rows)


def draw_pruning(path: Path, part: Mapping[str, Any]) -> None:
    """Draw the test accuracy of each criterion against the percentage of remaining weights."""
    curves: dict[str, list[tuple[float, float, float]]] = {}
    for side, columns in part["samples"].items():
        percents = sorted(100 * accuracy for accuracy in columns["test_accuracy"])
        median_percent = percents[len(percents) // 2]
        half_spread = (percents[-1] - percents[0]) / 2
        criterion, _, level = side.partition(" ")
        if level:
            remaining = 100 * (1 - float(level))
            curves.setdefault(criterion, []).append((remaining, median_percent, half_spread))
        else:
            dense_percent = median_percent
    axes = plots.make_axes()
    for label, points in curves.items():
        remaining_percents, means, spread = zip(*sorted(points), strict=True)
        axes.errorbar(remaining_percents, means, spread, marker="o", capsize=3, label=label)
    axes.axhline(dense_percent, linestyle="--", color="0.35", label="dense")
    axes.set(xlabel="remaining weights, %", ylabel="test accuracy, %", title="LeNet-300-100 on MNIST")
    plots.save_with_legend(axes, path)


GPU_PART = Part(
    f"{NAME}/gpu",
    "2:4 on sparse tensor cores",
    lambda scratch: [Team(1, 1, make_gpu_sides, device="cuda")],
    gpu_table,
    drop=1,
    missing=no_gpu,
)
PARTS = [
    Part(
        f"{NAME}/criteria",
        "LeNet-300-100 on MNIST, 10 epochs, one seed a round",
        accuracy_sides,
        accuracy_table,
        facts=("1 thread", "batch size 128"),
        missing=no_mnist,
    ),
    Part(
        f"{NAME}/masks",
        "global magnitude masks of ResNet-50 at 90 %",
        lambda scratch: [Team(1, 2, mask_sides)],
        mask_table,
        drop=1,
        facts=("2 threads",),
    ),
    Part(
        f"{NAME}/step",
        "a training step of the 784-128-64-10 network at 90 %",
        step_sides,
        step_table,
        facts=("1 thread", "batch size 64"),
    ),
    Part(
        f"{NAME}/linear",
        f"a linear layer {WIDTH} x {WIDTH}, {SAMPLES} samples",
        lambda scratch: [Team(1, 2, linear_sides)],
        linear_table,
        rounds=8,
        drop=1,
        facts=("2 threads",),
    ),
    Part(
        f"{NAME}/channels",
        f"LeNet-5 without pruned channels, {NETWORK_SAMPLES} samples",
        lambda scratch: [Team(1, 2, channel_sides)],
        channel_table,
        rounds=8,
        drop=1,
        facts=("2 threads",),
    ),
    Part(
        f"{NAME}/int8",
        f"int8 layers: linear {WIDTH} x {WIDTH}, and 3x3 with {CONVOLUTION[0]} channels of {PIXELS} pixels; "
        f"{SAMPLES} samples",
        lambda scratch: [Team(1, 2, int8_sides)],
        int8_table,
        rounds=8,
        drop=1,
        facts=("2 threads",),
        missing=no_torchao,
    ),
    GPU_PART,
]
FIGURES: dict[str, Figure] = {NAME: (f"{NAME}/criteria", draw_pruning)}
