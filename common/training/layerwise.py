"""LARS and LAMB: layer-wise optimizers for training with large batches.

The size of each layer's update is proportional to the norm of the layer's weights. Parameters with fewer than two
dimensions (biases and the scales of normalization layers) are updated at the full learning rate instead. The norms of
such parameters are small, so a proportional update would hardly change the parameters. The papers do not distinguish
parameters by dimension, but the implementations in TensorFlow Model Garden and SimCLR do. For a sharded parameter, the
norm of the full tensor is used.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from common.checkpoint.state_dicts import gather_full_tensor

Parameters = Iterable[nn.Parameter] | Iterable[dict[str, Any]]


def compute_norm(values: Tensor) -> Tensor:
    """Return the Euclidean norm of a tensor as a scalar tensor.

    For a sharded tensor, the norm of the full tensor is returned, and all ranks that hold a shard must call this
    function.
    """
    norm: Tensor = gather_full_tensor(torch.linalg.vector_norm(values))
    return norm


def divide_norms(upper: Tensor, lower: Tensor) -> Tensor:
    """Return the ratio of two norms, or 1 if either norm is 0.

    With a ratio of 0, weights that are all zero would never change.
    """
    is_positive = (upper > 0) & (lower > 0)
    return torch.where(is_positive, upper / lower, torch.ones_like(upper))


class Lars(Optimizer):
    """LARS optimizer: layer-wise adaptive rate scaling (You et al. 2017, arXiv 1708.03888, algorithm 1).

    As in the paper, updates are multiplied by the learning rate before they are added to the momentum buffer. A change
    of the learning rate therefore affects new gradients only. `trust` is the trust coefficient of the paper.
    """

    def __init__(
        self, params: Parameters, lr: float = 1.0, momentum: float = 0.9, weight_decay: float = 0.0, trust: float = 1e-3
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            decay = group["weight_decay"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                update = weight.grad.add(weight, alpha=decay)
                if weight.ndim > 1:
                    # Scale the update by the trust ratio: trust * |weight| / (|gradient| + decay * |weight|).
                    weight_norm = compute_norm(weight)
                    update_norm = compute_norm(weight.grad) + decay * weight_norm
                    update.mul_(divide_norms(group["trust"] * weight_norm, update_norm))

                state = self.state[weight]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(weight)
                velocity = state["momentum_buffer"].mul_(group["momentum"])
                velocity.add_(update, alpha=group["lr"])
                weight.sub_(velocity)


class Lamb(Optimizer):
    """LAMB optimizer: layer-wise adaptive moments (You et al. 2019, arXiv 1904.00962, algorithm 2).

    The scaling function phi of the paper is the identity.
    """

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(weight)
                    state["exp_avg_sq"] = torch.zeros_like(weight)
                state["step"] += 1
                mean = state["exp_avg"].lerp_(weight.grad, 1 - beta1)
                mean_square = state["exp_avg_sq"].mul_(beta2)
                mean_square.addcmul_(weight.grad, weight.grad, value=1 - beta2)

                # Divide the bias-corrected mean by the root of the bias-corrected mean square.
                update = mean / (1 - beta1 ** state["step"])
                root = (mean_square / (1 - beta2 ** state["step"])).sqrt_()
                update.div_(root.add_(group["eps"]))
                update.add_(weight, alpha=group["weight_decay"])
                if weight.ndim > 1:
                    update.mul_(divide_norms(compute_norm(weight), compute_norm(update)))
                weight.sub_(update, alpha=group["lr"])
