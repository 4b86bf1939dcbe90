"""BatchNorm over the batches of all ranks, and buffers averaged over them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class AllReduce(torch.autograd.Function):
    """Sum over all ranks of a tensor of any shape, the same on each.

    The summand of one rank reaches the loss of every rank, so backward sums the gradients, too. torch.distributed.nn
    has the same function, deprecated since torch 2.15.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total


class SyncBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm2d (arXiv 1502.03167) over the samples [N, C, H, W] of all ranks.

    torch's SyncBatchNorm does not run on CPUs; this one does. Parameters and buffers are BatchNorm2d's. Ranks may hold
    unequally many samples, or none.
    """

    waited = 0.0
    """Seconds that forwards waited in their all-reduce since it was last set to 0."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        assert self.momentum is not None
        channel = (1, -1, 1, 1)
        # about the running mean, which is near the mean: sums of large squares would lose digits
        pivot = self.running_mean.clone()
        away = x - pivot.view(channel)
        own = torch.full_like(pivot, x.numel() // x.shape[1])
        sums = torch.stack([away.sum((0, 2, 3)), away.square().sum((0, 2, 3)), own])
        start = time.perf_counter()
        sums = cast(Tensor, AllReduce.apply(sums))
        self.waited += time.perf_counter() - start
        count = sums[2].detach()
        offset, square = sums[:2] / count
        variance = square - offset.square()
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(pivot + offset, self.momentum)
            self.running_var.lerp_(variance * (count / (count - 1)), self.momentum)
        scale = (variance + self.eps).rsqrt() * self.weight
        return away * scale.view(channel) + (self.bias - offset * scale).view(channel)


def convert_sync_batchnorm(model: nn.Module, device: torch.device) -> nn.Module:
    """Convert BatchNorm to its synchronised form, torch's with nccl, ours elsewhere; names and values stay."""
    if device.type == "cuda" and dist.get_backend() == "nccl":
        return cast(nn.Module, nn.SyncBatchNorm.convert_sync_batchnorm(model))
    if type(model) is nn.BatchNorm2d:
        return convert_layer(model)
    for parent in list(model.modules()):
        for name, layer in parent.named_children():
            if type(layer) is nn.BatchNorm2d:
                parent.add_module(name, convert_layer(layer))
    return model


def convert_layer(layer: nn.BatchNorm2d) -> SyncBatchNorm2d:
    """Return a synchronised layer that shares the parameters and buffers of a BatchNorm2d."""
    synced = SyncBatchNorm2d(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
    synced.weight, synced.bias = layer.weight, layer.bias
    synced.running_mean, synced.running_var = layer.running_mean, layer.running_var
    synced.num_batches_tracked = layer.num_batches_tracked
    return synced.train(layer.training)


def take_waiting_seconds(model: nn.Module) -> float:
    """Return the seconds that synchronised BatchNorm waited in forwards since the last call, and reset them."""
    seconds = 0.0
    for module in model.modules():
        if isinstance(module, SyncBatchNorm2d):
            seconds, module.waited = seconds + module.waited, 0.0
    return seconds


def list_own_norms(model: nn.Module) -> list[nn.BatchNorm2d]:
    """Return the BatchNorm layers that see the samples of their own rank only, also as FSDP2 has wrapped them."""
    norms = (module for module in model.modules() if isinstance(module, nn.BatchNorm2d))
    return [norm for norm in norms if not isinstance(norm, SyncBatchNorm2d)]


def skip_empty_batches(model: nn.Module) -> nn.Module:
    """Let BatchNorm that is not synchronised pass on a batch of no samples, which has no mean; return the model."""

    def set_mode(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        empty = len(inputs[0]) == 0
        layer.train(model.training and not empty)
        if model.training and empty:
            cast(Tensor, layer.num_batches_tracked).add_(1)  # as on the ranks that have some

    for layer in list_own_norms(model):
        layer.register_forward_pre_hook(set_mode)
    return model


@torch.no_grad()
def average_buffers(model: nn.Module, group: dist.ProcessGroup | None = None, weight: float = 1.0) -> None:
    """Average the floating buffers over the ranks of a group, which saw different samples. All of them call it.

    `weight` is what this rank's count for, 1 in the mean over the ranks: where shards are unequal, `Loader.weight`.
    """
    average_tensors([buffer for buffer in model.buffers() if buffer.is_floating_point()], group, weight)


@torch.no_grad()
def average_tensors(values: Sequence[Tensor], group: dist.ProcessGroup | None = None, weight: float = 1.0) -> None:
    """Replace tensors of one dtype, of any shapes, by their means over the ranks of a group, in one all-reduce.

    Each rank's count with its `weight`; the mean of the weights is 1.
    """
    if not values or dist.get_world_size(group) == 1:
        return
    flat = torch.cat([value.flatten() for value in values]) * weight
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size(group)
    for value, mean in zip(values, flat.split([v.numel() for v in values]), strict=True):
        value.copy_(mean.view_as(value))
