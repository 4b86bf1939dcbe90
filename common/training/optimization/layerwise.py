"""LARS and LAMB: the step of each layer in proportion to the norm of its weights, for large batches.

Parameters of fewer than two dimensions, biases and the scales of normalisation, take the step as it is, at the full
learning rate: they are small where the weights are not, and a step in proportion to them would hardly move them. The
papers do not tell these apart; the implementations of TensorFlow's model garden and of SimCLR leave them out likewise.
Norms are those of the full tensor, also where ranks hold shards of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from common.checkpoint.state_dicts import full_tensor

Parameters = Iterable[nn.Parameter] | Iterable[dict[str, Any]]


def compute_norm(values: Tensor) -> Tensor:
    """Return the Euclidean norm [] of a tensor, of the full one if ranks hold shards. All of them call it."""
    norm: Tensor = full_tensor(torch.linalg.vector_norm(values))
    return norm


def divide_norms(upper: Tensor, lower: Tensor) -> Tensor:
    """Return upper / lower, or 1 where either is 0: else weights of zero would never move."""
    return torch.where((upper > 0) & (lower > 0), upper / lower, torch.ones_like(upper))


class Lars(Optimizer):
    """Layer-wise adaptive rate scaling (You et al. 2017, arXiv 1708.03888, algorithm 1).

    The learning rate is inside the momentum, as in the paper: another one counts for new gradients only. `trust` is its
    LARS coefficient.
    """

    def __init__(
        self, params: Parameters, lr: float = 1.0, momentum: float = 0.9, weight_decay: float = 0.0, trust: float = 1e-3
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step with the gradients that are there."""
        for group in self.param_groups:
            decay, momentum = group["weight_decay"], group["momentum"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                update = weight.grad.add(weight, alpha=decay)
                if weight.ndim > 1:
                    size, slope = compute_norm(weight), compute_norm(weight.grad)
                    update.mul_(divide_norms(group["trust"] * size, slope + decay * size))
                state = self.state[weight]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(weight)
                velocity = state["momentum_buffer"].mul_(momentum).add_(update, alpha=group["lr"])
                weight.sub_(velocity)


class Lamb(Optimizer):
    """Layer-wise adaptive moments (You et al. 2019, arXiv 1904.00962, algorithm 2), phi the identity."""

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
        """Take a step with the gradients that are there."""
        for group in self.param_groups:
            first, second = group["betas"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["step"] = 0
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
                state["step"] += 1
                mean = state["exp_avg"].lerp_(weight.grad, 1 - first) / (1 - first ** state["step"])
                square = state["exp_avg_sq"].mul_(second).addcmul_(weight.grad, weight.grad, value=1 - second)
                update = mean.div_((square / (1 - second ** state["step"])).sqrt_().add_(group["eps"]))
                update.add_(weight, alpha=group["weight_decay"])
                if weight.ndim > 1:
                    update.mul_(divide_norms(compute_norm(weight), compute_norm(update)))
                weight.sub_(update, alpha=group["lr"])
