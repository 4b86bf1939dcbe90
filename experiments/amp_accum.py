"""Mixed precision and gradient accumulation: fewer bits and bigger batches, and the same result.

    python experiments/amp_accum.py                                            bf16, four microbatches, two ranks
    python experiments/amp_accum.py precision=fp16 clip=1                      with a scaled loss
    python experiments/amp_accum.py processes_per_node=1 accumulate=1 precision=fp32
    python experiments/amp_accum.py sweep=true                                 the grid, with a table and plots
    python experiments/amp_accum.py model=resnet50 data.name=generated data.image_size=64 channels_last=true steps=20
    make exp NAME=amp_accum NODES=2                                            on a cluster

Takes about a minute on 2 CPU cores. Expect 98 % test accuracy on MNIST after one epoch (without MNIST: on the built-in
digits).

`batch` is the global batch of an optimizer step, as everywhere here. accumulate=N splits it into N microbatches:
backward adds their gradients up, and the optimizer steps once, so only the memory of one microbatch's activations is
needed. Every microbatch of M samples is full, so the mean over the batch is the mean of its microbatches' means; each
of p ranks takes a shard, and sums the losses of its samples up by M / p, whatever `shards` it has. A step's order:

    for each microbatch                     inside no_sync for all but the last (Li et al. 2020, arXiv 2006.15704):
        loss / number of microbatches, forward and backward
    unscale the gradients                   once, so that clipping sees their true length
    clip
    step                                    with fp16 left out if any gradient is inf or NaN, on all ranks alike
    update the scale

Autocast computes products in bf16 or fp16 and keeps parameters, sums and losses in float32. bf16 has float32's range.
fp16 ends at 65504 and loses what is below 6e-8: its loss is multiplied by a scale that moves small gradients up. The
scale is dynamic: halved when a gradient overflows, doubled after `growth_interval` steps without (Micikevicius et al.
2017, arXiv 1710.03740).
"""

from __future__ import annotations

from common.api import Run, TrainState, UserError, build_optimizer, ddp, networks, score_test_set, start, sync_batchnorm
from common.measure.memory import Footprint
from common.measure.precision_report import PrecisionReport
from common.models.sample_dropout import add_dropout, exclude_from_compiling
from common.training.loop import Step
from common.training.single_process_baseline import report_ranks, set_up_shards
from configs.amp_accum import Config

import contextlib
import shutil

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
HOPELESS = 2.0**-14  # a scale below which only something infinite overflows; from 65536, 31 steps left out in a row


def build_model(cfg: Config, run: Run) -> nn.Module:
    """Build the model, with the same weights on every rank: all draw from one seed."""
    if cfg.model in ("resnet18", "resnet50"):
        model: nn.Sequential = networks.ResNet(cfg.model, run.sample_shape, run.classes)
    else:
        model = networks.build_network(cfg.model, run.sample_shape, run.classes)
    add_dropout(model, cfg.dropout, cfg.seed)  # whose masks are those of the samples, in whichever microbatch
    layout = torch.channels_last if cfg.channels_last else torch.preserve_format
    return model.to(run.device, run.dtype).to(memory_format=layout)


def wrap_model(cfg: Config, model: nn.Module, run: Run) -> nn.Module:
    """Wrap the model so that its backward averages gradients over all ranks; one rank alone needs no wrapper."""
    if cfg.compile:
        exclude_from_compiling(model)  # dropout
        model.compile()  # in place: parameters keep their names
    alone = run.world.size == 1 and not cfg.elastic.on
    return model if alone else ddp.wrap_ddp(model, run.device, gradient_as_bucket_view=True)


def make_autocast(cfg: Config, device: torch.device) -> torch.autocast:
    """Make the context in which products are computed in 16 bits; parameters, sums and losses stay float32."""
    return torch.autocast(device.type, HALF.get(cfg.precision), enabled=cfg.precision in HALF)


def make_scaler(cfg: Config, device: torch.device) -> GradScaler:
    """Make the scaler of the loss, for fp16 only: switched off, `scale` and `unscale_` change nothing."""
    fp16 = cfg.precision == "fp16"
    return GradScaler(device.type, cfg.init_scale, growth_interval=cfg.growth_interval, enabled=fp16)


def apply_channels_last(cfg: Config, x: Tensor) -> Tensor:
    """Lay out colour images [N, C, H, W] pixel by pixel with channels_last=true; grey ones [N, H, W] stay."""
    return x.contiguous(memory_format=torch.channels_last) if cfg.channels_last and x.dim() == 4 else x


