"""Norm of the gradients: clipping, and logging without clipping (log.gradient_norm=true)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from common.checkpoint.train_state import TrainState
from common.measure.metrics_log import Values
from common.training.hooks import StepHook


def compute_gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """Return the Euclidean norm over the gradients of all parameters. Missing gradients count as zeros.

    If parameters are sharded (DTensors), all ranks must call this function.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if any(is_sharded(gradient) for gradient in gradients):
        return compute_sharded_norm(gradients)
    return get_total_norm(gradients)


def is_sharded(gradient: Tensor) -> bool:
    """Return True if a gradient is a DTensor, of which a rank may hold a shard."""
    return hasattr(gradient, "placements")


def compute_sharded_norm(gradients: Sequence[Any]) -> Tensor:
    """Return the Euclidean norm over gradients that may be divided in different dimensions of a mesh.

    The squares of a gradient are summed over the mesh dimensions in which it is divided, and counted once in all other
    dimensions. Gradients that are divided in the same dimensions share one all-reduce per dimension; torch's
    `get_total_norm` needs one for each gradient.
    """
    local_gradients: dict[tuple[Any, tuple[int, ...]], list[Tensor]] = {}
    for gradient in gradients:
        mesh = None
        shard_dims: tuple[int, ...] = ()
        if is_sharded(gradient):
            mesh = gradient.device_mesh
            shard_dims = tuple(i for i, placement in enumerate(gradient.placements) if not placement.is_replicate())
        local_gradient = gradient.to_local() if is_sharded(gradient) else gradient
        local_gradients.setdefault((mesh, shard_dims), []).append(local_gradient)

    total = torch.zeros((), dtype=torch.float64, device=gradients[0].device)
    for (mesh, shard_dims), tensors in local_gradients.items():
        square = get_total_norm(tensors).double().square()
        for dim in shard_dims:
            dist.all_reduce(square, group=mesh.get_group(dim))
        total += square
    return total.sqrt().to(gradients[0].dtype)


def add_other_stages(norm: Tensor, state: TrainState) -> Tensor:
    """Return the norm over the gradients of all stages, in float64, from the norm over this rank's stages.

    All ranks must call this function.
    """
    peers = state.peers.current.size if state.peers else 1  # ranks that hold the same stages as this rank
    squares = norm.double().square() / peers
    dist.all_reduce(squares)
    return squares.sqrt()


def clip_gradients(parameters: Iterable[Tensor], max_norm: float, state: TrainState) -> Tensor:
    """Scale the gradients so that their norm is at most `max_norm`, and return the norm before the scaling.

    `state` states whether other ranks hold other stages of the model, whose gradients belong to the norm.
    """
    parameters = list(parameters)
    norm = compute_gradient_norm(parameters)
    if state.has_stages:
        norm = add_other_stages(norm, state).to(norm.dtype)
    clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


class GradientNorm(StepHook):
    """Hook that computes the norm of the gradients immediately before the optimizer uses them."""

    def __init__(self, state: TrainState) -> None:
        """Install the hook in the optimizer."""
        assert state.optimizer is not None
        self.state = state
        self.optimizer = state.optimizer
        self.norm: Tensor | None = None
        """Norm of the newest step, or None if this rank had no gradients in this step."""
        self.optimizer.register_step_pre_hook(lambda *_: self.measure_norm())

    def measure_norm(self) -> None:
        """Compute the norm of the current gradients. If the model has stages, all ranks must call this method."""
        parameters: list[Tensor] = []
        for group in self.optimizer.param_groups:
            parameters += group["params"]
        self.norm = compute_gradient_norm(parameters)
        if self.state.has_stages:
            self.norm = add_other_stages(self.norm, self.state)

    def collect_values(self) -> Values:
        norm = self.norm
        self.norm = None
        return {"gradient_norm": norm}
