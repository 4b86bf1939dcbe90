"""Steps of a GPT under each layout of two ranks, against one process and against torch's tensor parallelism.

The memory and the messages of each layout are compared with their formulas. Steps that recompute activations are
compared with steps that keep them. The default run is also timed from its start to its sample.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from common.config.config import load_config
from common.ranks.rendezvous import World
from common.runs.result import parse_result
from configs.gpt_parallel import Config
from configs.layout import Layout
from tests.benchmarks import strategies
from tests.benchmarks.amp_accum import no_gpu
from tests.benchmarks.drawing import Figure
from tests.benchmarks.measure import Samples, Task, Team, Values, summarize_values
from tests.benchmarks.parts import Part, discard_run, finish, ignore_other_programs, run_of
from tests.benchmarks.records import Row, Table, at_least, at_most, make_value_table
from tests.harness.settings_text import split_settings

NAME = "gpt_parallel"
WIDTH = 512
LAYERS = 4
HEADS = 8
CONTEXT = 128
BATCH = 8
SIZES = split_settings(f"width={WIDTH} layers={LAYERS} heads={HEADS} data.context={CONTEXT} batch={BATCH}")
SETTINGS = split_settings(
    "tied=false evaluate_every=0 data.test_limit=8 eval_batch=8 prompt=d optim.warmup=0 optim.decay=constant"
)
STEPS = "steps=12"
ONE_THREAD = "launch.threads=1"
SINGLE = "1 process, 1 thread"
TWO_THREADS = "1 process, 2 threads"
LAYOUTS = {
    SINGLE: ("replicas=1",),
    "tensor=2": ("tensor=2",),
    "tensor=2 sequence=true": ("tensor=2", "sequence=true"),
    "fsdp=2": ("fsdp=2",),
    "replicas=2": ("replicas=2",),
}
OURS = "bare loop, tensor=2"
TORCH = "bare loop, parallelize_module of torch"
TEAM_STEPS = 8
KEEP = ("training_state_share",)
LOSS_TOLERANCES = {"first_loss": 2e-6, "last_loss": 2e-4}
"""Largest relative differences of losses between layouts, about 20 times those that rounding in float32 causes.

The differences grow from step to step.
"""
GRADIENT_TOLERANCE = 1e-4
"""Largest relative difference of a gradient from that of torch's tensor parallelism, in float32."""
MEMORY = ("peak_parameters", "peak_gradients", "optimizer", "activations")


def sides(scratch: Path) -> list[Team | Task]:
    settings = (*SIZES, *SETTINGS, STEPS)
    runs: list[Team | Task] = []
    for label, layout in LAYOUTS.items():
        runs.append(run_of(scratch, label, NAME, *settings, ONE_THREAD, *layout, keep=KEEP))
    runs.append(run_of(scratch, TWO_THREADS, NAME, *settings, "launch.threads=2", "replicas=1", keep=KEEP))
    return [*runs, Team(2, 1, make_tensor_parallel_sides)]