def accumulate_gradients(cfg: Config, model: nn.Module, scaler: GradScaler, step: Step, footprint: Footprint) -> int:
    """Add up the gradient of the mean loss over a step's microbatches, and log it; return how many all-reduces."""
    microbatches: list[tuple[Tensor, Tensor]] = step.batch
    total, reduced = torch.zeros((), device=microbatches[0][0].device), 0
    for number, (x, y) in enumerate(microbatches, start=1):
        waits = cfg.no_sync and number < len(microbatches)
        # around forward AND backward: DDP decides in the forward whether the backward will all-reduce
        with model.no_sync() if waits and isinstance(model, DistributedDataParallel) else contextlib.nullcontext():
            with make_autocast(cfg, x.device):
                loss = F.cross_entropy(model(apply_channels_last(cfg, x)), y, reduction="sum") / step.mean_shard
            footprint.record_peak()
            loss = loss / len(microbatches)  # the real number: an epoch's last step may have fewer than cfg.accumulate
            total = total + loss.detach()
            if number == len(microbatches):
                step.log(loss=total)
            if not reduced:  # so far no rank has waited for the others
                step.mark("backward")
            scaler.scale(loss).backward()
        reduced += not waits
    return reduced


def update_weights(cfg: Config, model: nn.Module, optimizer: Optimizer, scaler: GradScaler) -> bool:
    """Take the optimizer's step; return whether it was left out because a gradient is inf or NaN (fp16 only).

    After the all-reduce such a gradient is every rank's, so all leave the same step out.
    """
    scaler.unscale_(optimizer)  # once, and before clipping
    if cfg.clip:
        nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale() < scale  # it falls exactly then


def set_float32_precision(cfg: Config, run: Run) -> None:
    """Set how float32 products are computed on this device, and say which settings gain nothing here."""
    if run.device.type == "cuda":
        products = "tf32" if cfg.precision == "tf32" else "ieee"  # torch's own choice for convolutions is tf32
        torch.backends.cuda.matmul.fp32_precision = products
        torch.backends.cudnn.conv.fp32_precision = products  # type: ignore[attr-defined]
    elif cfg.precision == "tf32":
        run.log_message("precision=tf32 is a mode of NVIDIA GPUs: on a CPU it is fp32, and the run goes on as that")
    elif cfg.precision == "fp16" and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        run.log_message("precision=fp16: this CPU emulates fp16 products, which is slow; bf16 may be faster")
    if cfg.compile and not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        raise UserError("compile=true needs a C++ compiler, and there is none; install g++, or leave compile out")


def main(cfg: Config, run: Run) -> None:
    set_float32_precision(cfg, run)
    inner = build_model(cfg, run)
    model = wrap_model(cfg, inner, run)
    optimizer = build_optimizer(model.parameters(), cfg.optim, scaled=cfg.precision == "fp16")
    scaler = make_scaler(cfg, run.device)
    batches = run.microbatches(cfg.accumulate, shard=run.shard)  # one item is the list of them for one step
    with make_autocast(cfg, run.device):
        set_up_shards(cfg, run, batches, inner)  # with shards=auto: measures how fast each rank is
        ddp.warm_up_buckets(model, apply_channels_last(cfg, run.load_example(batches.own_samples)))
    state = TrainState([inner], optimizer, batches, run.world, replicated=True, scaler=scaler, replica=model)
    footprint, payload = Footprint(run.device), ddp.compute_ring_bytes(model)

    def predict(x: Tensor | None, _: int) -> Tensor:
        assert x is not None
        with make_autocast(cfg, run.device):
            return inner.forward(apply_channels_last(cfg, x))  # not compiled: other sizes would be compiled anew

    def evaluate() -> dict[str, float]:
        sync_batchnorm.average_buffers(inner, weight=batches.weight)  # each rank's BatchNorm has seen other samples
        return score_test_set(predict, run, shard=run.shard)

    run.resume(state)
    for step in run.steps(state, evaluate):
        with step:
            optimizer.zero_grad()
            reduced = accumulate_gradients(cfg, model, scaler, step, footprint)
            step.commit()  # with elastic=true: the update counts on all ranks that are left, or on none
            skipped = update_weights(cfg, model, optimizer, scaler)
            step.log(skipped=float(skipped), bytes_sent=float(reduced * payload))
        if scaler.get_scale() < HOPELESS:
            raise UserError(f"gradients overflow fp16 whatever the scale, at step {step.number}; use precision=bf16")
    held = run.world.gather(footprint.most)
    run.report(PrecisionReport(cfg, run.folder, run.device.type, held, scaler.get_scale()), *report_ranks(cfg, run))


if __name__ == "__main__":
    start(main, Config)
