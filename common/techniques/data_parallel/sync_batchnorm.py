"""Synchronized BatchNorm, which normalizes over the batches of all ranks."""

from __future__ import annotations

import time
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from common.system.errors import UserError

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def make_channel_shape(x: Tensor) -> list[int]:
    """Return the shape with which one value per channel is broadcast to samples [N, C, ...]."""
    return [1, -1, *[1] * (x.dim() - 2)]


class GlobalMoments(torch.autograd.Function):
    """Differentiable mean and variance of deviations [N, C, ...] from the mean of all ranks.

    The mean is 0, and `variance` and the number of values `count` are known. The samples of one rank contribute to the
    loss of every rank, so the backward pass sums the gradients over all ranks.
    """

    @staticmethod
    def forward(ctx: Any, deviation: Tensor, variance: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(deviation, count)
        return torch.zeros_like(variance), variance.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, mean_gradient: Tensor, variance_gradient: Tensor) -> tuple[Tensor, None, None]:
        deviation, count = ctx.saved_tensors
        gradients = torch.stack([mean_gradient, variance_gradient])
        dist.all_reduce(gradients)
        mean_gradient, variance_gradient = gradients / count
        channel = make_channel_shape(deviation)
        return mean_gradient.view(channel) + 2 * variance_gradient.view(channel) * deviation, None, None


class SyncBatchNormNd(_BatchNorm):
    """BatchNorm layer (arXiv 1502.03167) that normalizes over the samples [N, C, ...] of all ranks.

    Unlike torch's SyncBatchNorm, this layer runs on CPUs. It has the same parameters and buffers as the layer that it
    replaces. Ranks may have different numbers of samples, including none.
    """

    waiting_seconds = 0.0
    """Time in seconds that forward passes have spent in all-gathers since the last call of `pop_waiting_seconds`."""

    def _check_input_dim(self, input: Tensor) -> None:
        """Accept the inputs of BatchNorm1d, BatchNorm2d and BatchNorm3d."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        assert self.momentum is not None
        channel = make_channel_shape(x)
        with torch.no_grad():
            mean, variance, count = self.gather_moments(x)
            if count[0] < 2:
                raise UserError("BatchNorm requires more than one value per channel in training; use a larger batch")
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            unbiased_variance = variance * (count / (count - 1))
            self.running_var.lerp_(unbiased_variance, self.momentum)

        deviation = x - mean.view(channel)
        offset, variance = cast(tuple[Tensor, Tensor], GlobalMoments.apply(deviation, variance, count))
        scale = (variance + self.eps).rsqrt() * self.weight
        return deviation * scale.view(channel) + (self.bias - offset * scale).view(channel)

    def gather_moments(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the mean, the variance and the number of values of each channel over all ranks.

        Each rank sums the squares of deviations from its own mean. Sums of large squares would lose precision.
        """
        assert self.running_mean is not None
        reduced = [0, *range(2, x.dim())]
        local_count = torch.full_like(self.running_mean, x.numel() // x.shape[1])
        local_mean = x.sum(reduced, dtype=local_count.dtype) / local_count.clamp(min=1)
        local_squares = (x - local_mean.view(make_channel_shape(x))).square().sum(reduced)
        local_moments = torch.stack([local_count, local_mean, local_squares])
        moments = local_moments.new_empty(dist.get_world_size(), *local_moments.shape)
        start = time.perf_counter()
        dist.all_gather_into_tensor(moments.flatten(0, 1), local_moments)
        self.waiting_seconds += time.perf_counter() - start

        counts, means, squares = moments.unbind(1)
        count = counts.sum(0)
        mean = (counts * means).sum(0) / count
        variance = (squares + counts * (means - mean).square()).sum(0) / count
        return mean, variance, count

    def pop_waiting_seconds(self) -> float:
        """Return `waiting_seconds`, and reset it to 0."""
        seconds = self.waiting_seconds
        self.waiting_seconds = 0.0
        return seconds


def convert_sync_batchnorm(model: nn.Module, device: torch.device) -> nn.Module:
    """Convert the BatchNorm layers of a model to synchronized BatchNorm.

    With NCCL, the new layers are torch's SyncBatchNorm layers; with other backends, they are SyncBatchNormNd layers.
    Parameters and buffers keep their names and values. Raises UserError if a layer cannot be converted.
    """
    for layer in model.modules():
        if isinstance(layer, _BatchNorm) and type(layer) not in (*BATCH_NORMS, nn.SyncBatchNorm):
            raise UserError(format_refusal(layer))  # torch's conversion would ignore the methods of a subclass
    if device.type == "cuda" and dist.get_backend() == "nccl":
        return cast(nn.Module, nn.SyncBatchNorm.convert_sync_batchnorm(model))
    if isinstance(model, _BatchNorm):
        return convert_batchnorm_layer(model)
    for parent in list(model.modules()):
        for name, layer in parent.named_children():
            if isinstance(layer, _BatchNorm):
                parent.add_module(name, convert_batchnorm_layer(layer))
    return model


def format_refusal(layer: nn.Module) -> str:
    """Return the message for a BatchNorm layer that cannot be converted."""
    return (
        f"sync_batchnorm=true cannot convert the layer {layer}; use nn.BatchNorm1d, nn.BatchNorm2d or nn.BatchNorm3d "
        "with momentum, parameters and running statistics, or sync_batchnorm=false"
    )


def convert_batchnorm_layer(layer: _BatchNorm) -> SyncBatchNormNd:
    """Return a SyncBatchNormNd layer that shares the parameters and buffers of a BatchNorm layer."""
    required = (layer.weight, layer.bias, layer.running_mean, layer.momentum)
    is_complete = all(value is not None for value in required)
    if type(layer) not in BATCH_NORMS or not is_complete:
        raise UserError(format_refusal(layer))
    synced = SyncBatchNormNd(layer.num_features, layer.eps, layer.momentum)
    synced.weight = layer.weight
    synced.bias = layer.bias
    synced.running_mean = layer.running_mean
    synced.running_var = layer.running_var
    synced.num_batches_tracked = layer.num_batches_tracked
    return synced.train(layer.training)


def list_unsynchronized_norms(model: nn.Module) -> list[_BatchNorm]:
    """Return the BatchNorm layers that are not synchronized, including those that FSDP2 has wrapped."""
    norms = []
    for module in model.modules():
        if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNormNd | nn.SyncBatchNorm):
            norms.append(module)
    return norms


def accept_empty_batches(model: nn.Module) -> nn.Module:
    """Make unsynchronized BatchNorm layers accept empty batches, and return the model.

    An empty batch has no mean, so the layers normalize with their running statistics and do not update them.
    """

    def set_mode(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        is_empty = len(inputs[0]) == 0
        layer.train(model.training and not is_empty)
        count = layer.num_batches_tracked
        if model.training and is_empty and isinstance(count, Tensor):
            count.add_(1)  # the same count as on ranks that have samples

    for layer in list_unsynchronized_norms(model):
        layer.register_forward_pre_hook(set_mode)
    return model
