"""Mixed precision and gradient accumulation: fewer bits and bigger batches, and the same result.

    python experiments/amp_accum.py                                            bf16, four microbatches, two processes
    python experiments/amp_accum.py precision=fp16 clip=1                      with a scaled loss
    python experiments/amp_accum.py processes_per_node=1 accumulate=1 precision=fp32
    python experiments/amp_accum.py sweep=true                                 the grid, with a table and plots
    python experiments/amp_accum.py model=resnet50 data.name=generated data.image_size=64 channels_last=true steps=20
    make exp NAME=amp_accum NODES=2                                            on a cluster

Takes about a minute on 2 CPU cores. Expect 98 % test accuracy on MNIST after one epoch (without MNIST: on
the built-in digits).

How it works. `batch` is the global batch of an optimizer step, as everywhere here. accumulate=N cuts it into N
microbatches, its window: backward adds their gradients up, and the optimizer steps once, so only the memory of one
microbatch's activations is needed. Every microbatch is full, so the mean over a window is the mean of its
microbatches' means. The order of a step, in `add_up` and `update`:

    for each microbatch of the window       inside no_sync for all but the last:
        loss / length of the window, forward and backward
    unscale the gradients                   once, so that clipping sees their true length
    clip
    step                                    with fp16 left out if any gradient is inf or NaN, on all processes alike
    update the scale

Autocast computes products in bf16 or fp16 and keeps parameters, sums and losses in float32. bf16 has float32's range.
fp16 ends at 65504, and below 6e-8 there is nothing: its loss is multiplied by a scale that moves small gradients up.
"""

from __future__ import annotations

import common  # isort: skip  # noqa: F401 (first: it answers Ctrl-C while torch is imported)

import contextlib
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from common.checkpoint.train_state import TrainState
from common.core.errors import UserError
from common.data import loader
from common.distributed import ddp, sync_batchnorm
from common.distributed.rendezvous import World
from common.measure import plots, step_timing, tables
from common.measure.memory import Footprint
from common.models import networks
from common.training import loop, optimizers, sweep
from common.training.entry_point import start
from common.training.evaluate import classify
from common.training.run import Run
from configs.amp_accum import Config

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
HOPELESS = 2.0**-14  # a scale below which only something infinite overflows; from 65536, 31 steps left out in a row
FINAL = 20  # last steps, whose mean loss is the final one
BRIEF = 40  # steps of a run of the sweep


def build(cfg: Config, train: loader.Images, world: World) -> nn.Module:
    """The model, with the same weights in every process: they draw from one seed."""
    model: nn.Module
    if cfg.model == "mlp":
        model = networks.SimpleNN()
    elif cfg.model == "convnet":
        model = networks.ConvNet(train.shape, train.classes)
    else:
        model = networks.ResNet(cfg.model, train.shape, train.classes)
    layout = torch.channels_last if cfg.channels_last else torch.preserve_format
    return model.to(world.device, getattr(torch, cfg.dtype)).to(memory_format=layout)


def wrap(cfg: Config, model: nn.Module, world: World) -> nn.Module:
    """The model that averages gradients over all processes in its backward; one process alone needs none."""
    if cfg.compile:
        model.compile()  # in place: parameters keep their names
    return model if world.size == 1 else ddp.wrap_ddp(model, world.device, gradient_as_bucket_view=True)


def autocast(cfg: Config, device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, HALF.get(cfg.precision), enabled=cfg.precision in HALF)


def make_scaler(cfg: Config, device: torch.device) -> GradScaler:
    """For fp16 only: switched off, its methods do nothing, and `step` is the optimizer's."""
    fp16 = cfg.precision == "fp16"
    return GradScaler(device.type, cfg.init_scale, growth_interval=cfg.growth_interval, enabled=fp16)


def laid_out(cfg: Config, x: Tensor) -> Tensor:
    """Images with the colours of a pixel side by side, if that is asked for; grey ones lie so anyway."""
    return x.contiguous(memory_format=torch.channels_last) if cfg.channels_last and x.dim() == 4 else x


def add_up(
    cfg: Config,
    model: nn.Module,
    scaler: GradScaler,
    window: list[tuple[Tensor, Tensor]],
    footprint: Footprint,
    times: step_timing.StepTimes,
) -> tuple[Tensor, int]:
    """Add up the gradient of the mean loss over a window; returns that loss and how often gradients were exchanged."""
    total, exchanges = torch.zeros((), device=window[0][0].device), 0
    for number, (x, y) in enumerate(window, start=1):
        waits = cfg.no_sync and number < len(window)
        # around forward AND backward: ddp decides in the forward whether the backward will exchange gradients
        with model.no_sync() if waits and isinstance(model, DistributedDataParallel) else contextlib.nullcontext():
            with autocast(cfg, x.device):
                loss = F.cross_entropy(model(laid_out(cfg, x)), y)
            footprint.look()
            loss = loss / len(window)  # its real length: an epoch's last window may be shorter than cfg.accumulate
            if not exchanges:  # so far nobody has waited for the others
                times.mark("backward")
            scaler.scale(loss).backward()
        total = total + loss.detach()
        exchanges += not waits
    return total, exchanges


