"""Computation of the learning rate of each step.

The learning rate depends only on the step and the settings, so that checkpoints need no scheduler state.
"""

from __future__ import annotations

import math

from torch.optim import Optimizer

from common.training import custom_optimizer
from configs.shared import Optim


def compute_learning_rate(cfg: Optim, step: int, total: int, batch: int) -> float:
    """Return the learning rate of a step in a run of `total` steps.

    `step` is counted from 0. Each step has `batch` samples. If optim.base_batch is set, the learning rate is
    proportional to the batch size. The learning rate increases linearly during the warm-up (Goyal et al. 2017, arXiv
    1706.02677). The cosine decay follows Loshchilov and Hutter 2016 (arXiv 1608.03983), without restarts. The step
    decay follows He et al. 2015 (arXiv 1512.03385). Raises UserError if a custom decay returns an invalid factor.
    """
    peak = cfg.lr * batch / cfg.base_batch if cfg.base_batch else cfg.lr
    if step < cfg.warmup:
        return peak * (step + 1) / cfg.warmup
    decay_step = step - cfg.warmup
    decay_steps = max(1, total - cfg.warmup)
    done = decay_step / decay_steps
    match cfg.decay:
        case "cosine":
            return peak * (1 + math.cos(math.pi * done)) / 2
        case "linear":
            return peak * (1 - done)
        case "step":
            return peak * (1.0 if done < 0.5 else 0.1 if done < 0.75 else 0.01)
        case "constant":
            return peak
    return peak * custom_optimizer.compute_custom_decay(cfg.decay, decay_step, decay_steps)


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of all parameter groups."""
    for group in optimizer.param_groups:
        group["lr"] = lr
