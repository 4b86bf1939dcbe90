"""Target tokens that count in the loss, and their number over all ranks and microbatches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from common.data.loader import Loader
from common.models.gpt import NOT_SCORED
from common.models.position_dropout import HASH_BITS, hash_numbers
from common.system.seeds import derive_seed
from common.training.loop import Step

Microbatch = tuple[Tensor, Tensor]
"""Inputs and targets [n, T] of a microbatch."""


def mask_targets(step: Step, batches: Loader, share: float, seed: int) -> list[Microbatch]:
    """Return the microbatches of a step, in which a random `share` of the targets is replaced by NOT_SCORED.

    The choice depends only on the seed, the epoch, and the positions of the sample and the token, so it is the same for
    any number of ranks and microbatches.
    """
    microbatches: list[Microbatch] = step.batch
    if not share:
        return microbatches
    positions = batches.list_sample_positions((step.number - 1) % batches.steps)
    masked = []
    for (inputs, targets), samples in zip(microbatches, positions, strict=True):
        is_ignored = draw_ignored(samples, targets.shape[1], share, derive_seed(seed, "masked", step.epoch))
        masked.append((inputs, targets.masked_fill(is_ignored.to(targets.device), NOT_SCORED)))
    return masked


def draw_ignored(samples: range, tokens: int, share: float, key: int) -> Tensor:
    """Return a bool tensor [n, tokens] that is True for a random `share` of the targets of n samples."""
    numbers = torch.arange(samples.start, samples.stop)[:, None] * tokens + torch.arange(tokens)
    limit = round(share * 2**HASH_BITS) - 2 ** (HASH_BITS - 1)
    return hash_numbers(numbers, key) < limit


class TokenCount:
    """Number of scored targets in a step over all ranks, which are added up while the ranks compute a forward pass."""

    def __init__(self, total: Tensor, adding: dist.Work) -> None:
        self.total = total
        self.adding: dist.Work | None = adding

    def wait(self) -> Tensor:
        """Wait for the number, and return it; at least 1."""
        if self.adding is not None:
            self.adding.wait()
            self.adding = None
        return self.total.clamp(min=1)


def count_valid_tokens(microbatches: Sequence[Microbatch]) -> TokenCount:
    """Start to count the scored targets in a step, over all microbatches and all ranks.

    All ranks must call this function. Ranks that process the same samples each count them, so the number is a multiple
    of the number of tokens: divide the sum of all ranks' losses by it.
    """
    counts = [(targets != NOT_SCORED).sum() for _, targets in microbatches]
    total = torch.stack(counts).sum()
    adding = dist.all_reduce(total, async_op=True)
    assert adding is not None
    return TokenCount(total, adding)
