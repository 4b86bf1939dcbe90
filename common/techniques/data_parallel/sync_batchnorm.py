"""Synchronized BatchNorm, which normalizes over the batches of all ranks."""

from __future__ import annotations

import time
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class AllReduce(torch.autograd.Function):
    """Differentiable sum of a tensor of any shape over all ranks.

    The tensor of one rank contributes to the loss of every rank, so the backward pass sums the gradients over all
    ranks. The same function in torch.distributed.nn has been deprecated since torch 2.15.
    """

    @staticmethod
    def forward(ctx: Any, summand: Tensor) -> Tensor:
        total = summand.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return AllReduce.forward(ctx, gradient)


class SyncBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm2d layer (arXiv 1502.03167) that normalizes over the samples [N, C, H, W] of all ranks.

    Unlike torch's SyncBatchNorm, this layer runs on CPUs. The layer has the same parameters and buffers as BatchNorm2d.
    Ranks may have different numbers of samples, including none.
    """

    waiting_seconds = 0.0
    """Time in seconds that forward passes have spent in all-reduces since the last call of `pop_waiting_seconds`."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        assert self.momentum is not None
        channel = (1, -1, 1, 1)

        # Sum deviations from the running mean, which is close to the mean of the batch. Sums of large squares would
        # lose precision.
        pivot = self.running_mean.clone()
        deviation = x - pivot.view(channel)
        local_count = torch.full_like(pivot, x.numel() // x.shape[1])
        local_sum = deviation.sum((0, 2, 3))
        local_squares = deviation.square().sum((0, 2, 3))
        sums = torch.stack([local_sum, local_squares, local_count])
        start = time.perf_counter()
        sums = cast(Tensor, AllReduce.apply(sums))
        self.waiting_seconds += time.perf_counter() - start

        count = sums[2].detach()
        offset, mean_square = sums[:2] / count
        variance = mean_square - offset.square()
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(pivot + offset, self.momentum)
            unbiased_variance = variance * (count / (count - 1))
            self.running_var.lerp_(unbiased_variance, self.momentum)
        scale = (variance + self.eps).rsqrt() * self.weight
        return deviation * scale.view(channel) + (self.bias - offset * scale).view(channel)

    def pop_waiting_seconds(self) -> float:
        """Return `waiting_seconds`, and reset it to 0."""
        seconds = self.waiting_seconds
        self.waiting_seconds = 0.0
        return seconds


def convert_sync_batchnorm(model: nn.Module, device: torch.device) -> nn.Module:
    """Convert the BatchNorm layers of a model to synchronized BatchNorm.

    With NCCL, the new layers are torch's SyncBatchNorm layers; with other backends, they are SyncBatchNorm2d layers.
    Parameters and buffers keep their names and values.
    """
    if device.type == "cuda" and dist.get_backend() == "nccl":
        return cast(nn.Module, nn.SyncBatchNorm.convert_sync_batchnorm(model))
    if type(model) is nn.BatchNorm2d:
        return convert_batchnorm_layer(model)
    for parent in list(model.modules()):
        for name, layer in parent.named_children():
            if type(layer) is nn.BatchNorm2d:
                parent.add_module(name, convert_batchnorm_layer(layer))
    return model


def convert_batchnorm_layer(layer: nn.BatchNorm2d) -> SyncBatchNorm2d:
    """Return a SyncBatchNorm2d layer that shares the parameters and buffers of a BatchNorm2d layer."""
    synced = SyncBatchNorm2d(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
    synced.weight = layer.weight
    synced.bias = layer.bias
    synced.running_mean = layer.running_mean
    synced.running_var = layer.running_var
    synced.num_batches_tracked = layer.num_batches_tracked
    return synced.train(layer.training)


def list_unsynchronized_norms(model: nn.Module) -> list[nn.BatchNorm2d]:
    """Return the BatchNorm2d layers that are not synchronized, including those that FSDP2 has wrapped."""
    norms = []
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and not isinstance(module, SyncBatchNorm2d):
            norms.append(module)
    return norms


def accept_empty_batches(model: nn.Module) -> nn.Module:
    """Make unsynchronized BatchNorm layers accept empty batches, and return the model.

    An empty batch has no mean, so the layers normalize with their running statistics and do not update them.
    """

    def set_mode(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        is_empty = len(inputs[0]) == 0
        layer.train(model.training and not is_empty)
        if model.training and is_empty:
            cast(Tensor, layer.num_batches_tracked).add_(1)  # the same count as on ranks that have samples

    for layer in list_unsynchronized_norms(model):
        layer.register_forward_pre_hook(set_mode)
    return model