def make_tensor_parallel_sides(world: World) -> dict[str, Callable[[], float]]:
    """Return steps of the same network under this project's and torch's tensor parallelism, on one mesh."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import loss_parallel

    from common.techniques.parallel_layout import parallelize

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(256, (BATCH, CONTEXT + 1), generator=generator)
    inputs = tokens[:, :-1]
    targets = tokens[:, 1:]
    ours = build_network()
    run: Any = SimpleNamespace(device=world.device)
    parallel = parallelize(ours, Layout(tensor=2), run)
    theirs = build_network()
    divide_with_torch(theirs, init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",)))

    def compute_our_loss() -> Any:
        return parallel.sum_loss(ours(inputs), targets)

    def compute_loss_of_torch() -> Any:
        logits = theirs(inputs).flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum")

    our_loss = compute_our_loss()
    our_loss.backward()
    with loss_parallel():
        loss_of_torch = compute_loss_of_torch()
        loss_of_torch.backward()
        loss_of_torch = loss_of_torch.full_tensor()
    check_first_step(ours, our_loss.item(), theirs, loss_of_torch.item())
    return {
        OURS: make_bare_loop(ours, compute_our_loss, contextlib.nullcontext),
        TORCH: make_bare_loop(theirs, compute_loss_of_torch, loss_parallel),
    }


def build_network() -> Any:
    """Return a GPT with the same weights in every call."""
    import torch

    from common.models.gpt import GPT

    torch.manual_seed(0)
    return GPT(CONTEXT, 256, width=WIDTH, layers=LAYERS, heads=HEADS, tied=False)


def make_bare_loop(model: Any, compute_loss: Callable[[], Any], make_context: Callable[[], Any]) -> Callable[[], float]:
    """Return a function that trains a divided model for some steps, and returns the seconds of a step."""
    import torch

    # The fused kernel needs divided and replicated parameters in different groups.
    divided: list[torch.nn.Parameter] = []
    replicated: list[torch.nn.Parameter] = []
    for parameter in model.parameters():
        group = divided if hasattr(parameter, "placements") else replicated
        group.append(parameter)
    optimizer = torch.optim.AdamW([{"params": divided}, {"params": replicated}], lr=1e-3, fused=True)

    def take_steps() -> float:
        start = time.perf_counter()
        for _ in range(TEAM_STEPS):
            optimizer.zero_grad()
            with make_context():
                compute_loss().backward()
            optimizer.step()
        return (time.perf_counter() - start) / TEAM_STEPS

    return take_steps


def check_first_step(ours: Any, our_loss: float, theirs: Any, loss_of_torch: float) -> None:
    """Raise AssertionError if two divided models have different losses or gradients."""
    assert abs(our_loss - loss_of_torch) < LOSS_TOLERANCES["first_loss"] * loss_of_torch, (our_loss, loss_of_torch)
    gradient = ours.block0.feed_forward.up.weight.grad.full_tensor()
    expected = theirs.block0.feed_forward.up.weight.grad.full_tensor()
    difference = float((gradient - expected).norm() / expected.norm())
    assert difference < GRADIENT_TOLERANCE, f"the gradients of block0.feed_forward.up differ by {difference:.2g}"


def divide_with_torch(model: Any, mesh: Any) -> None:
    """Divide a GPT as in torch's tutorial on tensor parallelism, with a loss of divided logits."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    for number in range(LAYERS):
        for name in ("attention.query", "attention.key", "attention.value", "feed_forward.gate", "feed_forward.up"):
            plan[f"block{number}.{name}"] = ColwiseParallel()
        for name in ("attention.output", "feed_forward.down"):
            plan[f"block{number}.{name}"] = RowwiseParallel()
    parallelize_module(model, mesh, plan)


def table(samples: Samples) -> Table:
    rows = []
    for label in (TWO_THREADS, *LAYOUTS):
        rows.append(Row(f"ms per step: {label}", [samples.number(label, factor=1e3)]))
    rows.append(at_least("1 process with 1 thread / tensor=2", samples.ratio(SINGLE, "tensor=2"), 1.25))
    rows.append(Row("1 process with 2 threads / tensor=2", [samples.ratio(TWO_THREADS, "tensor=2")]))
    rows.append(at_most(f"{OURS} / {TORCH}", samples.ratio(OURS, TORCH), 1.0))
    for label in ("tensor=2", "fsdp=2"):
        row_label = f"parameters, gradients and optimizer state of a rank / of one process: {label}"
        rows.append(at_most(row_label, samples.number(label, "training_state_share"), 0.55))
    return make_value_table(rows)


def check_losses(scratch: Path, samples: Samples) -> None:
    """Raise AssertionError if the layouts had other losses than one process."""
    for label in LAYOUTS:
        for name in ("first_loss", "last_loss"):
            pairs = zip(samples.values[label][name], samples.values[SINGLE][name], strict=True)
            for loss, expected in pairs:
                assert abs(loss - expected) < LOSS_TOLERANCES[name] * expected, (label, name, loss, expected)


# ---- memory and messages


def memory_sides(scratch: Path) -> list[Team | Task]:
    keep = []
    for category in (*MEMORY, "sent"):
        keep += [f"{category}_bytes", f"predicted_{category}_bytes"]
    tasks: list[Team | Task] = []
    for label, layout in LAYOUTS.items():
        task = run_of(scratch, label, NAME, *SIZES, *SETTINGS, "steps=3", ONE_THREAD, *layout, keep=keep)
        tasks.append(ignore_other_programs(task))
    return tasks


def memory_table(samples: Samples) -> Table:
    rows = []
    for label in LAYOUTS:
        rows.append(compare_with_formulas(samples, label, f"memory of a rank in a step: {label}", MEMORY, 5))
        if label != SINGLE:
            rows.append(compare_with_formulas(samples, label, f"bytes sent in a step: {label}", ("sent",), 1))
    return Table(("measured", "largest difference from a formula, %", "MB", "MB by the formulas"), rows)