def update(cfg: Config, model: nn.Module, optimizer: Optimizer, scaler: GradScaler) -> bool:
    """Take the optimizer's step; returns whether it was left out because a gradient is inf or NaN (fp16 only).

    After the exchange such a gradient is every process's, so all leave the same step out.
    """
    scaler.unscale_(optimizer)  # once, and before clipping
    if cfg.clip:
        nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale() < scale  # it falls exactly then


def train_epoch(
    cfg: Config,
    model: nn.Module,
    optimizer: Optimizer,
    scaler: GradScaler,
    windows: loader.AccumulationLoader,
    run: Run,
    footprint: Footprint,
    times: step_timing.StepTimes,
    step: int,
    total: int,
) -> int:
    """Train on the rest of the epoch's windows, or up to `total` steps; returns the steps done since the start."""
    model.train()
    payload = ddp.compute_ring_bytes(model)
    for window in times.batches(windows):
        optimizer.zero_grad()
        loss, exchanges = add_up(cfg, model, scaler, window, footprint, times)
        optimizers.set_rate(optimizer, optimizers.rate(cfg.optim, step, total, cfg.batch))
        skipped = update(cfg, model, optimizer, scaler)
        step += 1
        run.log(step, loss=loss, skipped=float(skipped), bytes_sent=float(exchanges * payload))
        if scaler.get_scale() < HOPELESS:
            raise UserError(f"gradients overflow fp16 whatever the scale, at step {step}; use precision=bf16")
        run.checkpoint_or_stop(step)  # saves now and then, and leaves if it was told to
        if step == total:
            break
    return step


