"""Cross-entropy of logits that are divided by vocabulary (Shoeybi et al. 2019, arXiv 1909.08053, section 3).

No rank needs the logits of the whole vocabulary: the ranks exchange three numbers per token instead.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from common.models.gpt import NOT_SCORED
from common.techniques.parallel_layout.tensor_ranks import TensorRanks, find_local_rows


def sum_vocabulary_loss(logits: Tensor, targets: Tensor, ranks: TensorRanks) -> Tensor:
    """Return the sum of the cross-entropy over the scored tokens, identical on all ranks.

    `logits` [N, T, vocabulary / ranks] are those of this rank's part of the vocabulary, and `targets` [N, T] are
    numbers in the whole vocabulary, or -100 for tokens that are not scored.
    """
    # The largest logit of each token cancels out. It is subtracted so that exp does not overflow.
    largest = logits.detach().amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, ranks.group)
    shifted = logits - largest[..., None]
    log_sum = ranks.sum_over_ranks(shifted.exp().sum(-1)).log()

    rows, is_local = find_local_rows(targets, logits.shape[-1], ranks.index)
    local_target_logits = shifted.gather(-1, rows[..., None]).squeeze(-1) * is_local
    target_logits = ranks.sum_over_ranks(local_target_logits)
    losses = log_sum - target_logits
    return losses.masked_fill(targets == NOT_SCORED, 0.0).sum()
