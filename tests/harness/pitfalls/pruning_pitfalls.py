"""Mistakes about pruning, planted in two processes (tests/harness/pitfalls/ddp_pitfalls.py)."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from common.models.networks import SimpleNN
from common.ranks.rendezvous import World
from common.techniques.pruning import pruning_masks
from common.techniques.pruning.pruning_masks import Masks
from tests.harness.pitfalls.ddp_pitfalls import attempt, in_two


def masks_per_rank() -> Any:
    """The mistake: each process scores weights by its local gradient."""

    def work(world: World) -> Any:
        torch.manual_seed(0)
        model = SimpleNN()
        masks = Masks(model)
        torch.manual_seed(world.rank)  # each process has a different shard of the batch
        F.cross_entropy(model(torch.randn(8, 28, 28)), torch.arange(8)).backward()
        gradients = [weight.grad for weight in masks.weights if weight.grad is not None]

        def prune_and_digest() -> str:
            masks.replace_masks(pruning_masks.make_global_masks([gradient.abs() for gradient in gradients], 0.9))
            return masks.compute_digest()

        digest_of_local_gradients = prune_and_digest()
        error_of_local_gradients = attempt(masks.assert_equal_on_ranks)
        for gradient in gradients:
            dist.all_reduce(gradient)
        digest = prune_and_digest()
        error = attempt(masks.assert_equal_on_ranks)
        return [digest_of_local_gradients, error_of_local_gradients, digest, error]

    return in_two(work)


if __name__ == "__main__":
    print(json.dumps({name: globals()[name]() for name in sys.argv[1:]}))