def evaluate(
    cfg: Config, model: nn.Module, test: loader.Images, world: World, look: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """Loss and accuracy over all test samples, each seen by one process, in the precision of the training."""
    inner = ddp.unwrap(model)
    sync_batchnorm.average_buffers(inner)  # each process's BatchNorm has seen other samples
    inner.eval()

    def predict(x: Tensor | None, _: int) -> Tensor:
        assert x is not None
        with autocast(cfg, world.device):
            return inner.forward(laid_out(cfg, x))  # not compiled: other sizes would be compiled anew

    dtype, share = getattr(torch, cfg.dtype), (world.rank, world.size)
    return classify(predict, test, world, batch=cfg.eval_batch, dtype=dtype, share=share, look=look)


def prepare_device(cfg: Config, world: World, run: Run) -> None:
    """What float32 means on this device, and words on settings that gain nothing here."""
    if world.device.type == "cuda":
        products = "tf32" if cfg.precision == "tf32" else "ieee"  # torch's own choice for convolutions is tf32
        torch.backends.cuda.matmul.fp32_precision = products
        torch.backends.cudnn.conv.fp32_precision = products  # type: ignore[attr-defined]
    elif cfg.precision == "tf32":
        run.say("precision=tf32 is a mode of NVIDIA GPUs: on a CPU it is fp32, and the run goes on as that")
    elif cfg.precision == "fp16" and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        run.say("precision=fp16: this CPU has no products of fp16, they are emulated and slow; bf16 may be faster")
    if cfg.compile and not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        raise UserError("compile=true needs a C++ compiler, and there is none; install g++, or leave compile out")


def main(cfg: Config, world: World, run: Run) -> None:
    train, test = loader.load_train_test(run.prepared, cfg.data)
    prepare_device(cfg, world, run)
    share, device, dtype = (world.rank, world.size), world.device, getattr(torch, cfg.dtype)
    windows = loader.AccumulationLoader(
        loader.Loader.from_config(train, cfg, device, batch=cfg.microbatch, shard=share), cfg.accumulate
    )
    model = wrap(cfg, build(cfg, train, world), world)
    optimizer = optimizers.make(model.parameters(), cfg.optim, scaled=cfg.precision == "fp16")
    scaler = make_scaler(cfg, device)
    run.averaged, run.total = True, loop.total_steps(cfg, windows)  # a step's loss is the mean over the processes

    with autocast(cfg, device):
        ddp.warm_up_buckets(
            model, laid_out(cfg, train.load_inputs(slice(0, cfg.microbatch // world.size), device, dtype))
        )
    footprint, times = Footprint(device), step_timing.StepTimes(model, device)
    run.before_backward = times.recent  # the heartbeats tell who is slow
    step = run.resume(TrainState([ddp.unwrap(model)], optimizer, windows, world, replicated=True, scaler=scaler))

    def epoch(step: int) -> int:
        return train_epoch(cfg, model, optimizer, scaler, windows, run, footprint, times, step, run.total)

    scores = loop.train(run, windows, step, epoch, lambda: evaluate(cfg, model, test, world, run.look))
    conclude(cfg, world, run, scaler, footprint, scores)


def conclude(
    cfg: Config, world: World, run: Run, scaler: GradScaler, footprint: Footprint, scores: dict[str, float]
) -> None:
    """The result file and the table."""
    memories = world.gather(footprint.most)
    if not world.is_main:
        return
    memory = max(memories)
    rows = [row for row in run.folder.metrics() if "loss" in row]  # of earlier starts, too
    skipped = int(sum(row["skipped"] for row in rows))
    sent = sum(row["bytes_sent"] for row in rows) / len(rows)
    final = [row["loss"] for row in rows[-FINAL:] if row["loss"] is not None]
    loss = sum(final) / len(final) if final else None
    seconds, rate = run.step_seconds(), run.samples_per_second()
    computed = "fp32" if cfg.precision == "tf32" and world.device.type == "cpu" else cfg.precision
    facts = {"samples_per_second": rate, "step_seconds": seconds, "training_memory": memory}
    facts |= {"bytes_sent": sent, "steps_skipped": skipped, "final_loss": loss}
    run.finish(**scores, **facts, computed_in=computed, data=run.prepared.name)
    each = cfg.microbatch // world.size
    table = loop.rows(run, world, scores) | {
        "step": f"batch {cfg.batch} = {cfg.accumulate} microbatches x {world.size} processes x {each} samples",
        "precision": f"{computed}, {cfg.model}" + (f", scale {scaler.get_scale():g}" if scaler.is_enabled() else ""),
        "steps skipped": str(skipped),
        "peak memory": f"{memory / 1e6:.1f} MB beyond the model, in the process that takes most",
        "sent": f"{sent / 1e6:.2f} MB of gradients by each process in a step",
    }
    run.say(tables.table(table | run.places()))


# ---- the grid


def cells(cfg: Config) -> list[sweep.Cell]:
    """Every precision with one microbatch and with several, and these with and without no_sync.

    Unless `steps` says otherwise the runs are short: what is measured is what a step costs.
    """
    warmup, limit = min(cfg.optim.warmup, BRIEF // 8), cfg.data.test_limit or 1000
    short = {"steps": BRIEF, "optim.warmup": warmup, "data.test_limit": limit}
    brief = {} if cfg.steps else short
    # asks without touching one: forks follow; with fewer GPUs than processes they run on the CPU
    gpu = cfg.launch.device != "cpu" and torch.cuda.device_count() >= cfg.processes
    grid: list[sweep.Cell] = []
    for precision in ("fp32", "tf32", "bf16", "fp16") if gpu else ("fp32", "bf16", "fp16"):
        grid.append({"precision": precision, "accumulate": 1, "no_sync": True})
        if cfg.accumulate > 1:
            several = {"precision": precision, "accumulate": cfg.accumulate}
            grid += [several | {"no_sync": word} for word in ((True, False) if cfg.processes > 1 else (True,))]
    return [cell | brief for cell in grid]


def show(cfg: Config, rows: list[sweep.Row], folder: Path) -> dict[str, str]:
    """What each cell costs, and how far its result is from fp32's with one microbatch."""
    names = ("samples_per_second", "training_memory", "bytes_sent", "steps_skipped", "final_loss", "test_accuracy")
    found = {name: sweep.gather(rows, ("precision", "accumulate", "no_sync"), name) for name in names}
    exact = {name: found[name].get(("fp32", 1, True), (math.nan,))[0] for name in names}
    lines = [
        "precision  microbatches  no_sync  samples/s  peak MB  sent MB  skipped  loss, less fp32  accuracy, less fp32"
    ]
    for cell, (rate, deviation, _) in found["samples_per_second"].items():
        memory, sent, skipped, loss, score = (found[name][cell][0] for name in names[1:])
        lines.append(
            f"{cell[0]:<9}  {cell[1]:>12}  {str(cell[2]).lower():<7}  {rate:>5,.0f} ±{deviation:>3.0f}"
            f"  {memory / 1e6:>7.1f}  {sent / 1e6:>7.2f}  {skipped:>7.1f}"
            f"  {loss:.4f} {loss - exact['final_loss']:+.4f}  {score:>10.2%} {score - exact['test_accuracy']:+.2%}"
        )
    label = {cell: f"{cell[0]}\n{cell[1]}{'' if cell[2] else ' each'}" for cell in found["samples_per_second"]}
    title = f"{cfg.model}, batch {cfg.batch} in so many microbatches; each: exchanged after each"
    files = []
    plotted = {"samples_per_second": ("samples/s", 1.0), "training_memory": ("MB beyond the model", 1e-6)}
    for name, (unit, scale) in plotted.items():
        files.append(folder / f"{name}.png")
        heights = {label[cell]: (mean * scale, dev * scale) for cell, (mean, dev, _) in found[name].items()}
        plots.bars(files[-1], heights, unit, title=title)
    return {"cells": "\n".join(lines), "plots": ", ".join(str(file) for file in files)}


if __name__ == "__main__":
    start(main, Config, sweep.Sweep(cells, show))