def compare_with_formulas(samples: Samples, label: str, row_label: str, categories: Sequence[str], limit: float) -> Row:
    """Return a row with the largest difference of any category in percent, and the sums over all categories."""
    differences = []
    measured_bytes = 0.0
    predicted_bytes = 0.0
    for category in categories:
        measured = samples.number(label, f"{category}_bytes").value
        predicted = samples.number(label, f"predicted_{category}_bytes").value
        differences.append(100 * abs(measured / predicted - 1))
        measured_bytes += measured
        predicted_bytes += predicted
    numbers = [max(differences), measured_bytes / 1e6, predicted_bytes / 1e6]
    cells = [summarize_values([number]) for number in numbers]
    return Row(row_label, cells, limit, at_least=False)


# ---- recomputation of activations

DEEP_WIDTH = 128
DEEP_LAYERS = 12
DEEP_CONTEXT = 256
DEEP_SIZES = split_settings(f"width={DEEP_WIDTH} layers={DEEP_LAYERS} data.context={DEEP_CONTEXT} batch={BATCH}")
KEEP_ALL = "recompute=none"
RECOMPUTED = ("recompute=blocks", "recompute=selective")
ACTIVATIONS = "activations_bytes"
PEAK = "peak_activations_bytes"


def recompute_sides(scratch: Path) -> list[Team | Task]:
    settings = (*DEEP_SIZES, *SETTINGS, STEPS, ONE_THREAD, "replicas=1")
    tasks: list[Team | Task] = [run_of(scratch, KEEP_ALL, NAME, *settings, KEEP_ALL, keep=(ACTIVATIONS,))]
    for recompute in RECOMPUTED:
        tasks.append(run_of(scratch, recompute, NAME, *settings, recompute, keep=(ACTIVATIONS, PEAK)))
    return tasks


def recompute_table(samples: Samples) -> Table:
    blocks, selective = RECOMPUTED
    rows = [
        at_least(f"activations: none / {blocks}", samples.ratio(KEEP_ALL, blocks, name=ACTIVATIONS), 8),
        at_most(f"time of a step: {blocks} / none", samples.ratio(blocks, KEEP_ALL), 1.5),
        Row(f"activations: none / {selective}", [samples.ratio(KEEP_ALL, selective, name=ACTIVATIONS)]),
        Row(f"time of a step: {selective} / none", [samples.ratio(selective, KEEP_ALL)]),
    ]
    kept = samples.list_counted(KEEP_ALL, ACTIVATIONS)
    for recompute in RECOMPUTED:
        peaks = samples.list_counted(recompute, PEAK)
        ratios = [size / peak for size, peak in zip(kept, peaks, strict=True)]
        rows.append(Row(f"activations at their peak: none / {recompute}", [summarize_values(ratios)]))
    for side in (KEEP_ALL, *RECOMPUTED):
        rows.append(Row(f"ms per step: {side}", [samples.number(side, factor=1e3)]))
        rows.append(Row(f"MB of activations: {side}", [samples.number(side, ACTIVATIONS, factor=1e-6)]))
    return make_value_table(rows)


def check_equal_losses(scratch: Path, samples: Samples) -> None:
    """Raise AssertionError if a recomputation has changed a loss."""
    for recompute in RECOMPUTED:
        for name in ("first_loss", "last_loss"):
            assert samples.values[recompute][name] == samples.values[KEEP_ALL][name], (recompute, name)


# ---- the default run


def run_default(scratch: Path) -> list[Team | Task]:
    def run(number: int) -> dict[str, float]:
        start = time.perf_counter()
        folder = finish(scratch, "default", NAME, "data.test_limit=0", f"seed={number}")
        seconds = time.perf_counter() - start
        result = parse_result(folder.result).flatten_values()
        discard_run(folder)
        return {"seconds": seconds} | {name: result[name] for name in ("test_loss", "bigram_loss", "bits_per_byte")}

    return [Task("default run", run)]


def default_table(samples: Samples) -> Table:
    side = "default run"
    rows = [
        at_most("seconds from the start to the sample", samples.number(side), 180),
        at_most("test loss / loss of a bigram model", samples.ratio_of(side, "test_loss", "bigram_loss"), 1),
        Row("test loss, nats per byte", [samples.number(side, "test_loss")]),
        Row("test loss, bits per byte", [samples.number(side, "bits_per_byte")]),
        Row("loss of a bigram model, nats per byte", [samples.number(side, "bigram_loss")]),
    ]
    return make_value_table(rows)


# ---- on a GPU

GPU_WIDTH = 1024
GPU_LAYERS = 8
GPU_HEADS = 16
GPU_CONTEXT = 1024
GPU_BATCH = 16
GPU_SIZES = split_settings(
    f"width={GPU_WIDTH} layers={GPU_LAYERS} heads={GPU_HEADS} data.context={GPU_CONTEXT} batch={GPU_BATCH}"
)
GPU_STEPS = 5
GPU_PRECISIONS = ("fp32", "tf32", "bf16")
FLOPS = "flops"


