"""Mistakes with the loss of a text: what they do, and what is correct."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from common.models.gpt import GPT, NOT_SCORED

CONTEXT = 12
Microbatch = tuple[Tensor, Tensor]


def draw_microbatches() -> list[Microbatch]:
    """Return three microbatches of two samples, in which 1, 12 and 24 of 24 targets are scored."""
    microbatches = []
    for scored in (1, 12, 24):
        tokens = torch.randint(50, (2, CONTEXT + 1))
        targets = tokens[:, 1:].clone()
        targets.view(-1)[scored:] = NOT_SCORED
        microbatches.append((tokens[:, :-1], targets))
    return microbatches


def compute_gradient(model: GPT, losses: Sequence[Tensor]) -> Tensor:
    """Return the gradient of the sum of the losses, as a vector."""
    gradients = torch.autograd.grad(torch.stack(list(losses)).sum(), list(model.parameters()))
    return torch.cat([gradient.flatten() for gradient in gradients])


def test_the_mean_of_the_token_means_of_microbatches_is_another_gradient() -> None:
    """The microbatches may be those of one rank or of several."""
    model = GPT(CONTEXT, 50, width=16, layers=1, heads=2).double()
    microbatches = draw_microbatches()
    valid_tokens = sum(int((targets != NOT_SCORED).sum()) for _, targets in microbatches)
    assert valid_tokens == 1 + 12 + 24

    def compute(loss: Callable[..., Tensor]) -> Tensor:
        return compute_gradient(model, [loss(model(x).flatten(0, 1), y.flatten()) for x, y in microbatches])

    inputs, targets = (torch.cat(parts) for parts in zip(*microbatches, strict=True))
    whole = compute_gradient(model, [F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())])
    mean_of_means = compute(lambda outputs, y: F.cross_entropy(outputs, y) / len(microbatches))
    correct = compute(lambda outputs, y: F.cross_entropy(outputs, y, reduction="sum") / valid_tokens)
    torch.testing.assert_close(correct, whole, rtol=1e-9, atol=1e-12)
    assert (mean_of_means - whole).norm() > 0.3 * whole.norm()


def test_a_microbatch_without_scored_tokens_makes_the_mean_of_means_undefined() -> None:
    outputs = torch.zeros(4, 10)
    targets = torch.full((4,), NOT_SCORED)
    assert F.cross_entropy(outputs, targets).isnan()
    assert F.cross_entropy(outputs, targets, reduction="sum") == 0
