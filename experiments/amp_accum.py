"""Mixed precision and gradient accumulation: smaller number formats and larger batches with the same result.

    python experiments/amp_accum.py                                            bf16, four microbatches, two ranks
    python experiments/amp_accum.py precision=fp16 clip=1 steps=20             fp16 with loss scaling
    python experiments/amp_accum.py processes_per_node=1 accumulate=1 precision=fp32
    python experiments/amp_accum.py sweep=true                                 a sweep, with a table and plots
    python experiments/amp_accum.py model=resnet50 data.name=generated data.image_size=64 channels_last=true steps=20
    make exp NAME=amp_accum NODES=2                                            on a cluster

A run takes about a minute on 2 CPU cores with AMX instructions. On other CPUs, precision=fp32 may be faster. Expect a
test accuracy of 98 % on MNIST after one epoch. If MNIST is not available, the built-in digits are used instead.

`batch` is the global batch size of an optimizer step. accumulate=N splits a batch into N microbatches. Each backward
pass adds to the gradients, and the optimizer then takes a single step, so only the activations of one microbatch are in
memory at a time. Over all ranks, every microbatch has the same number of samples M, so the mean loss of the batch is
the mean of the microbatch losses. Each of p ranks divides the summed loss of its shard by M / p, for both equal and
unequal `shards`. One step consists of these operations:

    for each microbatch                     inside no_sync except for the last one (Li et al. 2020, arXiv 2006.15704):
        loss / number of microbatches, forward and backward
    unscale the gradients                   once, so that clipping uses their true norm
    clip
    step                                    with fp16, skipped on all ranks if any gradient is inf or NaN
    update the scale

Autocast computes products in bf16 or fp16 and keeps parameters, sums and losses in float32. bf16 has the same range as
float32. The largest number in fp16 is 65504, and numbers below 3e-8 are rounded to zero. With fp16, the loss is
therefore multiplied by a scale, so that small gradients do not become zero. The scale is dynamic: it is halved when a
gradient overflows and doubled after `growth_interval` steps without overflow (Micikevicius et al. 2017, arXiv
1710.03740).
"""

from __future__ import annotations

from common.api import ResNet, Run, UserError, build_network, build_optimizer, start
from common.measure.memory import MemoryMeter
from common.models.sample_dropout import add_dropout, exclude_dropout_from_compiling
from common.techniques.data_parallel import ddp
from common.techniques.data_parallel.shards import set_up_shards
from common.techniques.data_parallel.single_process_baseline import report_rank_differences
from common.techniques.precision.report import PrecisionReport
from common.training.loop import Step
from configs.amp_accum import Config

import contextlib
import shutil
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

HALF_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# A scale that starts at 65536 is lower than this limit after 31 skipped steps in a row. With such a low scale, only an
# infinite gradient can overflow.
MIN_LOSS_SCALE = 2.0**-14


def build_model(cfg: Config, run: Run) -> nn.Module:
    """Build the model. All ranks use the same seed and therefore have equal weights."""
    if cfg.model in ("resnet18", "resnet50"):
        model: nn.Module = ResNet(cfg.model, run.sample_shape, run.outputs)
    else:
        model = build_network(cfg.model, run.sample_shape, run.outputs)
    add_dropout(model, cfg.regularization.dropout, cfg.seed)  # dropout masks depend on samples, not on microbatches
    layout = torch.channels_last if cfg.channels_last else torch.preserve_format
    return model.to(run.device, run.dtype).to(memory_format=layout)


def wrap_model(cfg: Config, model: nn.Module, run: Run) -> nn.Module:
    """Compile the model if configured, and wrap the model in DDP.

    DDP averages the gradients over all ranks. A single rank needs no DDP unless the run is elastic.
    """
    if cfg.compile:
        exclude_dropout_from_compiling(model)  # dropout layers cannot be compiled
        model.compile()  # compiles in place, so parameters keep their names
    set_up_shards(cfg.sharding, run, model, partial(compute_outputs, cfg, model))
    if run.world.size == 1 and not cfg.elastic.on:
        return model
    return ddp.replicate(model, run, partial(compute_outputs, cfg), gradient_as_bucket_view=True)


def make_autocast(cfg: Config, device: torch.device) -> torch.autocast:
    """Create the autocast context, which computes products in 16 bits for bf16 and fp16."""
    return torch.autocast(device.type, HALF_DTYPES.get(cfg.precision), enabled=cfg.precision in HALF_DTYPES)


def make_scaler(cfg: Config, device: torch.device) -> GradScaler:
    """Create the loss scaler, which is enabled for fp16 only.

    The methods `scale` and `unscale_` of a disabled scaler have no effect.
    """
    is_fp16 = cfg.precision == "fp16"
    return GradScaler(device.type, cfg.init_scale, growth_interval=cfg.growth_interval, enabled=is_fp16)