def make_gpu_sides(world: World) -> dict[str, Callable[[], Values]]:
    """Return training steps of one GPT in each precision, and products of large matrices in the same precision."""
    import torch

    from common.models.gpt import GPT
    from common.techniques.parallel_layout import layout_formulas, layout_report

    torch.manual_seed(0)
    model = GPT(GPU_CONTEXT, 256, width=GPU_WIDTH, layers=GPU_LAYERS, heads=GPU_HEADS).to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(256, (GPU_BATCH, GPU_CONTEXT + 1), device=world.device)
    inputs = tokens[:, :-1]
    targets = tokens[:, 1:]
    cfg = load_config(Config, [*GPU_SIZES, "replicas=1"], {})
    sizes = layout_report.list_parameter_sizes(model)
    shape = layout_report.describe_shape(cfg, model)
    step_flops = GPU_BATCH * GPU_CONTEXT * layout_formulas.count_flops_per_token(sizes, shape, is_tied=True)

    def make_step(precision: str) -> Callable[[], Values]:
        def take_steps() -> Values:
            torch.backends.cuda.matmul.fp32_precision = "tf32" if precision == "tf32" else "ieee"
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(GPU_STEPS):
                optimizer.zero_grad()
                with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
                    logits = model(inputs).flatten(0, 1)
                loss = torch.nn.functional.cross_entropy(logits.float(), targets.flatten())
                loss.backward()
                optimizer.step()
            torch.cuda.synchronize()
            seconds = (time.perf_counter() - start) / GPU_STEPS
            return {"seconds": seconds, FLOPS: step_flops / seconds}

        return take_steps

    def make_product(precision: str) -> Callable[[], Values]:
        def multiply() -> Values:
            torch.backends.cuda.matmul.fp32_precision = "tf32" if precision == "tf32" else "ieee"
            dtype = torch.bfloat16 if precision == "bf16" else torch.float32
            rate = layout_report.measure_matrix_rate(dtype, world.device)
            return {"seconds": 1 / rate, FLOPS: rate}

        return multiply

    steps = {precision: make_step(precision) for precision in GPU_PRECISIONS}
    return steps | {f"product, {precision}": make_product(precision) for precision in GPU_PRECISIONS}


def gpu_table(samples: Samples) -> Table:
    rows = []
    tokens = GPU_BATCH * GPU_CONTEXT
    for precision in GPU_PRECISIONS:
        rate = summarize_values([tokens / seconds for seconds in samples.list_counted(precision)])
        share = samples.ratio(precision, f"product, {precision}", factor=100, name=FLOPS)
        rows.append(Row(precision, [samples.number(precision, factor=1e3), rate, share]))
    return Table(("precision", "ms per step", "tokens/s", "share of the rate of a matrix product, %"), rows)


GPU_PART = Part(
    f"{NAME}/gpu",
    "a training step on one GPU",
    lambda scratch: [Team(1, 1, make_gpu_sides, device="cuda")],
    gpu_table,
    drop=1,
    facts=(f"width {GPU_WIDTH}, {GPU_LAYERS} blocks, {GPU_BATCH} samples of {GPU_CONTEXT:,} bytes",),
    missing=no_gpu,
)
PARTS = [
    Part(
        f"{NAME}/step",
        f"a training step: {' '.join(SIZES)}",
        sides,
        table,
        rounds=7,
        check=check_losses,
        facts=(
            "1 thread per process unless the table states otherwise",
            "float32",
            f"width {WIDTH}, {LAYERS} blocks, {BATCH} samples of {CONTEXT} bytes",
        ),
    ),
    Part(
        f"{NAME}/memory",
        f"memory and messages of a rank beside their formulas: {' '.join(SIZES)}",
        memory_sides,
        memory_table,
        facts=("parameters and gradients at their peaks, AdamW's state, activations", "float32"),
    ),
    Part(
        f"{NAME}/recompute",
        f"a training step that recomputes activations: {' '.join(DEEP_SIZES)}",
        recompute_sides,
        recompute_table,
        rounds=7,
        check=check_equal_losses,
        facts=(
            "1 process with 1 thread",
            "float32",
            f"width {DEEP_WIDTH}, {DEEP_LAYERS} blocks, {BATCH} samples of {DEEP_CONTEXT} bytes",
        ),
    ),
    Part(
        f"{NAME}/default",
        "the default run, from its start to its sample",
        run_default,
        default_table,
        facts=("2 processes with 1 thread each",),
    ),
    GPU_PART,
    strategies.make_part(NAME),
]
FIGURES: dict[str, Figure] = strategies.make_figures(NAME)
