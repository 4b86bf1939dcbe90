"""Losses other than cross-entropy: the mean squared error and custom losses.

A loss has the arguments `outputs`, `targets` and `reduction`, as in torch.nn.functional. The reduction is "mean" or
"sum" over the samples. In data parallelism, with microbatches and in partial batches, sums over the samples can be
added, which is why a custom loss returns one value per sample.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from common.config.custom_function import load_function
from common.system.errors import UserError

LossFunction = Callable[..., Tensor]
ALTERNATIVES = "cross_entropy, mse"


def build_loss(name: str) -> LossFunction:
    """Return the loss `mse` or a custom loss `FILE.py:function`.

    Raises UserError if the file has no such function.
    """
    if name == "mse":
        return compute_squared_error
    function = load_function("loss", name, ALTERNATIVES)

    def compute_custom_loss(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        """Return the sum or the mean of the losses of the samples."""
        losses: Tensor = function(outputs, targets)
        problem = find_wrong_shape(losses, len(targets))
        if problem:
            raise UserError(f"loss={name}: {problem}")
        return losses.sum() if reduction == "sum" else losses.mean()

    return compute_custom_loss


def compute_squared_error(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Return the squared error of outputs and targets [N, ...], averaged over the values of a sample.

    The outputs may have another shape with the same number of values, such as [N, 1] for targets [N].
    """
    outputs = outputs.view_as(targets)
    total = F.mse_loss(outputs, targets, reduction="sum") / targets.shape[1:].numel()
    return total if reduction == "sum" else total / len(targets)


def find_wrong_shape(losses: Any, samples: int) -> str:
    """Return why the value of a custom loss is not one loss per sample, or an empty string if it is."""
    if isinstance(losses, Tensor) and losses.shape == (samples,):
        return ""
    result = f"a tensor of shape {list(losses.shape)}" if isinstance(losses, Tensor) else f"a {type(losses).__name__}"
    return (
        f"the function returned {result} for {samples} samples; return one loss per sample, a tensor [{samples}] "
        '(for example with reduction="none", and .mean(1) over the values of a sample)'
    )