def compute_outputs(cfg: Config, model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return the outputs of the model, computed with autocast if configured.

    With channels_last=true, color images [N, C, H, W] are converted to the channels_last format. Grayscale images
    [N, H, W] have no such format.
    """
    if cfg.channels_last and x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    with make_autocast(cfg, x.device):
        outputs: Tensor = model(x)
    return outputs


def accumulate_gradients(
    cfg: Config, run: Run, model: nn.Module, scaler: GradScaler, step: Step, footprint: MemoryMeter
) -> int:
    """Accumulate the gradients of a step's microbatches, and log the mean loss of the step.

    Returns the number of times that DDP all-reduced the gradients.
    """
    microbatches: list[tuple[Tensor, Tensor]] = step.batch
    device = microbatches[0][0].device
    step_loss = torch.zeros((), device=device)
    all_reduces = 0
    for number, (x, y) in enumerate(microbatches, start=1):
        is_last = number == len(microbatches)
        is_local = cfg.no_sync and not is_last  # no all-reduce after this microbatch

        # no_sync includes the forward pass, in which DDP decides whether the backward pass will all-reduce
        with model.no_sync() if is_local and isinstance(model, DistributedDataParallel) else contextlib.nullcontext():
            outputs = compute_outputs(cfg, model, x)
            with make_autocast(cfg, device):
                loss = run.loss(outputs, y, reduction="sum") / step.mean_shard
            footprint.record_peak()
            # The last step of an epoch may have fewer microbatches than cfg.accumulate.
            loss = loss / len(microbatches)
            step_loss = step_loss + loss.detach()
            if is_last:
                step.log(loss=step_loss)
            if all_reduces == 0:  # until the first all-reduce of a step, no rank waits for another rank
                step.mark_backward()
            scaler.scale(loss).backward()
        if not is_local:
            all_reduces += 1
    return all_reduces


def update_weights(cfg: Config, model: nn.Module, optimizer: Optimizer, scaler: GradScaler, step: Step) -> bool:
    """Take the optimizer step, and return whether the scaler skipped the step.

    With fp16, the scaler skips the step if any gradient is inf or NaN. The all-reduce propagates inf and NaN to every
    rank, so all ranks skip the same steps.
    """
    scaler.unscale_(optimizer)  # once per step, before clipping
    step.clip_gradients(model.parameters(), cfg.regularization.clip)
    scale_before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale() < scale_before  # the scale decreases only when the step was skipped


def set_float32_precision(cfg: Config, run: Run) -> None:
    """Set the precision of float32 products, and report settings that do not suit the device.

    Raises UserError if compile=true is set but no C++ compiler is installed.
    """
    if run.device.type == "cuda":
        products = "tf32" if cfg.precision == "tf32" else "ieee"  # the default for convolutions is tf32
        torch.backends.cuda.matmul.fp32_precision = products
        torch.backends.cudnn.conv.fp32_precision = products  # type: ignore[attr-defined]
    elif cfg.precision == "tf32":
        run.log_message("precision=tf32 needs an NVIDIA GPU; on this CPU, the run uses fp32")
    elif cfg.precision == "fp16" and not torch.cpu._is_amx_fp16_supported():
        run.log_message("precision=fp16 can be slow on this CPU, which lacks AMX-FP16 instructions; bf16 may be faster")
    if cfg.compile and not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        raise UserError("compile=true needs a C++ compiler, but none was found; install g++ or omit compile")


def check_loss_scale(scaler: GradScaler, step: Step) -> None:
    """Raise UserError if only infinite gradients can still overflow, because the loss scale is so low."""
    if scaler.get_scale() < MIN_LOSS_SCALE:
        raise UserError(f"gradients overflow fp16 at every loss scale (step {step.number}); use precision=bf16")


def predict(cfg: Config, model: nn.Module, x: Tensor | None, _: int) -> Tensor:
    """Return the outputs in an evaluation."""
    assert x is not None
    # forward() bypasses the compiled call, which would compile again for each new batch size
    return compute_outputs(cfg, model.forward, x)


def main(cfg: Config, run: Run) -> None:
    set_float32_precision(cfg, run)
    inner_model = build_model(cfg, run)
    model = wrap_model(cfg, inner_model, run)
    optimizer = build_optimizer(model.parameters(), cfg.optim, scaled=cfg.precision == "fp16")
    scaler = make_scaler(cfg, run.device)
    batches = run.microbatches(cfg.accumulate, shard=run.shard)  # each item is the list of microbatches of one step
    run.register(
        inner_model, optimizer, batches, replicated=True, scaler=scaler, predict=partial(predict, cfg, inner_model)
    )
    run.resume()  # the warm-up of DDP's buckets does not count as memory of a step
    footprint = MemoryMeter(run.device)

    for step in run.steps():
        with step:
            optimizer.zero_grad()
            all_reduces = accumulate_gradients(cfg, run, model, scaler, step, footprint)
            step.commit()  # with elastic=true, either all remaining ranks apply the update or none of them does
            skipped = update_weights(cfg, model, optimizer, scaler, step)
            bytes_sent = all_reduces * ddp.compute_ring_all_reduce_bytes(model)
            step.log(skipped=float(skipped), bytes_sent=float(bytes_sent))
        check_loss_scale(scaler, step)
    run.report(PrecisionReport.gather(cfg, run, footprint, scaler), *report_rank_differences(cfg.sharding, run))


if __name__ == "__main__":
    start(main, Config)
