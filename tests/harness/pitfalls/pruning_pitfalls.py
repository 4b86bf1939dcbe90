"""Mistakes with pruning on two ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from common.models.networks import SimpleNN
from common.ranks.rendezvous import World
from common.techniques.pruning import pruning_masks
from common.techniques.pruning.pruning_masks import Masks
from tests.harness.pitfalls.outcomes import collect_from_ranks, record_outcome


def masks_per_rank() -> Any:
    """The mistake: each rank scores weights by its local gradient. Afterward, the gradients are averaged."""

    def prune(world: World) -> Any:
        torch.manual_seed(0)
        model = SimpleNN()
        masks = Masks(model)
        torch.manual_seed(world.rank)  # each rank has a different shard of the batch
        F.cross_entropy(model(torch.randn(8, 28, 28)), torch.arange(8)).backward()
        gradients = [weight.grad for weight in masks.weights if weight.grad is not None]

        def prune_and_digest() -> str:
            masks.replace_masks(pruning_masks.make_global_masks([gradient.abs() for gradient in gradients], 0.9))
            return masks.compute_digest()

        digest_of_local_gradients = prune_and_digest()
        outcome_of_local_gradients = record_outcome(masks.assert_equal_on_ranks)
        for gradient in gradients:
            dist.all_reduce(gradient)
        digest = prune_and_digest()
        outcome = record_outcome(masks.assert_equal_on_ranks)
        return {
            "digest of local gradients": digest_of_local_gradients,
            "outcome of local gradients": outcome_of_local_gradients,
            "digest": digest,
            "outcome": outcome,
        }

    return collect_from_ranks(2, prune)
